"""The process groups of a device, and the buffers of its collectives library.

Invariant: only groups that send tensors between devices count, since a library makes its buffers when it first sends
some: groups of layouts (runtime/rank/engines.py), of engines, of optimizers (backends/optimizer/shards.py), and of the
edges over which weights move (runtime/weights). A group of one rank does not count.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..backends.spec import EngineSpec
from ..ir.plan import Placement, Plan, Reshard
from ..sharding.layout import Layout

BUFFERS = "collectives' buffers"
MESH = ("pp", "dp", "cp", "tp")


def number(plan: Plan, engines: Mapping[str, EngineSpec], pool: str) -> int:
    """Return the number of groups of several ranks that a rank of a pool is in."""
    found, counted = 0, set[tuple[object, ...]]()

    def count(key: tuple[object, ...], groups: int) -> None:
        nonlocal found
        found += groups if key not in counted else 0
        counted.add(key)

    for p in (p for p in plan.placements if p.pool == pool):
        spec = engines[p.engine.name]
        at = _mesh(p)
        if not spec.own_groups:
            count(at, sum(getattr(p.layout, axis) > 1 for axis in MESH))
        count((p.engine.name, *at, p.layout.ep, p.layout.etp), spec.groups(p.layout))
        if plan.graph.node(p.node).verb == "update":
            count((p.node,), _copies(spec, p.layout))
    return found + sum(_edge(plan, r, pool) for r in plan.reshards)


def buffers(plan: Plan, engines: Mapping[str, EngineSpec], pool: str) -> int:
    """Return the bytes of the buffers on a device."""
    each = plan.cluster.device.kind.group_bytes
    return each * number(plan, engines, pool) if each else 0


def _mesh(p: Placement) -> tuple[int, ...]:
    """Return a key that is equal for placements of one mesh."""
    return (p.first, p.layout.inner, *(getattr(p.layout, axis) for axis in MESH))


def _copies(spec: EngineSpec, layout: Layout) -> int:
    """Return the groups in which an optimizer step sums gradients of the same weights."""
    divided = spec.divided(layout)
    dense = layout.cp > 1 or (layout.dp > 1 and not divided)
    return dense + (layout.ep > 1 and layout.edp > 1 and not divided)


def _edge(plan: Plan, r: Reshard, pool: str) -> int:
    """Return the groups of a resharding edge that a rank of a pool is in.

    There is a group of the ranks that gather or receive the same weights, one of the ranks that prove what they sent,
    and between pools one of all ranks, in which each sends to one other.
    """
    source = plan.placement(r.src)
    target = plan.placement(r.dst)
    if pool not in (source.pool, target.pool):
        return 0
    if r.mode == "send":
        moves = 1 + (pool == target.pool and target.layout.dp > 1)
    else:
        moves = len({(way.across, way.block) for way in r.ways if way.ranks > 1})
    return moves + (pool == source.pool and source.layout.devices > 1)
