"""estimate: seconds of each phase, of an iteration along its critical path, and tokens a second a device (eq. 5).

Invariant: only composition; what a piece takes is in cost/time.py. Every row is taken at its bound and nothing is measured here; a figure
is worth what its weakest input is worth, and its basis is its formula. Pipelines' bubbles and Python functions are left out, and noted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..backends.spec import EngineSpec
from ..cost import holdings
from ..cost import time as costs
from ..cost.lengths import Rows
from ..cost.time import Costs
from ..hardware.cluster import Figure, weakest
from ..ir.graph import Graph
from ..ir.plan import FUNCTIONS, Estimate, Note, Phase, Plan

EXCHANGE = "gradient exchange"


@dataclass(frozen=True)
class EstimateTime:
    """`engines` are the specs by name; `rows` the responses of an iteration, where their lengths are known, not only their bounds."""

    engines: Mapping[str, EngineSpec]
    rows: Rows | None = None

    def __call__(self, plan: Plan) -> Plan:
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
            figure, exchange = self.state(plan, node.name)
            phases.append(Phase(node.name, pool, figure))
            seconds["RUN", node.name] = figure
            if exchange.value:
                phases.append(Phase(f"{EXCHANGE} of {node.name}", pool, exchange))
                seconds["RUN", node.name] = Figure(figure.value + exchange.value, weakest(figure, exchange), "compute, then exchange")
        dispatch = [t.seconds for t in plan.traffic if t.bytes]
        if dispatch:
            total = sum(f.value for f in dispatch)
            phases.append(Phase("dispatch, all sample edges", "docks", Figure(total, weakest(*dispatch), "the sum of the edges")))
        around = costs.around(plan)
        phases.append(Phase("start and end", "driver", around))
        length, path = critical(plan, {k: f.value for k, f in seconds.items()})
        length += around.value
        source = weakest(around, plan.cluster.device.overheads.handover, *seconds.values(), *dispatch)
        iteration = Figure(length, source, f"critical path: {path}")
        notes = plan.notes
        if names := [n.name for n in plan.graph.nodes if plan.placement(n.name).pool == FUNCTIONS and n.verb != "source"]:
            notes += (Note("estimate", f"of Python functions only their calls count, not what they do: {', '.join(names)}"),)
        if words := unfiltered(plan.graph):
            notes += (Note("estimate", words),)
        off_policy = {"staleness": any(e.staleness for e in plan.graph.reshards())}
        off_policy["partial"] = any(n.number("partial", 1) > 1 for n in plan.graph.verb("generate"))
        if any(off_policy.values()):
            what = " and ".join(f"`{k}`" for k, there in off_policy.items() if there)
            notes += (Note("estimate", f"of an iteration by itself, each row whole: what {what} gains, `msrl-compile --simulate N` shows"),)
        return replace(plan, estimate=Estimate(tuple(phases), iteration, _throughput(plan, iteration)), notes=notes)

    def state(self, plan: Plan, node: str) -> tuple[Figure, Figure]:
        """What a state takes in an iteration, and its exchanges of gradients; of the plan's placements only its own counts."""
        state = Costs(plan, self.engines, node)
        exchange = state.exchange()
        return self._state(state), replace(exchange, value=exchange.value * state.steps())

    def _state(self, node: Costs) -> Figure:
        """All of an iteration's rows, but for the exchange of gradients."""
        if node.state.verb == "generate":
            return self._generate(node)
        plan, batches, epochs = node.plan, node.micro_batches(), int(node.state.number("epochs", 1))
        count = holdings.row_count(plan, node.node) / (node.layout.dp * batches)
        batch = node.micro_batch(node.rows(count) if self.rows is None else self._part(node, self.rows, count))
        seconds, basis, source = batch.value * batches * epochs, f"micro-batches: {batch.basis}", batch.source
        if node.state.verb == "update":
            step = node.optimizer_step()
            seconds += step.value * node.steps()
            basis, source = f"{basis}; steps: {step.basis}", weakest(batch, step)
        elif (fetch := node.fetch()).value:
            seconds, basis, source = seconds + fetch.value, f"{basis}; {fetch.basis}", weakest(batch, fetch)
        return Figure(seconds, source, basis)

    def _part(self, node: Costs, rows: Rows, count: float) -> Rows:
        """So many of an iteration's rows: those of an update's mini-batch are drawn from all prompts, then parted as they follow."""
        samples = max((holdings.samples(node.plan, n.name) for n in node.plan.graph.verb("generate")), default=1)
        mini = node.state.number("mini_batch", rows.count) if node.state.verb == "update" else rows.count
        drawn = rows.drawn(mini / rows.count, samples) if mini < rows.count else rows
        return drawn.part(count / drawn.count)

    def _generate(self, node: Costs) -> Figure:
        plan, name = node.plan, node.node
        samples, prompts = holdings.samples(plan, name), holdings.group_rows(plan, name)
        written = holdings.written_tokens(plan, name)
        rows = self.rows or Rows.alike(prompts * samples, holdings.row_tokens(plan, name) - written, written, samples)
        prompt = rows.prompt / rows.count
        # The first token comes with the prompt, the last of a row is not fed; rows that have drawn alike so far may be one.
        steps = max(rows.longest - prompt - 1, 0)
        fed = rows.response - rows.count
        if node.spec.shares_beginnings:
            fed -= rows.alike_response - rows.twins
        fed /= rows.count
        at_once, _ = holdings.waves(plan, name)
        prefill = step = Figure(0.0, "derived", "nothing is generated")
        total = 0.0
        while prompts > 0:
            wave = min(at_once, prompts)
            alike = prompts // wave
            prefill = node.prefill([prompt] * wave)
            live = wave * samples * fed / max(steps, 1)
            step = node.decode_step(live, live * (prompt + steps / 2))
            total += alike * (prefill.value + steps * step.value)
            prompts -= alike * wave
        host = plan.cluster.device.overheads.row
        total += holdings.group_rows(plan, name) * samples * host.value
        return Figure(total, weakest(prefill, step, host), f"a wave: prefill {prefill.basis}; each step {step.basis}")


