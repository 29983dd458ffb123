"""A plan as text: placements, traffic, memory and time, with sources and reasons.

Invariant: every figure is printed with its source (measured, derived, datasheet, stated or assumed), and every choice
with its reason. At 100 columns, no table is cut off. If the output is not a terminal, there is no color.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..diagnostics.quantities import format_parameters, plural, size
from ..diagnostics.sheet import Sheet
from ..diagnostics.text_page import WIDTH, Page
from ..ir.graph import Graph, Worker
from ..ir.plan import Plan
from ..model.architecture import Model
from ..passes.order import ORDER
from .placed_graph import build_placed_graph


def plan_text(plan: Plan, width: int = WIDTH, colour: bool = False) -> str:
    """Format a plan as text; sections that no pass has computed yet are left out."""
    page = Page(width, colour)
    write_plan(page, plan)
    return page.text()


def write_plan(page: Sheet, plan: Plan) -> None:
    """Write all sections of a plan to a page."""
    _write_head(page, plan)
    first, *others = ORDER
    first.write(page, plan)
    _write_states(page, plan.graph)
    for step in others:
        step.write(page, plan)
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
        if model.initial:
            page.line(f"adapter of {name}: {model.initial.folder}, {model.initial}")
    for plug_in in plan.plugins:
        page.line(f"plug-in {plug_in.name}: {plug_in.package} {plug_in.version}")
    for worker in graph.workers:
        nodes = [node for node in graph.sharing(worker.name) if node.verb == "update"]
        if nodes and ((model := plan.model(nodes[0].name)).lora or worker.freeze):
            page.line(describe_frozen(worker, model))
    for name, data in plan.deploy.data.items():
        parts = ", ".join(f"{part} x {weight}" for part, weight in data.parts.items())
        page.line(f"data {name}: {data.path or f'a mixture of {parts}'}")
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


def describe_frozen(worker: Worker, model: Model) -> str:
    """Return a text about how much of a worker's model is trained."""
    trained, every = (sum(tensor.elements for tensor in tensors) for tensors in (model.trained, model.weights))
    counts = f"{format_parameters(trained)} of {format_parameters(every)} parameters are trained"
    how = str(model.lora) if model.lora else f"frozen: {', '.join(worker.freeze)}"
    return f"worker {worker.name}: {counts}, {how}"
