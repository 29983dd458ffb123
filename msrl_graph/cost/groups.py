"""The process groups of a device, and the buffers that these process groups need.

Invariant: only process groups that send tensors between devices are counted, because a collectives library allocates
buffers when a group first sends a tensor. The counted process groups are created by layouts (runtime/rank/engines.py),
by engines, by optimizers (backends/optimizer/shards.py), and by resharding edges (runtime/weights). A process group of
one rank is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..backends.spec import EngineSpec
from ..ir.plan import Placement, Plan
from ..ir.resharding_plan import Reshard
from ..sharding.layout import Layout

BUFFERS = "collectives' buffers"
MOST_OF_EDGE = 4  # process groups of a resharding edge, to which a rank belongs
MESH = ("pp", "dp", "cp", "tp")


def count_groups(plan: Plan, engines: Mapping[str, EngineSpec], pool: str) -> int:
    """Return the number of process groups that one rank of a pool belongs to.

    Process groups of only one rank are not counted.
    """
    total = 0
    counted = set[tuple[object, ...]]()

    def count(key: tuple[object, ...], groups: int) -> None:
        nonlocal total
        total += groups if key not in counted else 0
        counted.add(key)

    for placed in (placement for placement in plan.placements if placement.pool == pool):
        spec = engines[placed.engine.name]
        mesh = _mesh_key(placed)
        if not spec.memory.own_groups:
            count(mesh, sum(getattr(placed.layout, axis) > 1 for axis in MESH))
        count((placed.engine.name, *mesh, placed.layout.ep, placed.layout.etp), spec.memory.groups(placed.layout))
        if plan.graph.node(placed.node).verb == "update":
            count((placed.node,), _count_copy_groups(spec, placed.layout))
    return total + sum(_count_edge_groups(plan, reshard, pool) for reshard in plan.reshards)


def buffer_bytes(plan: Plan, engines: Mapping[str, EngineSpec], pool: str) -> int:
    """Return the bytes of the collectives library's buffers on a device of a pool."""
    group_bytes = plan.cluster.device.kind.group_bytes
    return group_bytes * count_groups(plan, engines, pool) if group_bytes else 0


def bound_edge_bytes(plan: Plan) -> int:
    """Return the most bytes of buffers that resharding adds on a device.

    Before resharding is planned, `buffer_bytes` does not include them.
    """
    return plan.cluster.device.kind.group_bytes * MOST_OF_EDGE * len([*plan.graph.reshards()])


def _mesh_key(placement: Placement) -> tuple[int, ...]:
    """Return a key that is equal for two placements if their device meshes are equal."""
    return (placement.first, placement.layout.inner, *(getattr(placement.layout, axis) for axis in MESH))


def _count_copy_groups(spec: EngineSpec, layout: Layout) -> int:
    """Return the number of process groups that sum the gradients of copied weights.

    An optimizer step uses one group for the copies of dense weights, and one group for the copies of experts.
    """
    divided = spec.divides_weights(layout)
    dense = layout.cp > 1 or (layout.dp > 1 and not divided)
    return dense + (layout.ep > 1 and layout.edp > 1 and not divided)


def _count_edge_groups(plan: Plan, reshard: Reshard, pool: str) -> int:
    """Return how many process groups of a resharding edge a rank of a pool belongs to.

    A rank belongs to these process groups:
    - If both nodes are in one pool: one group for each different way in which ranks gather weights. Ways differ in the
      number of consecutive ranks (the block), and in whether all pipeline stages take part.
    - If the nodes are in two pools: the group of all ranks, for messages from one rank to another. A rank of the
      generation's pool also belongs to the group of the ranks that receive the same weights.
    - If the rank is in the update's pool: the group of the ranks that sent the weights, to check that the weights
      arrived correctly.
    """
    source = plan.placement(reshard.src)
    target = plan.placement(reshard.dst)
    if pool not in (source.pool, target.pool):
        return 0
    if reshard.mode == "send":
        moves = 1 + (pool == target.pool and target.layout.dp > 1)
    else:
        moves = len({(way.across, way.block) for way in reshard.ways if way.ranks > 1})
    return moves + (pool == source.pool and source.layout.devices > 1)