def unfiltered(graph: Graph) -> str:
    """What is not known of filters, whose functions are not run; nothing where there are none."""
    names = [n.name for n in graph.nodes if n.filters]
    return f"rows that filters drop count to the end, and a refill's rounds do not: {', '.join(names)}" if names else ""


def critical(plan: Plan, seconds: Mapping[tuple[str, str], float]) -> tuple[float, str]:
    """When the last of an iteration is done, and the chain that leads there: streams run side by side, rows come by the edges. The ranks
    of a CPU cluster have all cores, so what functions take is taken from them."""
    done: dict[str, float] = {}
    cause: dict[str, str] = {}
    streams = {s.pool: list(s.instructions) for s in plan.schedule if s.task == "train" and s.pool != FUNCTIONS}
    edges = {(t.src, t.dst): t.seconds.value for t in plan.traffic}
    shared = plan.cluster.device.backend == "cpu"
    functions = {p.node: seconds.get(("RUN", p.node), 0.0) for p in plan.placements if p.pool == FUNCTIONS}
    handover = costs.handover(plan).value
    waits = {n.name: len(plan.graph.into(n.name)) for n in plan.graph.nodes}  # by node: what its rows come from and is not done

    def arrival(name: str) -> tuple[float, str]:
        into = [(done[e.src] + edges.get((e.src, name), 0.0) + handover, e.src) for e in plan.graph.into(name)]
        return max(into, default=(0.0, ""))

    def start(name: str) -> None:
        """A function starts when its rows are there; a state on devices has its turn in the stream, which is walked in order."""
        ready = [name]
        while ready:
            name = ready.pop()
            done[name], cause[name] = arrival(name)
            done[name] += 0.0 if shared else functions[name]
            ready += follow(name)

    def follow(name: str) -> list[str]:
        """The functions for which a node that is done was the last to wait for."""
        after = [e.dst for e in plan.graph.out_of(name)]
        for other in after:
            waits[other] -= 1
        return [other for other in after if not waits[other] and other in functions]

    clock, before, back = dict.fromkeys(streams, 0.0), dict.fromkeys(streams, ""), dict[str, float]()

    def advance(pool: str) -> bool:
        """Takes the pool's next step, if what it needs is done."""
        if not streams[pool]:
            return False
        step = streams[pool][0]
        if step.op == "RESHARD":
            ends = {plan.placement(step.node).pool, plan.placement(step.other).pool}
            if any(streams[p][:1] != [step] for p in ends):
                return False
            slowest = max(sorted(ends), key=lambda p: clock[p])
            clock.update(dict.fromkeys(ends, clock[slowest] + seconds.get((step.op, step.other), 0.0)))
            before.update(dict.fromkeys(ends, before[slowest]))
            for other in ends - {pool}:
                streams[other].pop(0)
        elif step.op == "SWAP_IN":
            back[step.node] = clock[pool] + seconds.get((step.op, step.node), 0.0)
        elif step.op == "WAIT":
            clock[pool] = max(clock[pool], back.get(step.node, 0.0))
        elif step.op == "RUN":
            if waits[step.node]:
                return False
            ready, by = arrival(step.node)
            cause[step.node] = by if ready > clock[pool] else before[pool]
            clock[pool] = max(clock[pool], ready) + seconds.get((step.op, step.node), 0.0)
            done[step.node], before[pool] = clock[pool], step.node
            for name in follow(step.node):
                start(name)
        streams[pool].pop(0)
        return True

    for name in [n for n in functions if not waits[n]]:
        start(name)
    while any(advance(pool) for pool in streams):
        pass
    last = max(done, key=lambda n: (done[n], n), default="")
    length, chain = done.get(last, 0.0) + shared * sum(functions.values()), []
    while last:
        chain.append(last)
        last = cause.get(last, "")
    return length, " > ".join(reversed(chain))


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
