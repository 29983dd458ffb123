"""Edges and the states that they join: cycles, verbs, and weights that go where they should.

Invariant: pure; a graph of the Python API is judged as one of a file is.
"""

from __future__ import annotations

from itertools import pairwise

import networkx as nx

from ..diagnostics import Diagnostic, nearest
from ..graph import KINDS, Edge, Graph
from .columns import Library


def cycle(graph: Graph, library: Library) -> list[Diagnostic]:
    """One cycle of each knot of sample edges, the shortest through its first node."""
    edges = {(e.src, e.dst): (place, e.span) for place, e in enumerate(graph.samples())} if graph.knots else {}
    found = []
    for knot in graph.knots:
        start = knot[0]
        inside = graph.flow.subgraph(knot)
        ways = [nx.shortest_path(inside, after, start) for after in sorted(inside.successors(start))]
        path = [start, *min(ways, key=len)]
        message = f"the sample edges form a cycle: {' -> '.join(path)}"
        # The edge that was declared last closes the cycle: of an algorithm that extends another, one of its own.
        _, span = max(edges[edge] for edge in pairwise(path))
        found.append(Diagnostic("cycle", message, span, "remove one of these edges"))
    return found


def unknown_verb(graph: Graph, library: Library) -> list[Diagnostic]:
    found = []
    for node in graph.nodes:
        kind = _kind(graph, node.worker)
        if kind in KINDS and node.verb not in KINDS[kind]:
            message = f"`{node.worker}` is a {kind}, which cannot {node.verb}"
            found.append(Diagnostic("unknown-verb", message, node.span, nearest(node.verb, KINDS[kind])))
    return found


def frozen_update(graph: Graph, library: Library) -> list[Diagnostic]:
    return [
        Diagnostic(
            "frozen-update", f"`{n.worker}` is frozen, so `{n.name}` cannot be", n.span, "remove `frozen` from the worker, or the update"
        )
        for n in graph.verb("update")
        if any(w.name == n.worker and w.frozen for w in graph.workers)
    ]


def no_reshard(graph: Graph, library: Library) -> list[Diagnostic]:
    """States that generate and would do so with the first weights for ever."""
    found = []
    receives = {e.dst for e in graph.reshards()}
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
        src, dst = graph.node(edge.src), graph.node(edge.dst)
        message = help = ""
        if any((kind := _kind(graph, n.worker)) in KINDS and n.verb not in KINDS[kind] for n in (src, dst)):
            continue  # told as an unknown verb
        if src.verb != "update":
            message = f"`{edge.src}` changes no weights, so there is nothing to send"
            updates = [u.name for u in graph.verb("update") if u.worker == src.worker]
            help = f"start the edge at `{updates[0]}`" if updates else ""
        elif dst.verb != "generate":
            message = f"a resharding edge leads to a state that generates, and `{edge.dst}` does not"
            help = f"leave it out: `{edge.dst}` has the update's weights" if src.worker == dst.worker else ""
        else:
            models = [w.model for n in (src, dst) for w in graph.workers if w.name == n.worker]
            if len(set(models)) > 1:
                message = f"`{edge.src}` has the model `{models[0]}` and `{edge.dst}` the model `{models[1]}`"
                help = "weights go only between states of one model"
            elif len(kinds := [_kind(graph, n.worker) for n in (src, dst)]) == 2 and kinds[0] != kinds[1]:
                message = f"`{edge.src}` is of a {kinds[0]} and `{edge.dst}` of a {kinds[1]}: their heads differ"
                help = "weights go only between workers of one kind"
        if message:
            found.append(Diagnostic("bad-reshard", message, edge.span, help))
        elif (first := into.setdefault(edge.dst, edge)) is not edge:
            message = f"`{edge.dst}` has its weights from `{first.src}` already, and cannot have those of `{edge.src}` too"
            help = "all updates of a worker change the same weights: one edge, from any of them"
            help = help if graph.node(first.src).worker == src.worker else "leave one of the edges out"
            found.append(Diagnostic("bad-reshard", message, edge.span, help, related=((first.span, "the first one"),)))
    return found


def _kind(graph: Graph, worker: str) -> str:
    return next((w.kind for w in graph.workers if w.name == worker), "")
