"""The placed graph: an algorithm's graph with its docks and reshards.

Invariant: every sample edge passes the `dock` before its destination, every resharding edge a node of its own: an
`allgather_swap`, or between two pools a `send`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..ir.plan import Plan


@dataclass(frozen=True)
class Vertex:
    """A node of the placed graph."""

    name: str
    kind: str  # state, dock, allgather_swap or send
    where: str
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Arc:
    """An edge of the placed graph."""

    src: str
    dst: str
    kind: str  # sample or reshard


def placed(plan: Plan) -> tuple[tuple[Vertex, ...], tuple[Arc, ...]]:
    """Return the vertices and arcs of a plan with placements, docks and reshards."""
    vertices = []
    arcs = []
    for p in plan.placements:
        facts = {"layout": str(p.layout), "engine": p.engine.name} if p.pool != "functions" else {}
        vertices.append(Vertex(p.node, "state", p.pool, facts))
    for c in plan.docks.controllers:
        where = (
            f"host {c.host}; rows on {'host' if len(plan.docks.warehouses) == 1 else 'hosts'} "
            f"{', '.join(map(str, plan.docks.warehouses))}"
        )
        vertices.append(
            Vertex(f"dock {c.node}", "dock", where, {"columns": ", ".join(c.columns), "groups": str(c.groups)})
        )
        arcs.append(Arc(f"dock {c.node}", c.node, "sample"))
    for r in plan.reshards:
        kind = "send" if r.mode == "send" else "allgather_swap"
        name = f"{kind} {r.name}"
        facts = {"mode": r.mode, "order": r.order, "group": str(r.ways[0].ranks)}
        where = " to ".join(dict.fromkeys(plan.placement(n).pool for n in (r.src, r.dst)))
        vertices.append(Vertex(name, kind, where, {"buckets": str(len(r.buckets))} if kind == "send" else facts))
        arcs += [Arc(r.src, name, "reshard"), Arc(name, r.dst, "reshard")]
    arcs += [Arc(e.src, f"dock {e.dst}", "sample") for e in plan.graph.samples()]
    return tuple(vertices), tuple(sorted(arcs, key=lambda a: (a.kind, a.src, a.dst)))
