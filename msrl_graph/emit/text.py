"""A plan as text: placements, traffic, memory and time, with sources and reasons.

Invariant: every figure is printed with its source (measured, derived, datasheet, stated or assumed), and every choice
with its reason. At 100 columns, no table is cut off. If the output is not a terminal, there is no color.
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
from .dataflow import write_docks, write_traffic
from .evaluations import write_evaluations
from .humanize import (
    describe_experts,
    describe_frozen,
    describe_instructions,
    duration,
    format_layout,
    format_parameters,
    plural,
    size,
    staleness,
)
from .placed_graph import build_placed_graph
from .resharding import write_reshards
from .text_page import WIDTH, Page, Sheet


def plan_text(plan: Plan, width: int = WIDTH, colour: bool = False) -> str:
    """Format a plan as text; sections that no pass has computed yet are left out."""
    page = Page(width, colour)
    write_plan(page, plan)
    return page.text()


def write_plan(page: Sheet, plan: Plan) -> None:
    """Write all sections of a plan to a page."""
    _write_head(page, plan)
    if plan.placements:
        _write_pools(page, plan)
    _write_states(page, plan.graph)
    if plan.docks.controllers:
        write_docks(page, plan)
    if plan.traffic:
        write_traffic(page, plan)
    write_reshards(page, plan)
    if plan.schedule:
        _write_schedule(page, plan)
    write_evaluations(page, plan)
    if plan.memory:
        _write_memory(page, plan)
    if plan.estimate is not None:
        _write_estimate(page, plan)
    if plan.surroundings:
        _write_environment(page, plan)
    if plan.notes:
        page.heading("Notes")
        for note in plan.notes:
            page.line(f"{note.about}: {note.text}")
    page.closing(_count_parts(plan))


def graph_text(graph: Graph, width: int = WIDTH, colour: bool = False) -> str:
    """Format an algorithm as text: its workers, columns, worker states and edges."""
    page = Page(width, colour)
    write_graph(page, graph)
    return page.text()


def _worker_labels(worker: Worker) -> Iterator[str]:
    yield worker.kind
    if worker.frozen:
        yield worker.following_description or "frozen"


def write_graph(page: Sheet, graph: Graph) -> None:
    """Write the sections of an algorithm to a page."""
    page.heading(f"Algorithm {graph.name}", f"{_describe_rows(graph)} an iteration")
    if graph.params:
        page.line("params: " + ", ".join(f"{name} = {value}" for name, value in graph.params.items()))
    page.heading("Workers")
    page.table(
        ("worker", "kind", "model"),
        [(worker.name, ", ".join(_worker_labels(worker)), worker.model or "-") for worker in graph.workers],
    )
    page.heading("Columns")
    writers = {column: node.name for node in graph.nodes for column in node.writes}
    rows = []
    for column in graph.columns:
        dims = ", ".join(dim.like or f"{'<= ' if dim.ragged else ''}{dim.size:,}" for dim in column.dims)
        most = "unbounded" if column.element in ("text", "json") else size(graph.row_bytes(column.name))
        readers = ", ".join(node.name for node in graph.nodes if column.name in node.reads)
        kind = (f"{column.element}[{dims}]" if dims else column.element) + (f" per {column.per}" if column.per else "")
        rows.append(
            (
                column.name,
                kind,
                str(column.level),
                most,
                writers.get(column.name, "-"),
                readers or "-",
            )
        )
    page.table(("column", "type", "level", "bytes a row", "written by", "read by"), rows, right=(2, 3), keep=(0, 1))
    _write_states(page, graph)
    page.heading("States")
    listed = []
    for node in graph.nodes:
        attributes = ", ".join(f"{name} = {value}" for name, value in node.attributes.items())
        listed.append(
            (
                node.name,
                ", ".join((*node.reads, *node.states)) or "-",
                ", ".join(node.gives or node.writes) or "-",
                node.per,
                attributes or "-",
            )
        )
    page.table(("state", "reads", "writes", "per", "attributes"), listed)
    page.heading("Edges")
    edges = [
        (
            edge.src,
            "->" if edge.kind == "sample" else "=>",
            edge.dst,
            ", ".join(f"{name} = {value}" for name, value in edge.attributes.items()),
        )
        for edge in graph.edges
    ]
    page.table(("from", "", "to", "attributes"), edges)
    counts = [
        plural(len(graph.nodes), "state"),
        plural(len(graph.samples()), "sample edge"),
        plural(len(graph.reshards()), "reshard"),
    ]
    page.closing(f"Graph: {', '.join(counts)}.")


def _write_states(page: Sheet, graph: Graph) -> None:
    """Write a table of the algorithm's states: the nodes that set and read each state."""
    if not graph.states:
        return
    page.heading("Values that outlive an iteration")
    rows = []
    for state in graph.states:
        setters = [node.name for node in graph.nodes if state.name in node.sets]
        users = [node.name for node in graph.nodes if state.name in node.states]
        rows.append(
            (
                state.name,
                state.element,
                state.per or "-",
                str(state.initial),
                ", ".join(setters) or "-",
                ", ".join(users) or "-",
            )
        )
    page.table(("state", "type", "per", "first", "set by", "read by"), rows)


