"""estimate: seconds of each phase, of an iteration along its critical path, and tokens a second a device (eq. 5).

Invariant: only composition; what a piece takes is in cost/time.py. Every row is taken at its bound and nothing is
measured here; a figure is worth what its weakest input is worth, and its basis is its formula. Pipelines' bubbles and
Python functions are left out, and noted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..backends.spec import EngineSpec
from ..cost import between as costs
from ..cost import holdings
from ..cost.lengths import Rows
from ..cost.time import Costs
from ..hardware.cluster import Figure, weakest
from ..ir import verify
from ..ir.attributes import Generate, ReshardingEdge, Update
from ..ir.graph import Graph
from ..ir.instruction import Walk, Walker
from ..ir.plan import FUNCTIONS, Estimate, Note, Phase, Plan
from .spec import Pass

EXCHANGE = "gradient exchange"


@dataclass(frozen=True)
class EstimateTime(Pass):
    """`engines` are the specs by name; `rows` the responses of an iteration, where their lengths are known, not only
    their bounds."""

    name = "estimate"
    needs = ("place", "reshard", "schedule", "traffic")

    engines: Mapping[str, EngineSpec]
    rows: Rows | None = None

    def verify(self, plan: Plan) -> Iterator[str]:
        return verify.estimate(plan)

    def apply(self, plan: Plan) -> Plan:
        seconds: dict[tuple[str, str], Figure] = {}  # by instruction
        used: dict[tuple[str, str], set[str]] = {}  # the pools whose ranks take part
        phases: list[Phase] = []
        for r in plan.reshards:
            src, dst = plan.placement(r.src).pool, plan.placement(r.dst).pool
            seconds["RESHARD", r.dst], used["RESHARD", r.dst] = costs.reshard(plan, r), {src, dst}
            if r.swap_in.bytes:
                seconds["SWAP_IN", r.src], used["SWAP_IN", r.src] = costs.swap_in(r), {src}
        # Edges of other pools run beside these: an iteration shows what the slowest rank spends on its own.
        for name, op in (("reshard", "RESHARD"), ("swap in (H2D)", "SWAP_IN")):
            by_pool = {p.name: [f for k, f in seconds.items() if k[0] == op and p.name in used[k]] for p in plan.pools}
            pool, found = max(by_pool.items(), key=lambda item: sum(f.value for f in item[1]))
            if found:
                basis = found[0].basis if len(found) == 1 else "the sum of all resharding edges'"
                phases.append(Phase(name, pool, Figure(sum(f.value for f in found), weakest(*found), basis)))
        for node in plan.graph.nodes:
            pool = plan.placement(node.name).pool
            if pool == FUNCTIONS:
                if node.verb != "source":
                    figure = costs.function(plan, holdings.row_count(plan, node.name))
                    phases.append(Phase(node.name, pool, figure))
                    seconds["RUN", node.name] = figure
                continue
            figure, exchange = self.of_node(plan, node.name)
            phases.append(Phase(node.name, pool, figure))
            seconds["RUN", node.name] = figure
            if exchange.value:
                phases.append(Phase(f"{EXCHANGE} of {node.name}", pool, exchange))
                seconds["RUN", node.name] = Figure(
                    figure.value + exchange.value, weakest(figure, exchange), "compute, then exchange"
                )
        dispatch = [t.seconds for t in plan.traffic if t.bytes]
        if dispatch:
            total = sum(f.value for f in dispatch)
            phases.append(
                Phase("dispatch, all sample edges", "docks", Figure(total, weakest(*dispatch), "the sum of the edges"))
            )
        around = costs.around(plan)
        phases.append(Phase("start and end", "driver", around))
        length, path = critical(plan, {k: f.value for k, f in seconds.items()})
        length += around.value
        source = weakest(around, plan.cluster.device.overheads.handover, *seconds.values(), *dispatch)
        iteration = Figure(length, source, f"critical path: {path}")
        notes = plan.notes
        if names := [
            n.name for n in plan.graph.nodes if plan.placement(n.name).pool == FUNCTIONS and n.verb != "source"
        ]:
            notes += (
                Note("estimate", f"of Python functions only their calls count, not what they do: {', '.join(names)}"),
            )
        if words := unfiltered(plan.graph):
            notes += (Note("estimate", words),)
        off_policy = {"staleness": any(ReshardingEdge.of(e).staleness for e in plan.graph.reshards())}
        off_policy["partial"] = any(Generate.of(n).partial > 1 for n in plan.graph.verb("generate"))
        if any(off_policy.values()):
            what = " and ".join(f"`{k}`" for k, there in off_policy.items() if there)
            notes += (
                Note(
                    "estimate",
                    f"of an iteration by itself, each row whole: what {what} gains, `msrl-compile --simulate N` shows",
                ),
            )
        return replace(plan, estimate=Estimate(tuple(phases), iteration, _throughput(plan, iteration)), notes=notes)

    def of_node(self, plan: Plan, node: str) -> tuple[Figure, Figure]:
        """What a node takes in an iteration, and its exchanges of gradients; of the plan's placements only its own
        counts."""
        costs = Costs(plan, self.engines, node)
        exchange = costs.exchange()
        return self._seconds(costs), replace(exchange, value=exchange.value * costs.steps())

    def _seconds(self, node: Costs) -> Figure:
        """All of an iteration's rows, but for the exchange of gradients."""
        if node.graph_node.verb == "generate":
            return self._generate(node)
        plan, batches, epochs = node.plan, node.micro_batches(), Update.of(node.graph_node).epochs
        count = holdings.row_count(plan, node.node) / (node.layout.dp * batches)
        batch = node.micro_batch(node.rows(count) if self.rows is None else self._part(node, self.rows, count))
        seconds, basis, source = batch.value * batches * epochs, f"micro-batches: {batch.basis}", batch.source
        if node.graph_node.verb == "update":
            step = node.optimizer_step()
            seconds += step.value * node.steps()
            basis, source = f"{basis}; steps: {step.basis}", weakest(batch, step)
        elif (fetch := node.fetch()).value:
            seconds, basis, source = seconds + fetch.value, f"{basis}; {fetch.basis}", weakest(batch, fetch)
        return Figure(seconds, source, basis)

    def _part(self, node: Costs, rows: Rows, count: float) -> Rows:
        """So many of an iteration's rows: those of an update's mini-batch are drawn from all prompts, then parted as
        they follow."""
        samples = max((holdings.samples(node.plan, n.name) for n in node.plan.graph.verb("generate")), default=1)
        mini = Update.of(node.graph_node).step_rows(rows.count) if node.graph_node.verb == "update" else rows.count
        drawn = rows.drawn(mini / rows.count, samples) if mini < rows.count else rows
        return drawn.part(count / drawn.count)

    def _generate(self, node: Costs) -> Figure:
        plan, name = node.plan, node.node
        samples, prompts = holdings.samples(plan, name), holdings.group_rows(plan, name)
        written = holdings.written_tokens(plan, name)
        rows = self.rows or Rows.alike(prompts * samples, holdings.row_tokens(plan, name) - written, written, samples)
        prompt = rows.prompt / rows.count
        # The first token comes with the prompt, the last of a row is not fed; rows that have drawn alike so far may be
        # one.
        steps = max(rows.longest - prompt - 1, 0)
        fed = rows.response - rows.count
        if node.device.kind.where in node.spec.shares_beginnings:
            fed -= rows.alike_response - rows.twins
        fed /= rows.count
        at_once, _ = holdings.waves(plan, name)
        prefill = step = Figure(0.0, "derived", "nothing is generated")
        total = node.opened(min(at_once, prompts) * samples).value
        while prompts > 0:
            wave = min(at_once, prompts)
            alike = prompts // wave
            prefill = node.prefill([prompt] * wave)
            live = wave * samples * fed / max(steps, 1)
            parted = max(wave * samples * (1 - rows.twins / rows.count) - wave, 0) if steps else 0.0
            step = node.decode_step(live, live * (prompt + steps / 2), parted / max(steps, 1), prompt)
            total += alike * (prefill.value + steps * step.value)
            prompts -= alike * wave
        host = plan.cluster.device.overheads.row
        total += holdings.group_rows(plan, name) * samples * host.value
        return Figure(total, weakest(prefill, step, host), f"a wave: prefill {prefill.basis}; each step {step.basis}")


