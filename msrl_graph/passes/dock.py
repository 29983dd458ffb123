"""dock: a controller for every node, a warehouse on every host.

Source: arXiv:2507.19017, figure 4. Invariant: a controller is informed only of the columns that its node reads. Each
controller goes to the host with the fewest busy devices; ties go to the host whose controllers serve the fewest groups,
then to a host with ranks of the node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ..backends.spec import EngineSpec
from ..ir import verify
from ..ir.attributes import SampleEdgeAttributes
from ..ir.plan import FUNCTIONS, ControllerSpec, DockPlan, Placement, Plan
from .spec import Pass


@dataclass(frozen=True)
class InsertDock(Pass):
    """The pass that places controllers and warehouses; `engines` are specs by name."""

    name = "dock"
    needs = ("place",)

    engines: Mapping[str, EngineSpec]

    def verify(self, plan: Plan) -> Iterator[str]:
        return verify.docks(plan)

    def apply(self, plan: Plan) -> Plan:
        options = plan.deploy.dock
        hosts = range(1 if options.mode == "central" else plan.cluster.nodes)
        # By host: the devices of each pool, the busy devices, and the groups that its controllers serve.
        every = {pool.name: plan.on_hosts(pool.name) for pool in plan.pools}
        busy, asked = [*map(sum, zip(*every.values(), strict=True))], [0] * plan.cluster.nodes
        found = [self._controller(plan, p) for p in plan.placements if plan.graph.node(p.node).verb != "source"]
        at: dict[str, int] = {}
        for controller in sorted(found, key=lambda c: (-c.groups, c.node)):
            own = every.get(plan.placement(controller.node).pool, busy)
            at[controller.node] = host = min(hosts, key=lambda h: (busy[h], asked[h], not own[h], h))
            asked[host] += controller.groups
        controllers = tuple(replace(c, host=at[c.node]) for c in found)
        return replace(
            plan,
            docks=DockPlan(
                options.mode, controllers, tuple(hosts), options.deadline, options.capacity, options.imbalance
            ),
        )

    def _controller(self, plan: Plan, placement: Placement) -> ControllerSpec:
        node = plan.graph.node(placement.node)
        layout = placement.layout
        edges = [SampleEdgeAttributes.of(e) for e in plan.graph.into(node.name)]
        on_hosts = placement.pool == FUNCTIONS
        spans = (
            not on_hosts
            and layout.dp > 1
            and (node.verb == "update" or self.engines[placement.engine.name].in_step(layout))
        )
        return ControllerSpec(
            node=node.name,
            host=0,
            columns=node.reads,
            groups=plan.cluster.nodes if on_hosts else layout.dp,
            chunk=min((e.stream for e in edges if e.stream), default=0),
            chunk_tokens=min((e.stream_tokens for e in edges if e.stream_tokens), default=0),
            lockstep=spans,
        )
