"""The flow of rows: which nodes come after which along the sample edges, in what order, and which columns each edge
carries.

Invariant: torch-free and without networkx, whose import would be a quarter of each start of the compiler; only who has
made a circle of edges pays for it, and who asks for a `digraph`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import networkx as nx

    from .graph import Edge, Graph


class Flow:
    """The sample edges of a graph, whose nodes stand in dependency order."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def after(self, node: str) -> set[str]:
        """The nodes that a path of sample edges leads to from a node, itself left out."""
        return _reached(node, lambda name: (e.dst for e in self.graph.out_of(name)))

    def before(self, node: str) -> set[str]:
        """The nodes from which a path of sample edges leads to a node, itself left out."""
        return _reached(node, lambda name: (e.src for e in self.graph.into(name)))

    def leads(self, src: str, dst: str) -> bool:
        """Whether a path of sample edges, of none perhaps, leads from one node to another."""
        return src == dst or dst in self.after(src)

    def digraph(self) -> nx.DiGraph[str]:
        """The nodes and the sample edges between them, by name."""
        import networkx as nx

        made: nx.DiGraph[str] = nx.DiGraph()
        made.add_nodes_from(n.name for n in self.graph.nodes)
        made.add_edges_from((e.src, e.dst) for e in self.graph.samples())
        return made

    @cached_property
    def knots(self) -> list[list[str]]:
        """Nodes that sample edges lead from and back to, those of each knot by name. An algorithm has none, as a check
        sees to."""
        place = {n.name: i for i, n in enumerate(self.graph.nodes)}
        return [] if all(place[e.src] < place[e.dst] for e in self.graph.samples()) else knots(self.digraph())

    @cached_property
    def _joined(self) -> set[tuple[str, str]]:
        return {(e.src, e.dst) for e in self.graph.samples()}

    @cached_property
    def _above(self) -> tuple[dict[str, int], dict[str, int]]:
        """A bit for each writer that a reader has no edge from, and for each node the bits of those from which a path
        leads there."""
        graph = self.graph
        joined = self._joined
        writers = {c: n for n in graph.nodes for c in n.writes}
        apart = (
            writers[c].name
            for n in graph.nodes
            for c in n.reads
            if c in writers and (writers[c].name, n.name) not in joined
        )
        bits = {name: 1 << i for i, name in enumerate(dict.fromkeys(apart))}
        above: dict[str, int] = {}
        # In dependency order, knots as a whole: what is above a node is known when its turn comes.
        parts: Sequence[Collection[str]] = [[n.name] for n in graph.nodes]
        if self.knots:
            import networkx as nx

            parts = list(nx.strongly_connected_components(self.digraph()))[::-1]
        for part in parts:
            found = 0
            for name in part:
                for edge in graph.into(name):
                    found |= above.get(edge.src, 0) | bits.get(edge.src, 0)
            above |= dict.fromkeys(part, found)
        return bits, above

    def arrives(self, column: str, node: str) -> bool:
        """Whether a path of sample edges leads to a node from the writer of a column that some node reads."""
        writer, (bits, above) = self.graph.writer(column).name, self._above
        return (writer, node) in self._joined or bool(above[node] & bits.get(writer, 0))

    @cached_property
    def carried(self) -> dict[tuple[str, str], tuple[str, ...]]:
        """The columns that each sample edge carries: of those that its end reads, each on the edge from its writer,
        else on the first that leads there from the writer."""
        graph = self.graph
        found: dict[tuple[str, str], list[str]] = {(e.src, e.dst): [] for e in graph.samples()}
        for node in graph.nodes:
            for column in node.reads:
                ends = graph.writer(column).name, node.name
                if ends not in found:
                    ends = next(((e.src, e.dst) for e in graph.into(node.name) if self.arrives(column, e.src)), ends)
                if ends in found:
                    found[ends].append(column)
        return {ends: tuple(columns) for ends, columns in found.items()}


def _reached(node: str, neighbours: Callable[[str], Iterable[str]]) -> set[str]:
    found = {node}
    left = [node]
    while left:
        new = set(neighbours(left.pop())) - found
        found |= new
        left += new
    return found - {node}


def knots(flow: nx.DiGraph[str]) -> list[list[str]]:
    """The nodes of each circle of edges, by name; those of circles that touch are one knot."""
    import networkx as nx

    parts: list[list[str]] = [sorted(part) for part in nx.strongly_connected_components(flow)]
    return sorted(part for part in parts if len(part) > 1 or flow.has_edge(part[0], part[0]))


def dependency_order(nodes: Collection[str], edges: Collection[Edge]) -> list[str]:
    """The nodes in dependency order, the source first, ties by name; those of a cycle last."""
    waits: dict[str, set[str]] = {name: set() for name in nodes}
    for edge in edges:
        if edge.kind == "sample" and edge.dst in waits and edge.src in waits:
            waits[edge.dst].add(edge.src)
    after: dict[str, list[str]] = {name: [] for name in nodes}
    for name, sources in waits.items():
        for src in sources:
            after[src].append(name)
    ready = [(name != "source", name) for name, sources in waits.items() if not sources]
    heapq.heapify(ready)
    order: list[str] = []
    while ready:
        name = heapq.heappop(ready)[1]
        order.append(name)
        for other in after[name]:
            waits[other].discard(name)
            if not waits[other]:
                heapq.heappush(ready, (other != "source", other))
    return order + sorted(set(nodes) - set(order))
