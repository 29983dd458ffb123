"""estimate: seconds of each phase, of an iteration along its critical path, and tokens a second a device (eq. 5).

Invariant: every row is taken at its bound and nothing is measured here; a figure is worth what its weakest input is worth, and its
basis is its formula. Attention's quadratic part, pipelines' bubbles and Python functions are left out, and noted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..closed_forms import throughput
from ..cluster import Figure, weakest
from ..engine import BYTES, EngineSpec
from ..graph import Node
from ..plan import Estimate, Note, Phase, Plan
from . import holdings
from .pools import FUNCTIONS

UTILISATION = Figure(0.4, "assumed", "40 % of peak FLOP/s")
KERNELS = Figure(12, "assumed", "12 kernels a layer")
EXCHANGE = "gradient exchange"


@dataclass(frozen=True)
class EstimateTime:
    """`engines` are the specs by name."""

    engines: Mapping[str, EngineSpec]

    def __call__(self, plan: Plan) -> Plan:
        seconds: dict[tuple[str, str], Figure] = {}  # by instruction
        phases: list[Phase] = []
        for r in plan.reshards:
            total = sum(s.seconds.value for s in r.steps)
            count = "four" if r.mode == "send" else "five"
            seconds["RESHARD", r.dst] = Figure(total, weakest(*(s.seconds for s in r.steps)), f"the sum of the {count} steps")
            if r.swap_in.bytes:
                seconds["SWAP_IN", r.src] = r.swap_in.seconds
        for name, op in (("reshard", "RESHARD"), ("swap in (H2D)", "SWAP_IN")):
            if keys := [k for k in seconds if k[0] == op]:
                found = [seconds[k] for k in keys]
                basis = found[0].basis if len(found) == 1 else "the sum of all resharding edges'"
                pool = plan.placement(keys[0][1]).pool
                phases.append(Phase(name, pool, Figure(sum(f.value for f in found), weakest(*found), basis)))
        for node in plan.graph.nodes:
            pool = plan.placement(node.name).pool
            if pool == FUNCTIONS:
                continue
            figure = self._state(plan, node)
            phases.append(Phase(node.name, pool, figure))
            seconds["RUN", node.name] = figure
            exchange = self._exchange(plan, node)
            if exchange.value:
                phases.append(Phase(f"{EXCHANGE} of {node.name}", pool, exchange))
                seconds["RUN", node.name] = Figure(figure.value + exchange.value, weakest(figure, exchange), "compute, then exchange")
        dispatch = [t.seconds for t in plan.traffic if t.bytes]
        if dispatch:
            total = sum(f.value for f in dispatch)
            phases.append(Phase("dispatch, all sample edges", "docks", Figure(total, weakest(*dispatch), "the sum of the edges")))
        length, path = _critical(plan, {k: f.value for k, f in seconds.items()})
        source = weakest(*seconds.values(), *dispatch) if seconds else "derived"
        iteration = Figure(length, source, f"critical path: {path}")
        notes = plan.notes
        if names := [n.name for n in plan.graph.nodes if plan.placement(n.name).pool == FUNCTIONS and n.verb != "source"]:
            notes += (Note("estimate", f"Python functions count as 0 seconds until a run measures them: {', '.join(names)}"),)
        return replace(plan, estimate=Estimate(tuple(phases), iteration, _throughput(plan, iteration)), notes=notes)

    def _state(self, plan: Plan, node: Node) -> Figure:
        if node.verb == "generate":
            return self._generate(plan, node.name)
        device, model = plan.cluster.device, plan.model(node.name)
        flops = device.flops[holdings.dtype(plan, node.name)]
        factor = 2
        if node.verb == "update":
            factor = 8 if plan.placement(node.name).engine.options.get("recompute") == "full" else 6
        tokens = holdings.row_count(plan, node.name) * holdings.row_tokens(plan, node.name)
        compute = factor * model.parameters * tokens / (plan.placement(node.name).layout.devices * flops.value * UTILISATION.value)
        batches = -(-holdings.group_rows(plan, node.name) // holdings.micro_batch(plan, node.name))
        overhead = batches * model.layers * KERNELS.value * device.launch.value * factor / 2
        basis = f"{factor} x parameters x tokens / (devices x {UTILISATION.value} x FLOP/s) + micro-batches x layers x 12 x launch"
        epochs = int(node.number("epochs", 1))
        return Figure((compute + overhead) * epochs, weakest(flops, device.launch, UTILISATION, KERNELS), basis)

    def _generate(self, plan: Plan, node: str) -> Figure:
        device, model, layout = plan.cluster.device, plan.model(node), plan.placement(node).layout
        dtype = holdings.dtype(plan, node)
        flops, bandwidth = device.flops[dtype], device.memory_bandwidth
        at_once, _ = holdings.waves(plan, node)
        written, whole = holdings.written_tokens(plan, node), holdings.row_tokens(plan, node)
        prompt = whole - written
        rate = layout.tp * flops.value * UTILISATION.value
        cache = 2 * model.layers * -(-model.kv_heads // layout.tp) * model.head_dim * BYTES[dtype] * (prompt + written / 2)
        launches = model.layers * KERNELS.value * device.launch.value
        prompts, samples, total = holdings.group_rows(plan, node), holdings.samples(plan, node), 0.0
        while prompts > 0:
            wave = min(at_once, prompts)
            rows, alike = wave * samples, prompts // wave
            moved = holdings.weights(plan, self.engines, node) + rows * cache
            step = max(moved / bandwidth.value, 2 * model.parameters * rows / rate) + launches
            # A prompt is prefilled once for all its samples.
            total += alike * (2 * model.parameters * wave * prompt / rate + written * step)
            prompts -= alike * wave
        basis = "prefill 2 x parameters x tokens / FLOP/s; each step max((weights + KV read) / bandwidth, compute) + launches, a wave"
        return Figure(total, weakest(flops, bandwidth, device.launch, UTILISATION, KERNELS), basis)

    def _exchange(self, plan: Plan, node: Node) -> Figure:
        """The gradients' ring all-reduce over dp (2 x bytes x (dp - 1) / dp a rank), once an optimizer step."""
        cluster, first, layout = plan.cluster, plan.placement(node.name).first, plan.placement(node.name).layout
        if node.verb != "update" or layout.dp == 1:
            return Figure(0.0, "derived", "one data-parallel group")
        rows = holdings.row_count(plan, node.name)
        steps = max(1, rows // int(node.number("mini_batch", rows))) * int(node.number("epochs", 1))
        whole = plan.model(node.name).parameters * BYTES[holdings.dtype(plan, node.name)] // layout.tp
        ring = 2 * whole * (layout.dp - 1) / layout.dp * steps
        if cluster.host(first) == cluster.host(first + layout.devices - 1):
            return Figure(
                ring / cluster.device.device_link.value, cluster.device.device_link.source, "2 x gradients x (dp - 1) / dp / device link"
            )
        rings = min(layout.tp, cluster.devices_per_node)
        basis = f"2 x gradients x (dp - 1) / dp, {rings} ring(s) through each host's network link; {cluster.network.basis}"
        return Figure(ring * rings / cluster.network.value, cluster.network.source, basis)


def _critical(plan: Plan, seconds: Mapping[tuple[str, str], float]) -> tuple[float, str]:
    """When the last of an iteration is done, and the chain that leads there: streams run side by side, rows come by the edges."""
    done: dict[str, float] = {}
    cause: dict[str, str] = {}
    streams = {s.pool: list(s.instructions) for s in plan.schedule if s.task == "train" and s.pool != FUNCTIONS}
    edges = {(t.src, t.dst): t.seconds.value for t in plan.traffic}
    order = {n.name: n for n in plan.graph.nodes}

    def arrival(name: str) -> tuple[float, str]:
        into = [(finish(e.src) + edges.get((e.src, name), 0.0), e.src) for e in plan.graph.samples() if e.dst == name]
        return max(into, default=(0.0, ""))

    def finish(name: str) -> float:
        # A function starts when its rows are there; a state on devices has its turn in the stream, which is walked in order.
        if name not in done and plan.placement(name).pool == FUNCTIONS:
            done[name], cause[name] = arrival(name)
        return done.get(name, 0.0)

    def known(name: str) -> bool:
        """Whether all that a state's rows come from is done."""
        sources = [e.src for e in plan.graph.samples() if e.dst == name]
        return all(s in done or (plan.placement(s).pool == FUNCTIONS and known(s)) for s in sources)

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
            if not known(step.node):
                return False
            ready, by = arrival(step.node)
            cause[step.node] = by if ready > clock[pool] else before[pool]
            clock[pool] = max(clock[pool], ready) + seconds.get((step.op, step.node), 0.0)
            done[step.node], before[pool] = clock[pool], step.node
        streams[pool].pop(0)
        return True

    while any(advance(pool) for pool in streams):
        pass
    for name in order:
        finish(name)
    last = max(done, key=lambda n: (done[n], n), default="")
    length, chain = done.get(last, 0.0), []
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
    value = throughput(holdings.row_count(plan, node), 1, prompt, written, plan.cluster.devices, iteration.value)
    return Figure(value, iteration.source, "rows x (prompt + response) / devices / seconds (arXiv:2507.19017, eq. 5)")
