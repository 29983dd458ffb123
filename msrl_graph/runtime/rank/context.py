"""What all parts of a rank share: its place in the plan, and its groups of ranks.

Invariant: all ranks of a group call `share_result` and the methods that end in `over_groups` in the same order. A
layout numbers the ranks of one pool, and torch.distributed numbers the ranks of all pools.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...backends.devices import TorchDevice
from ...ir.graph import Node
from ...ir.plan import Placement, Plan
from ..data.columns import Array
from ..data.numerics import NumericsWatch
from ..dock.messages import Batch
from ..metrics.reward_variance import ColumnMeans
from ..process.task import Task
from ..process.task_report import Report
from . import object_collectives

T = TypeVar("T")


@dataclass(frozen=True)
class NodeBatch:
    """A batch of rows that a node computes in a task, and the report on it."""

    node: Node
    task: Task
    batch: Batch
    report: Report


class RankContext:
    """The place of rank number `rank` in a plan, and its groups of ranks.

    - `pool`: the rank's pool; None if no node has a device of this rank. `local`: the rank's number in layouts.
    - `store`: the store through which the ranks find each other.
    - `watch`, `means`: the checks of the numbers that nodes produce, and their means.
    """

    def __init__(self, plan: Plan, rank: int, device: TorchDevice | None = None) -> None:
        self.plan = plan
        self.rank = rank
        self.device = device or TorchDevice(plan.cluster.device.kind)
        self.per_host = plan.cluster.devices_per_node
        self.pool = plan.pool_of(rank)
        self.local = self.pool.rank(rank, self.per_host) if self.pool else 0
        self.store: Any = None
        self.watch = NumericsWatch(plan)
        self.means = ColumnMeans(plan)
        self.meshes: dict[tuple[int, ...], DeviceMesh] = {}

    @property
    def placements(self) -> list[Placement]:
        """The placements of the nodes in this rank's pool."""
        return [placement for placement in self.plan.placements if self.is_here(placement.node)]

    def is_here(self, node: str) -> bool:
        """Return whether a node is in this rank's pool."""
        return self.pool is not None and self.plan.placement(node).pool == self.pool.name

    def mesh(self, placement: Placement) -> DeviceMesh:
        layout = placement.layout
        key = (placement.first, layout.tp, layout.cp, layout.dp, layout.pp, layout.inner)
        if key not in self.meshes:
            axes = tuple(axis for axis in ("pp", "dp", "cp", "tp") if axis in ("dp", "tp") or getattr(layout, axis) > 1)
            sizes = [getattr(layout, axis) for axis in axes]
            coordinates = [dict(zip(axes, indices, strict=True)) for indices in product(*map(range, sizes))]
            ranks = torch.tensor([placement.device(layout.rank(**point), self.per_host) for point in coordinates]).view(
                sizes
            )
            self.meshes[key] = DeviceMesh(self.device.kind.torch, ranks, mesh_dim_names=axes)
        return self.meshes[key]

    def dp_group(self, node: Node) -> dist.ProcessGroup | None:
        """Return the process group over a node's data-parallel groups; None for one."""
        placement = self.plan.placement(node.name)
        return self.mesh(placement)["dp"].get_group() if placement.layout.dp > 1 else None

    def is_group_leader(self, node: Node) -> bool:
        """Return whether this rank is the leader of its data-parallel group.

        Some ranks of the group have the model's last layers. The leader is the first of these ranks.
        """
        layout = self.plan.placement(node.name).layout
        coordinates = layout.coordinates(self.local)
        return (coordinates.tp, coordinates.cp, coordinates.pp) == (0, 0, layout.pp - 1)

    def is_leader(self, node: Node) -> bool:
        """Return whether this rank alone reports what all ranks of a node have in common."""
        return self.is_group_leader(node) and self.plan.placement(node.name).layout.coordinates(self.local).dp == 0

    def share_result(self, node: Node, find: Callable[..., T], *arguments: Any) -> T:
        """Call `find` on the leader of this rank's data-parallel group; return the result.

        All ranks of the group call this method and return the same value.
        """
        placement = self.plan.placement(node.name)
        shared: Any = find(*arguments) if self.is_group_leader(node) else None
        # One mesh axis after the other, so that each rank receives the value from a rank that already has it.
        for axis, source in (("tp", 0), ("cp", 0), ("pp", placement.layout.pp - 1)):
            if getattr(placement.layout, axis) > 1:
                group = self.mesh(placement)[axis].get_group()
                shared = object_collectives.broadcast(shared, group, source)
        result: T = shared
        return result

    def largest_over_groups(self, node: Node, number: int) -> int:
        """Return the largest `number` of the data-parallel groups of a node."""
        group = self.dp_group(node)
        if group is None:
            return number
        largest = torch.tensor([number])
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        return int(largest)

    def sum_over_groups(self, node: Node, numbers: Array) -> Array:
        """Return the sum of the arrays `numbers` over the data-parallel groups of a node."""
        group = self.dp_group(node)
        if group is None:
            return numbers
        total = torch.from_numpy(numbers)
        dist.all_reduce(total, group=group)
        sums: Array = total.numpy()
        return sums
