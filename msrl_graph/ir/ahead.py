"""Which pools may be ahead of the updates: what `staleness` allows.

Invariant: iteration j generates with weights of iteration j - staleness at the oldest, so that no pool begins an
iteration more than so many before its update does.
"""

from __future__ import annotations

from .attributes import ReshardingEdge
from .graph import Graph
from .plan import Plan


def stale(graph: Graph) -> dict[tuple[str, str], int]:
    """By resharding edge, as (src, dst), how many versions its generation may be behind; only those that may be."""
    return {(e.src, e.dst): n for e in graph.reshards() if (n := ReshardingEdge.of(e).staleness)}


def leads(plan: Plan) -> dict[str, int]:
    """By pool, how many iterations it may begin before their updates do; only pools that may. One that updates, or gets
    the newest weights, is in step."""
    behind = stale(plan.graph)
    found = {}
    for pool in plan.pools:
        nodes = [plan.graph.node(p.node) for p in plan.placements if p.pool == pool.name]
        edges = [(e.src, e.dst) for e in plan.graph.reshards() if e.dst in {n.name for n in nodes}]
        lead = min((behind.get(e, 0) for e in edges), default=max(behind.values(), default=0))
        if lead and not any(n.verb == "update" for n in nodes):
            found[pool.name] = lead
    return found