def placed_text(plan: Plan, width: int = WIDTH, colour: bool = False) -> str:
    """Format a placed graph as text: worker states, docks, allgather-swaps and sends."""
    page = Page(width, colour)
    write_placed(page, plan)
    return page.text()


def write_placed(page: Sheet, plan: Plan) -> None:
    """Write the sections of a placed graph to a page."""
    vertices, arcs = build_placed_graph(plan)
    page.heading(f"Placed graph of {plan.graph.name}", f"on cluster {plan.cluster.name}")
    rows = [
        (vertex.name, vertex.kind, vertex.where, ", ".join(f"{fact} {value}" for fact, value in vertex.facts.items()))
        for vertex in vertices
    ]
    page.table(("node", "kind", "where", "what"), rows)
    _write_states(page, plan.graph)
    page.heading("Edges")
    page.table(("from", "", "to"), [(arc.src, "->" if arc.kind == "sample" else "=>", arc.dst) for arc in arcs])


def _write_head(page: Sheet, plan: Plan) -> None:
    cluster = plan.cluster
    device = plan.cluster.device
    graph = plan.graph
    page.heading(f"Plan of {graph.name} on {cluster.name}", f"{_describe_rows(graph)} an iteration")
    for name, model in plan.deploy.models.items():
        page.line(f"model {name}: {model.name}, {format_parameters(model.parameters)} parameters, {model.dtype}")
    for plug_in in plan.plugins:
        page.line(f"plug-in {plug_in.name}: {plug_in.package} {plug_in.version}")
    for worker in graph.workers:
        if worker.freeze:
            page.line(describe_frozen(worker, plan.model(graph.sharing(worker.name)[0].name)))
    for name, data in plan.deploy.data.items():
        page.line(f"data {name}: {data.path}")
    kind = f"{plural(cluster.nodes, 'host')} of {plural(cluster.devices_per_node, 'device')} `{device.name}`"
    page.line(f"cluster {cluster.name}: {kind}, {cluster.devices} in all")
    rows = [("device memory", size(device.memory.value), "", device.memory)]
    rows += [
        (f"FLOP/s, {dtype}", _format_flops(figure.value), f"flops_{dtype}", figure)
        for dtype, figure in device.flops.items()
    ]
    rows += [
        (label, f"{size(figure.value)}/s", name, figure)
        for label, name, figure in (
            ("memory bandwidth", "memory_bandwidth", device.memory_bandwidth),
            ("link to host", "host_link", device.host_link),
            ("link to device", "device_link", device.device_link),
            *([("fabric", "fabric", device.fabric)] if device.fabric else []),
            ("network", "network", cluster.network),
        )
    ]
    rows.insert(-1, ("host memory", size(device.host_memory.value), "", device.host_memory))
    lines = [
        (label, value, f"{100 * device.share(name):.0f} %" if name else "", figure.source, figure.basis)
        for label, value, name, figure in rows
    ]
    page.table(("figure", "value", "reached", "source", "basis"), lines, right=(1, 2), keep=(0, 3))


def _format_flops(rate: float) -> str:
    return f"{rate / 1e12:.3g} T" if rate >= 1e12 else f"{rate / 1e9:.3g} G"


def _describe_rows(graph: Graph) -> str:
    """Describe the prompts of an iteration, and the rows generated at each level."""
    words = [plural(graph.rows[0], "prompt")]
    for level in range(1, len(graph.rows)):
        above = graph.under[level]
        noun = (
            "response"
            if len(graph.rows) == 2
            else f"`{graph.row_column(level)}` a {f'`{graph.row_column(above)}`' if above else 'prompt'}"
        )
        words.append(
            plural(graph.fan(level, above), noun) if len(graph.rows) == 2 else f"{graph.fan(level, above):,} {noun}"
        )
    return f"{' x '.join(words[:2])}{''.join(f', {word}' for word in words[2:])}"


