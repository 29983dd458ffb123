"""Lowering of `place` and `apart` to the pools that a deploy states.

Invariant: no node and no device is in two pools. Nodes that share weights are in one pool. If no statement names a
node, the planner places the node. If no `place` states a pool's device range, the planner chooses the range.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ..diagnostics import Span, nearest
from ..hardware.cluster import ClusterSpec
from ..ir.graph import Graph
from ..ir.plan import Pool
from ..sharding.device_range import format_device_range, ranges_overlap
from . import ast
from .expressions import ALREADY_REPORTED, Problems, mistake


@dataclass
class _Group:
    """Nodes that must be in one pool.

    If an `apart` statement gives the nodes a pool of their own, `apart` is the node or worker that the statement names.
    Otherwise `apart` is None.
    """

    members: set[str]
    span: Span
    device_span: tuple[int, int, int] | None = (
        None  # first device, number of devices, and devices per host (0: consecutive)
    )
    apart: ast.Ref | None = None


def lower_pools(
    statements: Collection[ast.PlaceDecl | ast.ApartDecl],
    graph: Graph,
    nodes: Collection[str],
    cluster: ClusterSpec | None,
    problems: Problems,
) -> tuple[tuple[Pool, ...], tuple[tuple[str, ...], ...]]:
    """Return the pools, and the groups of nodes that must share a pool.

    A pool is a group of nodes with a device range or an `apart` statement. The pools are in the order of the text. Each
    other group has the nodes of a `place … together` without a device range; the planner chooses the group's pool.
    `nodes` are all nodes that the algorithm declares.
    """
    lowering = _Pools(graph, nodes, cluster, problems)
    # All `place` statements come first, whatever the order of the text: they determine which nodes stay together.
    for statement in sorted(statements, key=lambda declaration: isinstance(declaration, ast.ApartDecl)):
        with problems.catching():
            if isinstance(statement, ast.PlaceDecl):
                lowering.place(statement)
            else:
                lowering.apart(statement)
    order = [node.name for node in graph.nodes]
    groups = sorted(lowering.groups, key=lambda group: (group.apart or group).span)
    pool_groups = [group for group in groups if group.device_span or group.apart]
    pools = []
    for group in pool_groups:
        first, devices, per_node = group.device_span or (0, 0, 0)
        pools.append(
            Pool(
                tuple(sorted(group.members, key=order.index)),
                first,
                devices,
                span=(group.apart or group).span,
                each=per_node,
            )
        )
    return tuple(pools), tuple(
        tuple(sorted(group.members, key=order.index)) for group in groups if group not in pool_groups
    )


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
            raise mistake("bad-value", "this `place` needs `together` or `on nodes`", statement.span, help)
        members = set[str]().union(*(self._resolve_members(ref) for ref in statement.targets))
        self._join_groups(members, statement.span, self._device_range(statement) if statement.nodes else None)

    def apart(self, statement: ast.ApartDecl) -> None:
        for ref in statement.targets:
            with self.problems.catching():
                members = self._resolve_members(ref)
                for other in [group.apart for group in self.groups if group.apart and group.members & members]:
                    if other.text != ref.text:
                        message = (
                            f"`{ref.text}` and `{other.text}` cannot be apart: {self._explain_conflict(ref, other)}"
                        )
                        raise mistake("bad-place", message, ref.span, related=((other.span, "apart here"),))
                self._join_groups(members, ref.span, None).apart = ref

    def _explain_conflict(self, ref: ast.Ref, other: ast.Ref) -> str:
        both = self._resolve_members(ref) & self._resolve_members(other)
        if not both:
            return "`place` keeps them together"
        worker = next((candidate.text for candidate in (ref, other) if candidate.text not in self.nodes), None)
        return f"`{min(both)}` is a state of `{worker}`" if worker else "they share the weights of one worker"

    def _resolve_members(self, ref: ast.Ref) -> set[str]:
        """Return the nodes that a name in a `place` or `apart` statement refers to.

        For a worker, these are the worker's nodes. For a node, these are the node and all nodes that share its weights.
        """
        workers = {worker.name: worker for worker in self.graph.workers}
        if ref.text in workers:
            members = [member for member in self.graph.nodes if member.worker == ref.text]
            function = workers[ref.text].kind == "function"
        elif ref.text not in self.nodes:
            raise mistake(
                "unknown-name",
                f"no node or worker is called `{ref.text}`",
                ref.span,
                nearest(ref.text, [*self.nodes, *workers]),
            )
        elif all(member.name != ref.text for member in self.graph.nodes):
            raise ALREADY_REPORTED
        else:
            node = self.graph.node(ref.text)
            sharing = self.graph.sharing(node.worker)
            members = list(sharing) if node in sharing else [node]
            function = node.verb == "source" or workers[node.worker].kind == "function"
        if function:
            raise mistake(
                "bad-value", f"`{ref.text}` runs on the hosts' CPUs, so it takes no devices", ref.span, "leave it out"
            )
        if not members:
            raise mistake("bad-place", f"`{ref.text}` has no nodes, so it takes no devices", ref.span, "leave it out")
        return {member.name for member in members}

    def _join_groups(self, members: set[str], span: Span, device_span: tuple[int, int, int] | None) -> _Group:
        """Add a group of nodes, and merge it with the groups that it overlaps.

        Groups overlap if they have a node in common or have the same device range.
        """
        old = [
            known
            for known in self.groups
            if known.members & members or (device_span is not None and known.device_span == device_span)
        ]
        group = _Group(set(members), old[0].span if old else span, device_span)
        for other in old:
            if group.device_span and other.device_span and group.device_span != other.device_span:
                shared = min(members & other.members)
                message = (
                    f"`{shared}` cannot be on {self._format_range(group.device_span)} and on "
                    f"{self._format_range(other.device_span)}"
                )
                raise mistake(
                    "bad-place", message, span, "a state is in one pool", ((other.span, "placed here first"),)
                )
            group.members |= other.members
            group.device_span = group.device_span or other.device_span
        others = [known for known in self.groups if known not in old]
        for other in others:
            if (
                device_span
                and other.device_span
                and self.cluster
                and ranges_overlap(device_span, other.device_span, self.cluster.devices_per_node)
            ):
                message = f"{self._format_range(device_span)} and {self._format_range(other.device_span)} overlap"
                related = ((other.span, self._format_range(other.device_span)),)
                raise mistake("bad-place", message, span, "pools have the same devices, or none in common", related)
        self.groups = [*others, group]
        return group

    def _format_range(self, device_span: tuple[int, int, int]) -> str:
        return format_device_range(*device_span, self.cluster.devices_per_node if self.cluster else 1)

    def _device_range(self, statement: ast.PlaceDecl) -> tuple[int, int, int]:
        """Return the first device, the number of devices, and the devices per host.

        Devices are counted from 0 through all hosts of the cluster. The third number is 0 if the devices are
        consecutive, and is above 0 only if several hosts contribute some, but not all, of their devices.
        """
        if self.cluster is None:
            raise ALREADY_REPORTED
        hosts = statement.nodes
        devices_per_node = self.cluster.devices_per_node
        assert hosts is not None
        within = statement.devices
        for span_range, most, unit in ((hosts, self.cluster.nodes, "node"), (within, devices_per_node, "device")):
            if span_range is not None and not span_range.first <= span_range.last < most:
                has = f"{most} {unit}{'s' * (most > 1)}{' a node' * (unit == 'device')}"
                if span_range.last < span_range.first:
                    help = f"write the smaller first: {span_range.last}..{span_range.first}"
                    raise mistake(
                        "bad-place",
                        f"{unit}s {span_range.first}..{span_range.last} are in the wrong order",
                        span_range.span,
                        help,
                    )
                those = (
                    f"{unit} {span_range.first}"
                    if span_range.first == span_range.last
                    else f"{unit}s {span_range.first}..{span_range.last}"
                )
                message = f"no {those}: cluster `{self.cluster.name}` has {has}"
                raise mistake("bad-place", message, span_range.span, f"they are counted from 0 to {most - 1}")
        first, last = (within.first, within.last) if within is not None else (0, devices_per_node - 1)
        devices = last + 1 - first
        number = (hosts.last + 1 - hosts.first) * devices
        return hosts.first * devices_per_node + first, number, devices if devices < min(number, devices_per_node) else 0
