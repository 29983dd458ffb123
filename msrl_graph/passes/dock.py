"""The pass that plans docks: a controller per node, and a warehouse on every host.

Source: arXiv:2507.19017, figure 4. Invariant: a controller is informed only of the columns that its node reads. Each
controller is placed on the host with the fewest busy devices. Among equal hosts, the host whose controllers serve the
fewest data-parallel groups is chosen. If hosts are still equal, a host with ranks of the node is chosen.
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
        devices_by_pool = {pool.name: plan.on_hosts(pool.name) for pool in plan.pools}
        busy = [*map(sum, zip(*devices_by_pool.values(), strict=True))]
        asked = [0] * plan.cluster.nodes
        unplaced = [
            self._make_controller(plan, placement)
            for placement in plan.placements
            if plan.graph.node(placement.node).verb != "source"
        ]
        host_of: dict[str, int] = {}
        for controller in sorted(unplaced, key=lambda controller: (-controller.groups, controller.node)):
            own = devices_by_pool.get(plan.placement(controller.node).pool, busy)
            host_of[controller.node] = host = min(
                hosts, key=lambda host_index: (busy[host_index], asked[host_index], not own[host_index], host_index)
            )
            asked[host] += controller.groups
        controllers = tuple(replace(controller, host=host_of[controller.node]) for controller in unplaced)
        return replace(
            plan,
            docks=DockPlan(
                options.mode, controllers, tuple(hosts), options.deadline, options.capacity, options.imbalance
            ),
        )

    def _make_controller(self, plan: Plan, placement: Placement) -> ControllerSpec:
        node = plan.graph.node(placement.node)
        layout = placement.layout
        edges = [SampleEdgeAttributes.of(edge) for edge in plan.graph.into(node.name)]
        on_hosts = placement.pool == FUNCTIONS
        spans = (
            not on_hosts
            and layout.dp > 1
            and (node.verb == "update" or self.engines[placement.engine.name].needs_equal_calls(layout))
        )
        return ControllerSpec(
            node=node.name,
            host=0,
            columns=node.reads,
            groups=plan.cluster.nodes if on_hosts else layout.dp,
            chunk=min((edge.stream for edge in edges if edge.stream), default=0),
            chunk_tokens=min((edge.stream_tokens for edge in edges if edge.stream_tokens), default=0),
            lockstep=spans,
        )