def _write_pools(page: Sheet, plan: Plan) -> None:
    seconds = {phase.name: phase.seconds for phase in plan.estimate.phases} if plan.estimate else {}
    on_devices = {device_pool.name: device_pool for device_pool in plan.pools}
    for pool in dict.fromkeys([*on_devices, *(placement.pool for placement in plan.placements)]):
        listed = [placement for placement in plan.placements if placement.pool == pool]
        remark = "the hosts' CPUs"
        if pool in on_devices:
            device_pool = on_devices[pool]
            how = f"{device_pool.reason}; shared by its" if device_pool.reason else "shared by all"
            remark = f"{plural(device_pool.devices, 'device')}, {how} states in turn"
        page.heading(f"Pool {pool}", remark)
        if pool in on_devices:
            rows = []
            for state in listed:
                time = seconds.get(state.node)
                cells = (
                    state.node,
                    format_layout(replace(state.layout, etp=1)),  # `etp` is printed below the table, with the experts
                    state.engine.name,
                    str(state.layout.devices),
                    size(state.weight_bytes),
                    _format_seconds(time),
                    _format_source(time),
                )
                rows.append((*cells, state.reason))
            page.table(
                ("state", "layout", "engine", "devices", "weights", "seconds", "source", "why this layout"),
                rows,
                (3, 4, 5),
                (0, 1, 2, 6),
            )
            for state in listed:
                stated = plan.deploy.engines.get(state.node)
                page.line(f"engine of {state.node}: {_describe_engine(state.engine, stated)}")
                if experts := plan.model(state.node).experts:
                    page.line(f"experts of {state.node}: {describe_experts(experts, state.layout)}")
        else:
            page.table(
                ("state", "hosts", "why here"),
                [(state.node, str(state.layout.dp), state.reason) for state in listed],
                (1,),
            )
            _write_parallel_calls(page, plan, [plan.graph.node(state.node) for state in listed])


def _write_parallel_calls(page: Sheet, plan: Plan, nodes: Sequence[Node]) -> None:
    """List the function nodes for which a host makes several calls in parallel."""
    workers = plan.deploy.run.function_workers
    calls_of = {
        node.name: concurrent_calls(node, workers, read_signature(node)) for node in nodes if node.verb != "source"
    }
    if pooled := [f"`{name}`" for name, calls in calls_of.items() if 1 < calls == workers]:
        page.line(f"called in parallel by {workers} worker processes on each host: {', '.join(pooled)}")
    if in_loop := [f"`{name}`" for name, calls in calls_of.items() if calls == MAX_ASYNC_CALLS != workers]:
        page.line(f"up to {MAX_ASYNC_CALLS} concurrent calls in one event loop: {', '.join(in_loop)}")


def _describe_engine(engine: EngineChoice, stated: EngineChoice | None) -> str:
    options = ", ".join(
        f"{option} = {value}{'' if stated and option in stated.options else ' (planned)'}"
        for option, value in engine.options.items()
    )
    return f"{engine.name}{f' {{ {options} }}' if options else ''}, chosen by {engine.chosen}"


def _write_schedule(page: Sheet, plan: Plan) -> None:
    page.heading("Schedule", "what each pool's processes do, in order")
    rows = [(stream.task, stream.pool, describe_instructions(plan, stream) or "-") for stream in plan.schedule]
    page.table(("task", "pool", "instructions"), rows, (), (0, 1))


def _write_memory(page: Sheet, plan: Plan) -> None:
    for place, pool in dict.fromkeys((phase.place, phase.pool) for phase in plan.memory):
        phases = [phase for phase in plan.memory if (phase.place, phase.pool) == (place, pool)]
        has = phases[0].capacity
        pool_name = f", pool {pool}" if place == "device" and len(plan.pools) > 1 else ""
        page.heading(f"Memory of a {place}{pool_name}", f"{size(has.value)} ({has.source}); the sums are derived")
        rows = []
        for entry in phases:
            items = ", ".join(
                f"{item} {size(bytes_held)}"
                for item, bytes_held in sorted(
                    entry.items.items(), key=lambda entry_item: (-entry_item[1], entry_item[0])
                )
            )
            part = f"{100 * entry.total / entry.capacity.value:.1f} %" + (
                " OVER" if entry.total > entry.capacity.value else ""
            )
            rows.append(
                (entry.phase, size(entry.total), part, f"{items or '-'}{f' ({entry.remark})' if entry.remark else ''}")
            )
        page.table(("phase", "peak", "share", "items"), rows, (1, 2))