def unfiltered(graph: Graph) -> str:
    """What is not known of filters, whose functions are not run; nothing where there are none."""
    names = [n.name for n in graph.nodes if n.filters and n.verb != "generate"]
    return f"rows that filters drop count to the end, and a refill's rounds do not: {', '.join(names)}" if names else ""


def critical(plan: Plan, seconds: Mapping[tuple[str, str], float]) -> tuple[float, str]:
    """When the last of an iteration is done, and the chain that leads there: streams run side by side, rows come by the
    edges."""
    return _Clock(plan, seconds).end()


class _Clock(Walker):
    """The time in each pool while an iteration goes by. A function starts when its rows are there; a node on devices
    has its turn in its stream. The ranks of a CPU cluster have all cores, so what functions take is taken from them."""

    def __init__(self, plan: Plan, seconds: Mapping[tuple[str, str], float]) -> None:
        self.plan, self.seconds = plan, seconds
        self.edges = {(t.src, t.dst): t.seconds.value for t in plan.traffic}
        self.shared = plan.cluster.device.kind.is_host
        self.functions = {p.node: seconds.get(("RUN", p.node), 0.0) for p in plan.placements if p.pool == FUNCTIONS}
        self.handover = costs.handover(plan).value
        # By node: of the nodes that its rows come from, how many are not done.
        self.waits = {n.name: len(plan.graph.into(n.name)) for n in plan.graph.nodes}
        streams = {s.pool: s.instructions for s in plan.schedule if s.task == "train" and s.pool != FUNCTIONS}
        self.walk = Walk(streams)
        self.clock = dict.fromkeys(streams, 0.0)
        self.before = dict.fromkeys(streams, "")  # by pool: what it ran last
        self.done: dict[str, float] = {}
        self.cause: dict[str, str] = {}
        self.back: dict[str, float] = {}

    def end(self) -> tuple[float, str]:
        for name in [n for n in self.functions if not self.waits[n]]:
            self._start(name)
        self.walk.finish(self)
        last = max(self.done, key=lambda n: (self.done[n], n), default="")
        length, chain = self.done.get(last, 0.0) + self.shared * sum(self.functions.values()), []
        while last:
            chain.append(last)
            last = self.cause.get(last, "")
        return length, " > ".join(reversed(chain))

    def _arrival(self, name: str) -> tuple[float, str]:
        done, edges, handover = self.done, self.edges, self.handover
        into = [(done[e.src] + edges.get((e.src, name), 0.0) + handover, e.src) for e in self.plan.graph.into(name)]
        return max(into, default=(0.0, ""))

    def _start(self, name: str) -> None:
        """A function, and all that start when it is done."""
        ready = [name]
        while ready:
            name = ready.pop()
            self.done[name], self.cause[name] = self._arrival(name)
            self.done[name] += 0.0 if self.shared else self.functions[name]
            ready += self._follow(name)

    def _follow(self, name: str) -> list[str]:
        """The functions for which a node that is done was the last to wait for."""
        after = [e.dst for e in self.plan.graph.out_of(name)]
        for other in after:
            self.waits[other] -= 1
        return [other for other in after if not self.waits[other] and other in self.functions]

    def ready(self, pool: str, node: str) -> bool:
        return not self.waits[node]

    def run(self, pool: str, node: str) -> None:
        arrived, by = self._arrival(node)
        self.cause[node] = by if arrived > self.clock[pool] else self.before[pool]
        self.clock[pool] = max(self.clock[pool], arrived) + self.seconds.get(("RUN", node), 0.0)
        self.done[node], self.before[pool] = self.clock[pool], node
        for name in self._follow(node):
            self._start(name)

    def reshard(self, pools: Sequence[str], src: str, dst: str) -> None:
        slowest = max(sorted(pools), key=lambda p: self.clock[p])
        self.clock.update(dict.fromkeys(pools, self.clock[slowest] + self.seconds.get(("RESHARD", dst), 0.0)))
        self.before.update(dict.fromkeys(pools, self.before[slowest]))

    def release(self, pool: str, node: str) -> None:
        """It takes no time."""

    def swap_in(self, pool: str, node: str) -> None:
        self.back[node] = self.clock[pool] + self.seconds.get(("SWAP_IN", node), 0.0)

    def wait(self, pool: str, node: str) -> None:
        self.clock[pool] = max(self.clock[pool], self.back.get(node, 0.0))

    def again(self, pool: str, node: str, rounds: int) -> bool:
        """Nobody knows how many rounds of prompts filters ask for: one is counted, and a note says so."""
        return False


def _throughput(plan: Plan, iteration: Figure) -> Figure:
    """Eq. 5, with the token columns of the longest rows that are generated (or read by an update, off-line)."""
    nodes = [n.name for n in plan.graph.verb("generate")] or [n.name for n in plan.graph.verb("update")]
    if not nodes or not iteration.value:
        return Figure(0.0, iteration.source, "nothing is generated or updated")
    node = nodes[0]
    written = holdings.written_tokens(plan, node)
    prompt = holdings.row_tokens(plan, node) - written
    value = holdings.row_count(plan, node) * (prompt + written) / plan.cluster.devices / iteration.value
    return Figure(value, iteration.source, "rows x (prompt + response) / devices / seconds (arXiv:2507.19017, eq. 5)")
