"""The placed graph: an algorithm's graph with its docks and reshards.

Invariant: every sample edge leads through the `dock` vertex of its destination. Every resharding edge leads through a
separate vertex: a `send` between two pools, or an `allgather_swap` within one pool.
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


def build_placed_graph(plan: Plan) -> tuple[tuple[Vertex, ...], tuple[Arc, ...]]:
    """Return the vertices and arcs of the placed graph of a plan.

    The plan must have placements, docks and reshards.
    """
    vertices = []
    arcs = []
    for placement in plan.placements:
        facts = (
            {"layout": str(placement.layout), "engine": placement.engine.name} if placement.pool != "functions" else {}
        )
        vertices.append(Vertex(placement.node, "state", placement.pool, facts))
    for controller in plan.docks.controllers:
        where = (
            f"host {controller.host}; rows on {'host' if len(plan.docks.warehouses) == 1 else 'hosts'} "
            f"{', '.join(map(str, plan.docks.warehouses))}"
        )
        vertices.append(
            Vertex(
                f"dock {controller.node}",
                "dock",
                where,
                {"columns": ", ".join(controller.columns), "groups": str(controller.groups)},
            )
        )
        arcs.append(Arc(f"dock {controller.node}", controller.node, "sample"))
    for reshard in plan.reshards:
        kind = "send" if reshard.mode == "send" else "allgather_swap"
        name = f"{kind} {reshard.name}"
        facts = {"mode": reshard.mode, "order": reshard.order, "group": str(reshard.ways[0].ranks)}
        where = " to ".join(dict.fromkeys(plan.placement(node).pool for node in (reshard.src, reshard.dst)))
        vertices.append(Vertex(name, kind, where, {"buckets": str(len(reshard.buckets))} if kind == "send" else facts))
        arcs += [Arc(reshard.src, name, "reshard"), Arc(name, reshard.dst, "reshard")]
    arcs += [Arc(edge.src, f"dock {edge.dst}", "sample") for edge in plan.graph.samples()]
    return tuple(vertices), tuple(sorted(arcs, key=lambda arc: (arc.kind, arc.src, arc.dst)))
