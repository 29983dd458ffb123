"""dock: a controller for every node, `replicas` warehouses on every host (arXiv:2507.19017, figure 4).

Invariant: a controller hears only of the columns that its node reads, and lives on the host of the node's first rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ..backends.spec import EngineSpec
from ..ir import verify
from ..ir.attributes import SampleEdge
from ..ir.graph import Graph
from ..ir.plan import FUNCTIONS, Controller, Docks, Placement, Plan
from .spec import Pass


@dataclass(frozen=True)
class Dock(Pass):
    """`engines` are the specs by name."""

    name = "dock"
    needs = ("place",)

    engines: Mapping[str, EngineSpec]

    def verify(self, plan: Plan) -> Iterator[str]:
        return verify.docks(plan)

    def apply(self, plan: Plan) -> Plan:
        options = plan.deploy.dock
        controllers = tuple(
            self._controller(plan, p) for p in plan.placements if plan.graph.node(p.node).verb != "source"
        )
        hosts = 1 if options.mode == "central" else plan.cluster.nodes
        warehouses = tuple(host for host in range(hosts) for _ in range(options.replicas))
        return replace(
            plan,
            docks=Docks(options.mode, controllers, warehouses, options.deadline, options.capacity, options.imbalance),
        )

    def _controller(self, plan: Plan, placement: Placement) -> Controller:
        node, layout = plan.graph.node(placement.node), placement.layout
        on_hosts = placement.pool == FUNCTIONS
        spans = (
            not on_hosts
            and layout.dp > 1
            and (node.verb == "update" or self.engines[placement.engine.name].in_step(layout))
        )
        return Controller(
            node=node.name,
            host=0 if on_hosts else plan.cluster.host(placement.first),
            columns=node.reads,
            groups=plan.cluster.nodes if on_hosts else layout.dp,
            chunk=_chunk(plan.graph, node.name),
            lockstep=spans,
        )


def _chunk(graph: Graph, node: str) -> int:
    """The smallest `stream` of the edges that lead to a node: it may start when that many units are ready. 0: when all
    are."""
    return min((n for e in graph.into(node) if (n := SampleEdge.of(e).stream)), default=0)
