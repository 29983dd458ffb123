"""The pass that plans docks: a controller per node, and a warehouse on every host.

Source: arXiv:2507.19017, figure 4. Invariant: a controller is informed only of the columns that its node reads. Each
controller is placed on the host with the fewest busy devices. Among equal hosts, the host whose controllers serve the
fewest data-parallel groups is chosen. If hosts are still equal, a host with ranks of the node is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..diagnostics.quantities import plural, size
from ..diagnostics.sheet import Sheet
from ..ir.attributes import SampleEdgeAttributes
from ..ir.plan import FUNCTIONS, ControllerSpec, DockPlan, Placement, Plan
from .facts import Fact, Section, field_facts
from .spec import Pass, describe_incomplete


@dataclass(frozen=True)
class InsertDock(Pass):
    """The pass that places controllers and warehouses."""

    name = "dock"
    title = "Transfer dock"
    needs = ("place",)
    fills = ("docks",)

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

    @staticmethod
    def verify(plan: Plan) -> Iterator[str]:
        """Verify docks.

        Every node except the source must have one controller. The controller must have the columns that the node reads
        and the number of the node's data-parallel groups. Warehouses must be on different hosts.
        """
        if sorted(controller.node for controller in plan.docks.controllers) != sorted(
            node.name for node in plan.graph.nodes[1:]
        ):
            yield describe_incomplete("dock")
            return
        stores = plan.docks.warehouses
        hosts = plan.cluster.nodes
        used = {*stores, *(controller.host for controller in plan.docks.controllers)}
        if not stores or not all(0 <= host < hosts for host in used):
            yield "one of its controllers or warehouses is not on a host of the cluster, or it has no warehouse"
        if len(set(stores)) < len(stores):
            yield "two of its warehouses are on one host"
        for controller in plan.docks.controllers:
            placement = plan.placement(controller.node)
            if controller.columns != plan.graph.node(controller.node).reads:
                yield f"the controller of `{controller.node}` does not have exactly the columns of its node"
            if controller.groups != (hosts if placement.pool == FUNCTIONS else placement.layout.dp):
                yield f"the controller of `{controller.node}` does not have as many groups as the node"

    @classmethod
    def write(cls, page: Sheet, plan: Plan) -> None:
        if not plan.docks.controllers:
            return
        docks = plan.docks
        where = (
            f"{plural(len(docks.warehouses), 'warehouse')} on {'host' if len(docks.warehouses) == 1 else 'hosts'} "
            f"{_format_range(docks.warehouses)}"
        )
        remark = f"{docks.mode}: {plural(len(docks.controllers), 'controller')}, {where}; deadline {docks.deadline:g} s"
        remark += f"; at most {size(docks.capacity)} of rows a host" if docks.capacity else ""
        remark += (
            f"; a share may be {docks.imbalance:g} x the even share, to keep rows on their host"
            if docks.imbalance > 1
            else ""
        )
        if len({controller.host for controller in docks.controllers}) > 1:
            remark += "; each controller is on a host with the fewest busy devices and groups to serve"
        page.heading("Transfer dock", remark)
        rows = []
        for controller in docks.controllers:
            batch = [f"{controller.chunk}"] * (controller.chunk > 0) + [plural(controller.chunk_tokens, "token")] * (
                controller.chunk_tokens > 0
            )
            chunk = f"{' or '.join(batch)} as soon as ready" if batch else "all"
            lockstep = "in lockstep: a collective spans its groups" if controller.lockstep else "each group on its own"
            rows.append(
                (
                    controller.node,
                    str(controller.host),
                    ", ".join(controller.columns),
                    str(controller.groups),
                    chunk,
                    lockstep,
                )
            )
        page.table(("controller of", "host", "columns", "groups", "hands out", "how"), rows, (1, 3))

    @staticmethod
    def facts(plan: Plan) -> Section:
        docks = plan.docks
        section: Section = {"": {"mode": Fact(docks.mode), "deadline of a wait": Fact(docks.deadline, "s")}}
        section[""]["warehouses"] = Fact(float(len(docks.warehouses)), "warehouses")
        section[""]["rows a host"] = (
            Fact(float(docks.capacity), "bytes") if docks.capacity else Fact("limited by memory")
        )
        section[""]["largest share"] = Fact(docks.imbalance, "x the even share")
        for controller in docks.controllers:
            section[f"controller of {controller.node}"] = field_facts(controller, skip=("node",))
        return section


def _format_range(numbers: Sequence[int]) -> str:
    return f"{numbers[0]}..{numbers[-1]}" if len(numbers) > 2 else ", ".join(map(str, numbers))