def _write_estimate(page: Sheet, plan: Plan) -> None:
    assert plan.estimate is not None
    estimate = plan.estimate
    page.heading("Estimate", "every row at its bound")
    rows = [
        (phase.name, _format_seconds(phase.seconds), phase.seconds.source, phase.seconds.basis)
        for phase in estimate.phases
    ]
    page.table(("phase", "seconds", "source", "how"), rows, (1,), (2,))
    iteration = estimate.iteration_seconds
    rate = estimate.tokens_per_second_per_device
    page.line(f"an iteration: {duration(iteration.value)} ({iteration.source}); {iteration.basis}")
    page.line(f"throughput: {rate.value:,.4g} tokens/s/device ({rate.source}); {rate.basis}")
    if (stale := estimate.staleness) is not None:
        mean = stale.mean
        in_step = stale.in_step_seconds
        page.line(f"staleness: the weights that generate are {staleness(mean.value, stale.bound)} ({mean.source})")
        for state, most in late_states(plan).items():
            page.line(f"state {state}: rows are sampled by its value from up to {plural(most, 'iteration')} before")
        saving = describe_saving(iteration, in_step)
        page.line(f"the same pools in step: {duration(in_step.value)} ({in_step.source}); {saving}")
    if cuts := max((GenerateAttributes.of(node).cuts for node in plan.graph.verb("generate") if node.cuts), default=0):
        age = plural(row_age_bound(plan), "version")
        page.line(f"partial rollout: rows are at most {age} old; {cuts} of these are due to `cuts`")


def _write_environment(page: Sheet, plan: Plan) -> None:
    page.heading("Environment", "of the ranks' processes; variables that are already set keep their values")
    for environment in (environment for environment in plan.surroundings if environment.python):
        page.line(f"interpreter of {environment.pool}: {environment.python}")
    pools_of: dict[Setting, list[str]] = {}
    for environment in plan.surroundings:
        for setting in environment.settings:
            pools_of.setdefault(setting, []).append(environment.pool)
    apart = len(plan.pools) > 1
    rows = [
        (
            f"{setting.name}={setting.value}",
            f"{setting.why} ({setting.source})",
            "all" if len(pools) == len(plan.pools) else ", ".join(pools),
        )
        for setting, pools in pools_of.items()
    ]
    if rows:
        page.table(("variable", "why", "pools")[: 2 + apart], [row[: 2 + apart] for row in rows], (), (0,))


def describe_saving(iteration: Figure, in_step: Figure) -> str:
    """Describe the fraction of an iteration's time that staleness saves.

    `in_step` is the time of an iteration if no pool may run ahead of the updates.
    """
    share = 1 - iteration.value / in_step.value
    return f"staleness saves {100 * share:.3g} % of it" if share > 0 else "staleness saves none of it"


def _format_seconds(figure: Figure | None) -> str:
    return duration(figure.value) if figure is not None else "-"


def _format_source(figure: Figure | None) -> str:
    return figure.source if figure is not None else "-"


def _count_parts(plan: Plan) -> str:
    """Return the plan's last line: numbers of states, controllers, edges and reshards."""
    hosts = plan.cluster.nodes
    released = sum(reshard.released_bytes_per_device for reshard in plan.reshards)
    states, devices = plural(len(plan.placements), "state"), plural(plan.cluster.devices, "device")
    parts = [f"{states} on {devices} of {plural(hosts, 'host')}"]
    parts += [
        plural(len(plan.docks.controllers), "controller"),
        plural(len(plan.docks.warehouses), "warehouse"),
    ]
    moved = f" ({size(sum(traffic.bytes for traffic in plan.traffic))} an iteration)" if plan.traffic else ""
    parts.append(plural(len(plan.graph.samples()), "sample edge") + moved)
    parts.append(plural(len(plan.reshards), "reshard") + (f" ({size(released)} released a device)" if released else ""))
    return f"Plan: {', '.join(parts)}."
