"""A plan as text: what runs where, moves, fits and takes how long, with reasons.

Invariant: every figure has its source next to it (measured, derived, datasheet, stated, assumed), every choice its
reason. At 100 columns no table is cut off; without a terminal there is no colour.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..hardware.cluster import Figure
from ..hardware.environment_variables import Setting
from ..ir.async_schedule import late_states, row_age_bound
from ..ir.attributes import GenerateAttributes
from ..ir.concurrency import MAX_ASYNC_CALLS, concurrent_calls, read_signature
from ..ir.graph import Graph, Node, Worker
from ..ir.plan import EngineChoice, Plan
from .evaluations import write_evaluations
from .humanize import doing, duration, laid, many, size, spread, staleness
from .placed_graph import placed
from .resharding import write_reshards
from .text_page import WIDTH, Page, Sheet


def plan_text(plan: Plan, width: int = WIDTH, colour: bool = False) -> str:
    """Format a plan; parts that no pass has filled yet are left out."""
    page = Page(width, colour)
    write_plan(page, plan)
    return page.text()


def write_plan(page: Sheet, plan: Plan) -> None:
    """Write a plan to any sheet."""
    _head(page, plan)
    if plan.placements:
        _pools(page, plan)
    _kept(page, plan.graph)
    if plan.docks.controllers:
        _docks(page, plan)
    if plan.traffic:
        _traffic(page, plan)
    write_reshards(page, plan)
    if plan.schedule:
        _schedule(page, plan)
    write_evaluations(page, plan)
    if plan.memory:
        _memory(page, plan)
    if plan.estimate is not None:
        _estimate(page, plan)
    if plan.surroundings:
        _surroundings(page, plan)
    if plan.notes:
        page.heading("Notes")
        for note in plan.notes:
            page.line(f"{note.about}: {note.text}")
    page.closing(_count(plan))


def graph_text(graph: Graph, width: int = WIDTH, colour: bool = False) -> str:
    """Format an algorithm: workers, columns, states, edges."""
    page = Page(width, colour)
    write_graph(page, graph)
    return page.text()


def _worker(worker: Worker) -> Iterator[str]:
    yield worker.kind
    if worker.frozen:
        yield worker.following or "frozen"


def write_graph(page: Sheet, graph: Graph) -> None:
    """Write an algorithm to any sheet."""
    page.heading(f"Algorithm {graph.name}", f"{_rows(graph)} an iteration")
    if graph.params:
        page.line("params: " + ", ".join(f"{k} = {v}" for k, v in graph.params.items()))
    page.heading("Workers")
    page.table(
        ("worker", "kind", "model"),
        [(w.name, ", ".join(_worker(w)), w.model or "-") for w in graph.workers],
    )
    page.heading("Columns")
    writers = {c: n.name for n in graph.nodes for c in n.writes}
    rows = []
    for c in graph.columns:
        dims = ", ".join(d.like or f"{'<= ' if d.ragged else ''}{d.size:,}" for d in c.dims)
        most = "unbounded" if c.element in ("text", "json") else size(graph.row_bytes(c.name))
        readers = ", ".join(n.name for n in graph.nodes if c.name in n.reads)
        kind = (f"{c.element}[{dims}]" if dims else c.element) + (f" per {c.per}" if c.per else "")
        rows.append((c.name, kind, str(c.level), most, writers.get(c.name, "-"), readers or "-"))
    page.table(("column", "type", "level", "bytes a row", "written by", "read by"), rows, right=(2, 3), keep=(0, 1))
    _kept(page, graph)
    page.heading("States")
    listed = []
    for n in graph.nodes:
        attributes = ", ".join(f"{k} = {v}" for k, v in n.attributes.items())
        listed.append(
            (
                n.name,
                ", ".join((*n.reads, *n.states)) or "-",
                ", ".join(n.gives or n.writes) or "-",
                n.per,
                attributes or "-",
            )
        )
    page.table(("state", "reads", "writes", "per", "attributes"), listed)
    page.heading("Edges")
    edges = [
        (e.src, "->" if e.kind == "sample" else "=>", e.dst, ", ".join(f"{k} = {v}" for k, v in e.attributes.items()))
        for e in graph.edges
    ]
    page.table(("from", "", "to", "attributes"), edges)
    samples = len(graph.samples())
    reshards = len(graph.reshards())
    page.closing(
        f"Graph: {many(len(graph.nodes), 'state')}, {many(samples, 'sample edge')}, {many(reshards, 'reshard')}."
    )


def _kept(page: Sheet, graph: Graph) -> None:
    """Write the states of the algorithm: which nodes set and read each."""
    if not graph.states:
        return
    page.heading("Values that outlive an iteration")
    kept = []
    for state in graph.states:
        setters = [n.name for n in graph.nodes if state.name in n.sets]
        users = [n.name for n in graph.nodes if state.name in n.states]
        kept.append(
            (
                state.name,
                state.element,
                state.per or "-",
                str(state.initial),
                ", ".join(setters) or "-",
                ", ".join(users) or "-",
            )
        )
    page.table(("state", "type", "per", "first", "set by", "read by"), kept)


def placed_text(plan: Plan, width: int = WIDTH, colour: bool = False) -> str:
    """Format the graph with its docks and allgather-swaps."""
    page = Page(width, colour)
    write_placed(page, plan)
    return page.text()


def write_placed(page: Sheet, plan: Plan) -> None:
    """Write a placed graph to any sheet."""
    vertices, arcs = placed(plan)
    page.heading(f"Placed graph of {plan.graph.name}", f"on cluster {plan.cluster.name}")
    rows = [(v.name, v.kind, v.where, ", ".join(f"{k} {w}" for k, w in v.facts.items())) for v in vertices]
    page.table(("node", "kind", "where", "what"), rows)
    _kept(page, plan.graph)
    page.heading("Edges")
    page.table(("from", "", "to"), [(a.src, "->" if a.kind == "sample" else "=>", a.dst) for a in arcs])


def _head(page: Sheet, plan: Plan) -> None:
    cluster = plan.cluster
    device = plan.cluster.device
    graph = plan.graph
    page.heading(f"Plan of {graph.name} on {cluster.name}", f"{_rows(graph)} an iteration")
    for name, model in plan.deploy.models.items():
        page.line(f"model {name}: {model.name}, {_many(model.parameters)} parameters, {model.dtype}")
    for name, data in plan.deploy.data.items():
        page.line(f"data {name}: {data.path}")
    kind = f"{many(cluster.nodes, 'host')} of {many(cluster.devices_per_node, 'device')} `{device.name}`"
    page.line(f"cluster {cluster.name}: {kind}, {cluster.devices} in all")
    rows = [("device memory", size(device.memory.value), "", device.memory)]
    rows += [(f"FLOP/s, {dtype}", _flops(f.value), f"flops_{dtype}", f) for dtype, f in device.flops.items()]
    rows += [
        (what, f"{size(figure.value)}/s", name, figure)
        for what, name, figure in (
            ("memory bandwidth", "memory_bandwidth", device.memory_bandwidth),
            ("link to host", "host_link", device.host_link),
            ("link to device", "device_link", device.device_link),
            *([("fabric", "fabric", device.fabric)] if device.fabric else []),
            ("network", "network", cluster.network),
        )
    ]
    rows.insert(-1, ("host memory", size(device.host_memory.value), "", device.host_memory))
    lines = [
        (what, value, f"{100 * device.share(name):.0f} %" if name else "", f.source, f.basis)
        for what, value, name, f in rows
    ]
    page.table(("figure", "value", "reached", "source", "basis"), lines, right=(1, 2), keep=(0, 3))


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.3g} T" if rate >= 1e12 else f"{rate / 1e9:.3g} G"


def _rows(graph: Graph) -> str:
    """Describe the prompts of an iteration, and what is generated at each level."""
    words = [many(graph.rows[0], "prompt")]
    for level in range(1, len(graph.rows)):
        above = graph.under[level]
        what = (
            "response"
            if len(graph.rows) == 2
            else f"`{graph.made(level)}` a {f'`{graph.made(above)}`' if above else 'prompt'}"
        )
        words.append(
            many(graph.fan(level, above), what) if len(graph.rows) == 2 else f"{graph.fan(level, above):,} {what}"
        )
    return f"{' x '.join(words[:2])}{''.join(f', {w}' for w in words[2:])}"


def _pools(page: Sheet, plan: Plan) -> None:
    seconds = {p.name: p.seconds for p in plan.estimate.phases} if plan.estimate else {}
    on_devices = {p.name: p for p in plan.pools}
    for pool in dict.fromkeys([*on_devices, *(p.pool for p in plan.placements)]):
        listed = [p for p in plan.placements if p.pool == pool]
        what = "the hosts' CPUs"
        if pool in on_devices:
            found = on_devices[pool]
            how = f"{found.reason}; shared by its" if found.reason else "shared by all"
            what = f"{many(found.devices, 'device')}, {how} states in turn"
        page.heading(f"Pool {pool}", what)
        if pool in on_devices:
            rows = []
            for p in listed:
                time = seconds.get(p.node)
                cells = (
                    p.node,
                    laid(replace(p.layout, etp=1)),  # listed below, with the experts
                    p.engine.name,
                    str(p.layout.devices),
                    size(p.weight_bytes),
                    _seconds(time),
                    _source(time),
                )
                rows.append((*cells, p.reason))
            page.table(
                ("state", "layout", "engine", "devices", "weights", "seconds", "source", "why this layout"),
                rows,
                (3, 4, 5),
                (0, 1, 2, 6),
            )
            for p in listed:
                stated = plan.deploy.engines.get(p.node)
                page.line(f"engine of {p.node}: {_engine(p.engine, stated)}")
                if experts := plan.model(p.node).experts:
                    page.line(f"experts of {p.node}: {spread(experts, p.layout)}")
        else:
            page.table(("state", "hosts", "why here"), [(p.node, str(p.layout.dp), p.reason) for p in listed], (1,))
            _parallel_calls(page, plan, [plan.graph.node(p.node) for p in listed])


def _parallel_calls(page: Sheet, plan: Plan, nodes: Sequence[Node]) -> None:
    """List the functions that a host calls several times in parallel."""
    workers = plan.deploy.run.function_workers
    found = {n.name: concurrent_calls(n, workers, read_signature(n)) for n in nodes if n.verb != "source"}
    if pooled := [f"`{name}`" for name, calls in found.items() if 1 < calls == workers]:
        page.line(f"called in parallel by {workers} worker processes on each host: {', '.join(pooled)}")
    if in_loop := [f"`{name}`" for name, calls in found.items() if calls == MAX_ASYNC_CALLS != workers]:
        page.line(f"up to {MAX_ASYNC_CALLS} concurrent calls in one event loop: {', '.join(in_loop)}")


def _engine(engine: EngineChoice, stated: EngineChoice | None) -> str:
    options = ", ".join(
        f"{k} = {v}{'' if stated and k in stated.options else ' (planned)'}" for k, v in engine.options.items()
    )
    return f"{engine.name}{f' {{ {options} }}' if options else ''}, chosen by {engine.chosen}"


def _docks(page: Sheet, plan: Plan) -> None:
    docks = plan.docks
    where = (
        f"{many(len(docks.warehouses), 'warehouse')} on {'host' if len(docks.warehouses) == 1 else 'hosts'} "
        f"{_range(docks.warehouses)}"
    )
    what = f"{docks.mode}: {many(len(docks.controllers), 'controller')}, {where}; deadline {docks.deadline:g} s"
    what += f"; at most {size(docks.capacity)} of rows a host" if docks.capacity else ""
    what += (
        f"; a share may be {docks.imbalance:g} x the even share, to keep rows on their host"
        if docks.imbalance > 1
        else ""
    )
    if len({c.host for c in docks.controllers}) > 1:
        what += "; each controller is on a host with the fewest busy devices and groups to serve"
    page.heading("Transfer dock", what)
    rows = []
    for c in docks.controllers:
        batch = [f"{c.chunk}"] * (c.chunk > 0) + [many(c.chunk_tokens, "token")] * (c.chunk_tokens > 0)
        chunk = f"{' or '.join(batch)} as soon as ready" if batch else "all"
        lockstep = "in lockstep: a collective spans its groups" if c.lockstep else "each group on its own"
        rows.append((c.node, str(c.host), ", ".join(c.columns), str(c.groups), chunk, lockstep))
    page.table(("controller of", "host", "columns", "groups", "hands out", "how"), rows, (1, 3))


def _traffic(page: Sheet, plan: Plan) -> None:
    total = sum(t.bytes for t in plan.traffic)
    page.heading("Sample edges", f"{size(total)} an iteration, at the columns' bounds")
    rows = []
    for t in plan.traffic:
        cells = (
            f"{t.src} -> {t.dst}",
            ", ".join(t.columns) or "-",
            f"{t.rows:,}",
            size(t.bytes),
            duration(t.seconds.value),
        )
        rows.append((*cells, duration(t.central_seconds.value), t.seconds.source))
    page.table(("edge", "columns", "rows", "bytes", "dock", "central", "source"), rows, (2, 3, 4, 5), (0, 6))
    for how in dict.fromkeys(t.how for t in plan.traffic):
        readers = dict.fromkeys(t.dst for t in plan.traffic if t.how == how)
        page.line(f"{how}: {', '.join(readers)}" if len({t.how for t in plan.traffic}) > 1 else how)
    page.line(f"seconds: {plan.traffic[0].seconds.basis}")
    page.line(f"central: {plan.traffic[0].central_seconds.basis}")


def _schedule(page: Sheet, plan: Plan) -> None:
    page.heading("Schedule", "what each pool's processes do, in order")
    rows = [(s.task, s.pool, doing(plan, s) or "-") for s in plan.schedule]
    page.table(("task", "pool", "instructions"), rows, (), (0, 1))


def _memory(page: Sheet, plan: Plan) -> None:
    for place, pool in dict.fromkeys((m.place, m.pool) for m in plan.memory):
        phases = [m for m in plan.memory if (m.place, m.pool) == (place, pool)]
        has = phases[0].capacity
        of = f", pool {pool}" if place == "device" and len(plan.pools) > 1 else ""
        page.heading(f"Memory of a {place}{of}", f"{size(has.value)} ({has.source}); the sums are derived")
        rows = []
        for m in phases:
            items = ", ".join(f"{k} {size(v)}" for k, v in sorted(m.items.items(), key=lambda i: (-i[1], i[0])))
            part = f"{100 * m.total / m.capacity.value:.1f} %" + (" OVER" if m.total > m.capacity.value else "")
            rows.append((m.phase, size(m.total), part, f"{items or '-'}{f' ({m.remark})' if m.remark else ''}"))
        page.table(("phase", "peak", "share", "items"), rows, (1, 2))


def _estimate(page: Sheet, plan: Plan) -> None:
    assert plan.estimate is not None
    estimate = plan.estimate
    page.heading("Estimate", "every row at its bound")
    rows = [(p.name, _seconds(p.seconds), p.seconds.source, p.seconds.basis) for p in estimate.phases]
    page.table(("phase", "seconds", "source", "how"), rows, (1,), (2,))
    whole = estimate.iteration_seconds
    rate = estimate.tokens_per_second_per_device
    page.line(f"an iteration: {duration(whole.value)} ({whole.source}); {whole.basis}")
    page.line(f"throughput: {rate.value:,.4g} tokens/s/device ({rate.source}); {rate.basis}")
    if (stale := estimate.staleness) is not None:
        mean = stale.mean
        in_step = stale.in_step_seconds
        page.line(f"staleness: the weights that generate are {staleness(mean.value, stale.bound)} ({mean.source})")
        for state, most in late_states(plan).items():
            page.line(f"state {state}: rows are sampled by its value from up to {many(most, 'iteration')} before")
        page.line(f"the same pools in step: {duration(in_step.value)} ({in_step.source}); {saved(whole, in_step)}")
    if cuts := max((GenerateAttributes.of(n).cuts for n in plan.graph.verb("generate") if n.cuts), default=0):
        page.line(
            f"partial rollout: rows are at most {many(row_age_bound(plan), 'version')} old; {cuts} of these are due to "
            "`cuts`"
        )


def _surroundings(page: Sheet, plan: Plan) -> None:
    page.heading("Environment", "of the ranks' processes; variables that are already set keep their values")
    for of in (s for s in plan.surroundings if s.python):
        page.line(f"interpreter of {of.pool}: {of.python}")
    found: dict[Setting, list[str]] = {}
    for of in plan.surroundings:
        for setting in of.settings:
            found.setdefault(setting, []).append(of.pool)
    apart = len(plan.pools) > 1
    rows = [
        (f"{s.name}={s.value}", f"{s.why} ({s.source})", "all" if len(pools) == len(plan.pools) else ", ".join(pools))
        for s, pools in found.items()
    ]
    if rows:
        page.table(("variable", "why", "pools")[: 2 + apart], [row[: 2 + apart] for row in rows], (), (0,))


def saved(whole: Figure, in_step: Figure) -> str:
    """Describe what staleness saves."""
    share = 1 - whole.value / in_step.value
    return f"staleness saves {100 * share:.3g} % of it" if share > 0 else "staleness saves none of it"


def _many(number: int) -> str:
    return f"{number / 1e9:.4g} billion" if number >= 1e8 else f"{number / 1e6:.3g} million"


def _seconds(figure: Figure | None) -> str:
    return duration(figure.value) if figure is not None else "-"


def _source(figure: Figure | None) -> str:
    return figure.source if figure is not None else "-"


def _range(numbers: Sequence[int]) -> str:
    return f"{numbers[0]}..{numbers[-1]}" if len(numbers) > 2 else ", ".join(map(str, numbers))


def _count(plan: Plan) -> str:
    """Return the closing line: what this plan adds to the graph."""
    hosts = plan.cluster.nodes
    released = sum(r.released_bytes_per_device for r in plan.reshards)
    parts = [
        f"{many(len(plan.placements), 'state')} on {many(plan.cluster.devices, 'device')} of {many(hosts, 'host')}"
    ]
    parts += [many(len(plan.docks.controllers), "controller"), many(len(plan.docks.warehouses), "warehouse")]
    moved = f" ({size(sum(t.bytes for t in plan.traffic))} an iteration)" if plan.traffic else ""
    parts.append(many(len(plan.graph.samples()), "sample edge") + moved)
    parts.append(many(len(plan.reshards), "reshard") + (f" ({size(released)} released a device)" if released else ""))
    return f"Plan: {', '.join(parts)}."
