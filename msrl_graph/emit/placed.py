"""The placed graph: an algorithm's graph with what the passes put in, as nodes and edges.

Invariant: every sample edge goes through the `dock` node of the state that it leads to, every resharding edge through an
`allgather_swap` node of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..plan import Plan


@dataclass(frozen=True)
class Vertex:
    name: str
    kind: str  # state, dock or allgather_swap
    where: str
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Arc:
    src: str
    dst: str
    kind: str  # sample or reshard


def placed(plan: Plan) -> tuple[tuple[Vertex, ...], tuple[Arc, ...]]:
    """The vertices and arcs of a plan with placements, docks and reshards."""
    vertices, arcs = [], []
    for p in plan.placements:
        facts = {"layout": str(p.layout), "engine": p.engine.name} if p.pool == "devices" else {}
        vertices.append(Vertex(p.node, "state", p.pool, facts))
    for c in plan.docks.controllers:
        where = f"host {c.host}; rows on {'host' if len(plan.docks.hosts) == 1 else 'hosts'} {', '.join(map(str, plan.docks.hosts))}"
        vertices.append(Vertex(f"dock {c.node}", "dock", where, {"columns": ", ".join(c.columns), "groups": str(c.groups)}))
        arcs.append(Arc(f"dock {c.node}", c.node, "sample"))
    for r in plan.reshards:
        name = f"allgather_swap {r.src} => {r.dst}"
        facts = {"mode": r.mode, "order": r.order, "group": str(r.group)}
        vertices.append(Vertex(name, "allgather_swap", "devices", facts))
        arcs += [Arc(r.src, name, "reshard"), Arc(name, r.dst, "reshard")]
    arcs += [Arc(e.src, f"dock {e.dst}", "sample") for e in plan.graph.samples()]
    return tuple(vertices), tuple(sorted(arcs, key=lambda a: (a.kind, a.src, a.dst)))
