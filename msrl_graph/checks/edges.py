"""Checks of edges and their nodes: cycles, verbs, and resharding edges.

Invariant: the checks are pure functions. A graph from the Python API is checked like a graph from a file.
"""

from __future__ import annotations

from itertools import pairwise

from ..diagnostics import Diagnostic, nearest
from ..ir.flow import knots
from ..ir.graph import KINDS, Edge, Graph
from .columns import Library
from .scope import kind_of


def cycle(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report one cycle for each strongly connected component of sample edges.

    The reported cycle is the shortest cycle through the first node of the component. If a sample edge of a cycle should
    be a resharding edge, this edge is reported, and the cycles that contain the edge are not reported.
    """
    if not graph.flow.knots:
        return []
    edges = {(edge.src, edge.dst): (place, edge.span) for place, edge in enumerate(graph.samples())}
    diagnostics = []
    weights = _weights_as_rows(graph)
    for edge in weights:
        has_reshard = any((reshard.src, reshard.dst) == (edge.src, edge.dst) for reshard in graph.reshards())
        help = (
            f"leave it out: `{edge.src} => {edge.dst}` exists already"
            if has_reshard
            else f"write `{edge.src} => {edge.dst}`"
        )
        message = f"`{edge.src} -> {edge.dst}` sends rows and closes a cycle; weights are sent with `=>`"
        diagnostics.append(Diagnostic("cycle", message, edge.span, help))
    import networkx as nx

    flow = graph.flow.digraph()
    circles = graph.flow.knots
    if weights:
        flow.remove_edges_from([(edge.src, edge.dst) for edge in weights])
        circles = knots(flow)
    for knot in circles:
        start = knot[0]
        inside = flow.subgraph(knot)
        paths = [nx.shortest_path(inside, after, start) for after in sorted(inside.successors(start))]
        path = [start, *min(paths, key=len)]
        message = f"the sample edges form a cycle: {' -> '.join(path)}"
        # The edge that was declared last closes the cycle. In an algorithm that extends another, it is one of its own.
        _, span = max(edges[edge] for edge in pairwise(path))
        diagnostics.append(Diagnostic("cycle", message, span, "remove one of these edges"))
    return diagnostics


def _weights_as_rows(graph: Graph) -> list[Edge]:
    """Return sample edges in a cycle that were probably meant as resharding edges.

    Such an edge leads from an update back to a generation of the same worker.
    """
    knot = {name: place for place, names in enumerate(graph.flow.knots) for name in names}
    verbs = {node.name: (node.worker, node.verb) for node in graph.nodes}
    return [
        edge
        for edge in graph.samples()
        if knot.get(edge.src, -1) == knot.get(edge.dst, -2)
        and (verbs[edge.src][1], verbs[edge.dst][1]) == ("update", "generate")
        and verbs[edge.src][0] == verbs[edge.dst][0]
    ]


def unknown_verb(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report nodes whose verb does not exist for the kind of their worker."""
    diagnostics = []
    for node in graph.nodes:
        kind = kind_of(graph, node.worker)
        if kind in KINDS and node.verb not in KINDS[kind]:
            message = f"`{node.worker}` is a {kind}, which cannot {node.verb}"
            diagnostics.append(Diagnostic("unknown-verb", message, node.span, nearest(node.verb, KINDS[kind])))
    return diagnostics


def frozen_update(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report updates of frozen workers."""
    return [
        Diagnostic(
            "frozen-update",
            f"`{node.worker}` is frozen, so `{node.name}` cannot update it",
            node.span,
            "remove `frozen` from the worker, or the update",
        )
        for node in graph.verb("update")
        if any(worker.name == node.worker and worker.frozen for worker in graph.workers)
    ]


def no_reshard(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report generations of trained workers that never receive trained weights.

    A generation without a resharding edge would use the initial weights in all iterations.
    """
    diagnostics = []
    # An edge in the wrong direction or of the wrong kind is reported elsewhere.
    receives = (
        {edge.dst for edge in graph.reshards()}
        | {edge.src for edge in graph.reshards()}
        | {edge.dst for edge in _weights_as_rows(graph)}
    )
    for node in graph.verb("generate"):
        updates = [update.name for update in graph.verb("update") if update.worker == node.worker]
        if updates and node.name not in receives:
            message = f"`{node.worker}` is updated, but no resharding edge brings its weights to `{node.name}`"
            diagnostics.append(Diagnostic("no-reshard", message, node.span, f"add `{updates[0]} => {node.name}`"))
    return diagnostics


def bad_reshard(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report resharding edges not leading from an update to a matching generation.

    A generation matches an update if both have the same model and the same kind of worker. At most one resharding edge
    may lead to a generation.
    """
    diagnostics = []
    into: dict[str, Edge] = {}
    for edge in graph.reshards():
        src = graph.node(edge.src)
        dst = graph.node(edge.dst)
        message = help = ""
        if any((kind := kind_of(graph, node.worker)) in KINDS and node.verb not in KINDS[kind] for node in (src, dst)):
            continue  # reported as an unknown verb
        if src.verb != "update":
            message = f"`{edge.src}` changes no weights, so there is nothing to send"
            updates = [update.name for update in graph.verb("update") if update.worker == src.worker]
            help = f"start the edge at `{updates[0]}`" if updates else ""
            if (src.verb, dst.verb) == ("generate", "update"):
                help = f"reverse it: `{edge.dst} => {edge.src}`"
        elif dst.verb != "generate":
            message = f"a resharding edge must lead to a node that generates, and `{edge.dst}` does not"
            help = f"leave it out: `{edge.dst}` has the update's weights" if src.worker == dst.worker else ""
        else:
            models = [worker.model for node in (src, dst) for worker in graph.workers if worker.name == node.worker]
            if len(set(models)) > 1:
                message = f"`{edge.src}` has the model `{models[0]}` and `{edge.dst}` the model `{models[1]}`"
                help = "weights can only be sent between nodes of the same model"
            elif len(kinds := [kind_of(graph, node.worker) for node in (src, dst)]) == 2 and kinds[0] != kinds[1]:
                message = f"`{edge.src}` is a node of a {kinds[0]} and `{edge.dst}` of a {kinds[1]}: their heads differ"
                help = "weights can only be sent between workers of the same kind"
        if message:
            diagnostics.append(Diagnostic("bad-reshard", message, edge.span, help))
        elif (first := into.setdefault(edge.dst, edge)) is not edge:
            message = (
                f"`{edge.dst}` already gets its weights from `{first.src}`, so it cannot get those of `{edge.src}`"
            )
            help = "all updates of a worker change the same weights: keep one edge, from any of them"
            help = help if graph.node(first.src).worker == src.worker else "leave one of the edges out"
            diagnostics.append(
                Diagnostic("bad-reshard", message, edge.span, help, related=((first.span, "the first one"),))
            )
    return diagnostics
