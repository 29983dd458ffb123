"""Edges and the nodes that they join: cycles, verbs, and weights that go where they should.

Invariant: pure; a graph of the Python API is judged as one of a file is.
"""

from __future__ import annotations

from itertools import pairwise

from ..diagnostics import Diagnostic, nearest
from ..ir.flow import knots
from ..ir.graph import KINDS, Edge, Graph
from .columns import Library
from .scope import kind_of


def cycle(graph: Graph, library: Library) -> list[Diagnostic]:
    """One cycle of each knot of sample edges, the shortest through its first node."""
    if not graph.flow.knots:
        return []
    edges = {(e.src, e.dst): (place, e.span) for place, e in enumerate(graph.samples())}
    found = []
    weights = _weights_as_rows(graph)
    for edge in weights:
        there = any((e.src, e.dst) == (edge.src, edge.dst) for e in graph.reshards())
        help = f"leave it out: there is `{edge.src} => {edge.dst}`" if there else f"write `{edge.src} => {edge.dst}`"
        message = f"`{edge.src} -> {edge.dst}` hands rows on, in a circle: weights go along `=>`"
        found.append(Diagnostic("cycle", message, edge.span, help))
    import networkx as nx

    flow = graph.flow.digraph()
    circles = graph.flow.knots
    if weights:
        flow.remove_edges_from([(e.src, e.dst) for e in weights])
        circles = knots(flow)
    for knot in circles:
        start = knot[0]
        inside = flow.subgraph(knot)
        ways = [nx.shortest_path(inside, after, start) for after in sorted(inside.successors(start))]
        path = [start, *min(ways, key=len)]
        message = f"the sample edges form a cycle: {' -> '.join(path)}"
        # The edge that was declared last closes the cycle: of an algorithm that extends another, one of its own.
        _, span = max(edges[edge] for edge in pairwise(path))
        found.append(Diagnostic("cycle", message, span, "remove one of these edges"))
    return found


def _weights_as_rows(graph: Graph) -> list[Edge]:
    """Sample edges that lead back from an update to a node that generates with its weights."""
    knot = {name: place for place, names in enumerate(graph.flow.knots) for name in names}
    verbs = {n.name: (n.worker, n.verb) for n in graph.nodes}
    return [
        e
        for e in graph.samples()
        if knot.get(e.src, -1) == knot.get(e.dst, -2)
        and (verbs[e.src][1], verbs[e.dst][1]) == ("update", "generate")
        and verbs[e.src][0] == verbs[e.dst][0]
    ]


def unknown_verb(graph: Graph, library: Library) -> list[Diagnostic]:
    found = []
    for node in graph.nodes:
        kind = kind_of(graph, node.worker)
        if kind in KINDS and node.verb not in KINDS[kind]:
            message = f"`{node.worker}` is a {kind}, which cannot {node.verb}"
            found.append(Diagnostic("unknown-verb", message, node.span, nearest(node.verb, KINDS[kind])))
    return found


def frozen_update(graph: Graph, library: Library) -> list[Diagnostic]:
    return [
        Diagnostic(
            "frozen-update",
            f"`{n.worker}` is frozen, so `{n.name}` cannot be",
            n.span,
            "remove `frozen` from the worker, or the update",
        )
        for n in graph.verb("update")
        if any(w.name == n.worker and w.frozen for w in graph.workers)
    ]


def no_reshard(graph: Graph, library: Library) -> list[Diagnostic]:
    """Nodes that generate and would do so with the first weights for ever."""
    found = []
    # Where the edge is there the wrong way round, or is of the wrong kind, that is told.
    receives = (
        {e.dst for e in graph.reshards()} | {e.src for e in graph.reshards()} | {e.dst for e in _weights_as_rows(graph)}
    )
    for node in graph.verb("generate"):
        updates = [u.name for u in graph.verb("update") if u.worker == node.worker]
        if updates and node.name not in receives:
            message = f"`{node.worker}` is updated, and no resharding edge brings its weights to `{node.name}`"
            found.append(Diagnostic("no-reshard", message, node.span, f"add `{updates[0]} => {node.name}`"))
    return found


def bad_reshard(graph: Graph, library: Library) -> list[Diagnostic]:
    found = []
    into: dict[str, Edge] = {}
    for edge in graph.reshards():
        src = graph.node(edge.src)
        dst = graph.node(edge.dst)
        message = help = ""
        if any((kind := kind_of(graph, n.worker)) in KINDS and n.verb not in KINDS[kind] for n in (src, dst)):
            continue  # told as an unknown verb
        if src.verb != "update":
            message = f"`{edge.src}` changes no weights, so there is nothing to send"
            updates = [u.name for u in graph.verb("update") if u.worker == src.worker]
            help = f"start the edge at `{updates[0]}`" if updates else ""
            if (src.verb, dst.verb) == ("generate", "update"):
                help = f"turn it round: `{edge.dst} => {edge.src}`"
        elif dst.verb != "generate":
            message = f"a resharding edge leads to a state that generates, and `{edge.dst}` does not"
            help = f"leave it out: `{edge.dst}` has the update's weights" if src.worker == dst.worker else ""
        else:
            models = [w.model for n in (src, dst) for w in graph.workers if w.name == n.worker]
            if len(set(models)) > 1:
                message = f"`{edge.src}` has the model `{models[0]}` and `{edge.dst}` the model `{models[1]}`"
                help = "weights go only between states of one model"
            elif len(kinds := [kind_of(graph, n.worker) for n in (src, dst)]) == 2 and kinds[0] != kinds[1]:
                message = f"`{edge.src}` is of a {kinds[0]} and `{edge.dst}` of a {kinds[1]}: their heads differ"
                help = "weights go only between workers of one kind"
        if message:
            found.append(Diagnostic("bad-reshard", message, edge.span, help))
        elif (first := into.setdefault(edge.dst, edge)) is not edge:
            message = (
                f"`{edge.dst}` has its weights from `{first.src}` already, and cannot have those of `{edge.src}` too"
            )
            help = "all updates of a worker change the same weights: one edge, from any of them"
            help = help if graph.node(first.src).worker == src.worker else "leave one of the edges out"
            found.append(Diagnostic("bad-reshard", message, edge.span, help, related=((first.span, "the first one"),)))
    return found
