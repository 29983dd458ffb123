"""The flow of rows along sample edges: the order of nodes, the columns of edges.

Invariant: the module never imports torch. It imports networkx only in `digraph` and for edges that form a cycle, since
the import of networkx would take a quarter of the compiler's start time.
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
    """The sample edges of a graph, and the nodes of the graph in dependency order."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def after(self, node: str) -> set[str]:
        """Return all nodes after `node` along sample edges, except `node` itself."""
        return _collect_reachable(node, lambda name: (edge.dst for edge in self.graph.out_of(name)))

    def before(self, node: str) -> set[str]:
        """Return all nodes before `node` along sample edges, except `node` itself."""
        return _collect_reachable(node, lambda name: (edge.src for edge in self.graph.into(name)))

    def leads(self, src: str, dst: str) -> bool:
        """Return whether a path of sample edges leads from `src` to `dst`.

        The result is True if `src` and `dst` are the same node.
        """
        return src == dst or dst in self.after(src)

    def digraph(self) -> nx.DiGraph[str]:
        """Return a networkx graph of the nodes' names and the sample edges."""
        import networkx as nx

        digraph: nx.DiGraph[str] = nx.DiGraph()
        digraph.add_nodes_from(node.name for node in self.graph.nodes)
        digraph.add_edges_from((edge.src, edge.dst) for edge in self.graph.samples())
        return digraph

    @cached_property
    def knots(self) -> list[list[str]]:
        """The strongly connected components of the sample edges that contain a cycle.

        Each component is a list of names of nodes. An algorithm that passes the checks has no such component.
        """
        place = {node.name: index for index, node in enumerate(self.graph.nodes)}
        return [] if all(place[edge.src] < place[edge.dst] for edge in self.graph.samples()) else knots(self.digraph())

    @cached_property
    def _edge_pairs(self) -> set[tuple[str, str]]:
        return {(edge.src, edge.dst) for edge in self.graph.samples()}

    @cached_property
    def _writers_above(self) -> tuple[dict[str, int], dict[str, int]]:
        """The writers upstream of each node, as sets of bits.

        The first dict maps each writer to a number with one bit set, which identifies the writer. A writer is in this
        dict if some node reads a column of the writer, and no direct edge leads from the writer to that node. The
        second dict maps each node to a number in which several bits can be set: the bits of all writers from which a
        path leads to the node.
        """
        graph = self.graph
        joined = self._edge_pairs
        writers = {column: node for node in graph.nodes for column in node.writes}
        indirect = (
            writers[column].name
            for node in graph.nodes
            for column in node.reads
            if column in writers and (writers[column].name, node.name) not in joined
        )
        bits = {name: 1 << index for index, name in enumerate(dict.fromkeys(indirect))}
        above: dict[str, int] = {}
        # Nodes are visited in dependency order, the nodes of a cycle together. So all writers before a node are known.
        parts: Sequence[Collection[str]] = [[node.name] for node in graph.nodes]
        if self.knots:
            import networkx as nx

            parts = list(nx.strongly_connected_components(self.digraph()))[::-1]
        for part in parts:
            bits_above = 0
            for name in part:
                for edge in graph.into(name):
                    bits_above |= above.get(edge.src, 0) | bits.get(edge.src, 0)
            above |= dict.fromkeys(part, bits_above)
        return bits, above

    def arrives(self, column: str, node: str) -> bool:
        """Return whether sample edges lead from the writer of a column to a node.

        The edges may form a path through other nodes. The column must have at least one reader in the graph.
        """
        writer = self.graph.writer(column).name
        bits, above = self._writers_above
        return (writer, node) in self._edge_pairs or bool(above[node] & bits.get(writer, 0))

    @cached_property
    def carried(self) -> dict[tuple[str, str], tuple[str, ...]]:
        """The columns that each sample edge carries, by (src, dst).

        For each node and each column that the node reads, exactly one edge carries the column to the node. If a direct
        edge leads from the writer of the column to the node, this edge carries the column. If not, paths lead from the
        writer to the node, and the column is carried by the last edge of such a path. If these paths have different
        last edges, the one that comes first in the graph's order carries the column.
        """
        graph = self.graph
        columns_of: dict[tuple[str, str], list[str]] = {(edge.src, edge.dst): [] for edge in graph.samples()}
        for node in graph.nodes:
            for column in node.reads:
                ends = graph.writer(column).name, node.name
                if ends not in columns_of:
                    ends = next(
                        ((edge.src, edge.dst) for edge in graph.into(node.name) if self.arrives(column, edge.src)), ends
                    )
                if ends in columns_of:
                    columns_of[ends].append(column)
        return {ends: tuple(columns) for ends, columns in columns_of.items()}


def _collect_reachable(node: str, neighbours: Callable[[str], Iterable[str]]) -> set[str]:
    reached = {node}
    pending = [node]
    while pending:
        new = set(neighbours(pending.pop())) - reached
        reached |= new
        pending += new
    return reached - {node}


def knots(flow: nx.DiGraph[str]) -> list[list[str]]:
    """Return the strongly connected components of a graph that contain a cycle.

    Each component is a list of names of nodes. Cycles that share a node are in one component.
    """
    import networkx as nx

    parts: list[list[str]] = [sorted(part) for part in nx.strongly_connected_components(flow)]
    return sorted(part for part in parts if len(part) > 1 or flow.has_edge(part[0], part[0]))


def dependency_order(nodes: Collection[str], edges: Collection[Edge]) -> list[str]:
    """Return the nodes in an order in which each node comes after its inputs.

    The inputs of a node are the nodes from which sample edges lead to it. The source is first. If several nodes could
    be next, the first by name is next. Nodes of a cycle, and nodes after a cycle, are last.
    """
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
