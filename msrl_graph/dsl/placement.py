"""`place` and `apart` to the pools that a deploy states.

Invariant: no node is in two pools and no device either; nodes that share weights are in one pool. What is named nowhere
is left to the planner, and so is the stretch of a pool that no `place` fixes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ..diagnostics import Span, nearest
from ..hardware.cluster import ClusterSpec
from ..ir.graph import Graph
from ..ir.plan import Pool
from ..sharding.device_range import device_range, meet
from . import ast
from .expressions import TOLD, Problems, mistake


@dataclass
class _Group:
    """Nodes that stay together; `apart` is the name that an `apart` gives them a pool for."""

    members: set[str]
    span: Span
    stretch: tuple[int, int, int] | None = None  # first device, devices, and those of each node (0: in a row)
    apart: ast.Ref | None = None


def lower_pools(
    statements: Collection[ast.PlaceDecl | ast.ApartDecl],
    graph: Graph,
    nodes: Collection[str],
    cluster: ClusterSpec | None,
    problems: Problems,
) -> tuple[tuple[Pool, ...], tuple[tuple[str, ...], ...]]:
    """The pools that have a stretch or are apart, in the order of the text, and the nodes that are merely together;
    `nodes` are all that the algorithm declares."""
    lowering = _Pools(graph, nodes, cluster, problems)
    # What is kept together is known before it is parted, in whatever order the text says so.
    for statement in sorted(statements, key=lambda s: isinstance(s, ast.ApartDecl)):
        with problems.catching():
            if isinstance(statement, ast.PlaceDecl):
                lowering.place(statement)
            else:
                lowering.apart(statement)
    order = [n.name for n in graph.nodes]
    groups = sorted(lowering.groups, key=lambda g: (g.apart or g).span)
    parted = [g for g in groups if g.stretch or g.apart]
    pools = []
    for g in parted:
        first, devices, each = g.stretch or (0, 0, 0)
        pools.append(
            Pool(tuple(sorted(g.members, key=order.index)), first, devices, span=(g.apart or g).span, each=each)
        )
    return tuple(pools), tuple(tuple(sorted(g.members, key=order.index)) for g in groups if g not in parted)


class _Pools:
    def __init__(self, graph: Graph, nodes: Collection[str], cluster: ClusterSpec | None, problems: Problems) -> None:
        self.graph = graph
        self.nodes = nodes
        self.cluster = cluster
        self.problems = problems
        self.groups: list[_Group] = []

    def place(self, statement: ast.PlaceDecl) -> None:
        if not statement.together and statement.nodes is None:
            help = "add `together`, or `on nodes 0`"
            raise mistake("bad-value", "this `place` says neither where nor with what", statement.span, help)
        members = set[str]().union(*(self._members(ref) for ref in statement.targets))
        self._join(members, statement.span, self._stretch(statement) if statement.nodes else None)

    def apart(self, statement: ast.ApartDecl) -> None:
        for ref in statement.targets:
            with self.problems.catching():
                members = self._members(ref)
                for other in [g.apart for g in self.groups if g.apart and g.members & members]:
                    if other.text != ref.text:
                        message = f"`{ref.text}` and `{other.text}` cannot be apart: {self._why(ref, other)}"
                        raise mistake("bad-place", message, ref.span, related=((other.span, "apart here"),))
                self._join(members, ref.span, None).apart = ref

    def _why(self, ref: ast.Ref, other: ast.Ref) -> str:
        both = self._members(ref) & self._members(other)
        if not both:
            return "`place` keeps them together"
        worker = next((r.text for r in (ref, other) if r.text not in self.nodes), None)
        return f"`{min(both)}` is a state of `{worker}`" if worker else "they share the weights of one worker"

    def _members(self, ref: ast.Ref) -> set[str]:
        """The nodes that a name stands for: a worker's, or a node with those that share its weights."""
        workers = {w.name: w for w in self.graph.workers}
        if ref.text in workers:
            found = [n for n in self.graph.nodes if n.worker == ref.text]
            function = workers[ref.text].kind == "function"
        elif ref.text not in self.nodes:
            raise mistake(
                "unknown-name",
                f"no node or worker is called `{ref.text}`",
                ref.span,
                nearest(ref.text, [*self.nodes, *workers]),
            )
        elif all(n.name != ref.text for n in self.graph.nodes):
            raise TOLD
        else:
            node = self.graph.node(ref.text)
            sharing = self.graph.sharing(node.worker)
            found = list(sharing) if node in sharing else [node]
            function = node.verb == "source" or workers[node.worker].kind == "function"
        if function:
            raise mistake(
                "bad-value", f"`{ref.text}` runs on the hosts' CPUs, so it takes no devices", ref.span, "leave it out"
            )
        if not found:
            raise mistake("bad-place", f"`{ref.text}` has no state, so it takes no devices", ref.span, "leave it out")
        return {n.name for n in found}

    def _join(self, members: set[str], span: Span, stretch: tuple[int, int, int] | None) -> _Group:
        """The group of `states`, with all that was joined to one of them before, or that lies on the same stretch."""
        old = [g for g in self.groups if g.members & members or (stretch is not None and g.stretch == stretch)]
        group = _Group(set(members), old[0].span if old else span, stretch)
        for other in old:
            if group.stretch and other.stretch and group.stretch != other.stretch:
                shared = min(members & other.members)
                message = f"`{shared}` cannot be on {self._range(group.stretch)} and on {self._range(other.stretch)}"
                raise mistake(
                    "bad-place", message, span, "a state is in one pool", ((other.span, "placed here first"),)
                )
            group.members |= other.members
            group.stretch = group.stretch or other.stretch
        others = [g for g in self.groups if g not in old]
        for other in others:
            if (
                stretch
                and other.stretch
                and self.cluster
                and meet(stretch, other.stretch, self.cluster.devices_per_node)
            ):
                message = f"{self._range(stretch)} and {self._range(other.stretch)} overlap"
                related = ((other.span, self._range(other.stretch)),)
                raise mistake("bad-place", message, span, "pools have the same devices, or none in common", related)
        self.groups = [*others, group]
        return group

    def _range(self, stretch: tuple[int, int, int]) -> str:
        return device_range(*stretch, self.cluster.devices_per_node if self.cluster else 1)

    def _stretch(self, statement: ast.PlaceDecl) -> tuple[int, int, int]:
        """First device and number of devices, as the cluster counts them through all hosts; and those of each node, if
        some of several."""
        if self.cluster is None:
            raise TOLD
        hosts = statement.nodes
        each = self.cluster.devices_per_node
        assert hosts is not None
        within = statement.devices
        for found, most, what in ((hosts, self.cluster.nodes, "node"), (within, each, "device")):
            if found is not None and not found.first <= found.last < most:
                has = f"{most} {what}{'s' * (most > 1)}{' a node' * (what == 'device')}"
                if found.last < found.first:
                    help = f"write the smaller first: {found.last}..{found.first}"
                    raise mistake("bad-place", f"{what}s {found.first}..{found.last} run backwards", found.span, help)
                those = f"{what} {found.first}" if found.first == found.last else f"{what}s {found.first}..{found.last}"
                message = f"no {those}: cluster `{self.cluster.name}` has {has}"
                raise mistake("bad-place", message, found.span, f"they are counted from 0 to {most - 1}")
        first, last = (within.first, within.last) if within is not None else (0, each - 1)
        some = last + 1 - first
        number = (hosts.last + 1 - hosts.first) * some
        return hosts.first * each + first, number, some if some < min(number, each) else 0
