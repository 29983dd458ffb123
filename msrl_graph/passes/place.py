"""The placements of a plan: how they are verified, shown and compared.

Invariant: every choice is shown with its reason. The passes that place nodes are in `planner/`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from ..analysis.concurrency import MAX_ASYNC_CALLS, concurrent_calls, read_signature
from ..diagnostics.quantities import duration, plural, size, staleness
from ..diagnostics.sheet import Sheet
from ..hardware.cluster import Figure
from ..ir.expr import format_option
from ..ir.graph import Node
from ..ir.plan import FUNCTIONS, EngineChoice, Placement, Plan
from ..ir.search_record import Rival, SearchRecord
from ..model.layers import ExpertMlp
from ..sharding.device_range import iterate_runs, ranges_overlap
from ..sharding.layout import Layout
from .facts import Fact, Section, field_facts
from .spec import Pass, describe_incomplete, has_every_node


class PlacementPass(Pass):
    """The base class of passes that place nodes: by a search, or as decided."""

    name = "place"
    title = "Placements"
    fills = ("pools", "placements", "search")

    @staticmethod
    def verify(plan: Plan) -> Iterator[str]:
        """Verify placements.

        Every node must have one placement: a function on the hosts, a node with weights on the devices of its pool. No
        two pools may share a device. Only generations may have their data-parallel replicas on neighboring ranks
        (`inner` > 1). All other nodes must have the default order of ranks, since process groups and FSDP2 number ranks
        in this order.
        """
        if not has_every_node(plan, [placement.node for placement in plan.placements]):
            yield describe_incomplete("place")
            return
        cluster = plan.cluster
        pools = {pool.name: pool for pool in plan.pools}
        per_host = cluster.devices_per_node
        for pool in plan.pools:
            ranges = iterate_runs(pool.first, pool.devices, pool.each, per_host)
            if pool.devices < 1 or pool.first < 0 or any(stop > cluster.devices for _, stop in ranges):
                yield f"the cluster does not have the devices of its pool `{pool.name}`"
                return
        for one, other in combinations(plan.pools, 2):
            if ranges_overlap((one.first, one.devices, one.each), (other.first, other.devices, other.each), per_host):
                yield f"its pools `{one.name}` and `{other.name}` have a device in common"
        for placement in plan.placements:
            if _is_on_hosts(plan, plan.graph.node(placement.node)) != (placement.pool == FUNCTIONS):
                yield f"`{placement.node}` cannot be in the pool `{placement.pool}`"
            elif placement.pool != FUNCTIONS:
                pool = pools[placement.pool]
                if placement.node not in pool.nodes or (placement.first, placement.each, placement.layout.devices) != (
                    pool.first,
                    pool.each,
                    pool.devices,
                ):
                    yield f"`{placement.node}` is not on the devices of its pool `{pool.name}`"
                elif placement.layout.dp % placement.layout.inner or (
                    placement.layout.inner > 1 and plan.graph.node(placement.node).verb != "generate"
                ):
                    inner = placement.layout.inner
                    yield f"the replicas of `{placement.node}` cannot be next to each other in groups of {inner}"

    @classmethod
    def write(cls, page: Sheet, plan: Plan) -> None:
        seconds = {phase.name: phase.seconds for phase in plan.estimate.phases} if plan.estimate else {}
        on_devices = {device_pool.name: device_pool for device_pool in plan.pools}
        for pool in dict.fromkeys([*on_devices, *(placement.pool for placement in plan.placements)]):
            listed = [placement for placement in plan.placements if placement.pool == pool]
            remark = "the hosts' CPUs"
            if pool in on_devices:
                device_pool = on_devices[pool]
                how = f"{device_pool.reason}; shared by its" if device_pool.reason else "shared by all"
                remark = f"{plural(device_pool.devices, 'device')}, {how} states in turn"
            page.heading(f"Pool {pool}", remark)
            if pool in on_devices:
                rows = []
                for state in listed:
                    time = seconds.get(state.node)
                    layout = replace(state.layout, etp=1)  # `etp` is printed below the table, with the experts
                    cells = (
                        state.node,
                        format_layout(layout),
                        state.engine.name,
                        str(state.layout.devices),
                        size(state.weight_bytes),
                        _format_seconds(time),
                        _format_source(time),
                    )
                    rows.append((*cells, state.reason))
                page.table(
                    ("state", "layout", "engine", "devices", "weights", "seconds", "source", "why this layout"),
                    rows,
                    (3, 4, 5),
                    (0, 1, 2, 6),
                )
                for state in listed:
                    stated = plan.deploy.engines.get(state.node)
                    page.line(
                        f"engine of {state.node}: {_describe_engine(state.engine, stated)}{_describe_cache(state)}"
                    )
                    for experts in plan.model(state.node).experts:
                        page.line(f"experts of {state.node}: {describe_experts(experts, state.layout)}")
            else:
                page.table(
                    ("state", "hosts", "why here"),
                    [(state.node, str(state.layout.dp), state.reason) for state in listed],
                    (1,),
                )
                _write_parallel_calls(page, plan, [plan.graph.node(state.node) for state in listed])

    @staticmethod
    def facts(plan: Plan) -> Section:
        section: Section = {}
        for pool in plan.pools:
            where = {"devices": Fact(float(pool.devices), "devices"), "first device": Fact(pool.first)}
            section[f"pool {pool.name}"] = where | {"of each host": Fact(pool.each, detail=True)}
        for placement in plan.placements:
            more = {
                f"layout: {name}": replace(fact, detail=True)
                for name, fact in field_facts(placement.layout).items()
                if name in ("zero", "inner", "cp_kind", "stages")
            }
            options = {
                f"engine option {option}": Fact(format_option(value) if isinstance(value, tuple) else value)
                for option, value in placement.engine.options.items()
            }
            where = {
                "pool": Fact(placement.pool),
                "first device": Fact(placement.first, detail=True),
                "of each host": Fact(placement.each, detail=True),
                "devices": Fact(float(placement.layout.devices), "devices"),
            }
            engine = {
                "engine": Fact(placement.engine.name),
                **options,
                "engine chosen by": Fact(placement.engine.chosen, detail=True),
            }
            weights = {"weights": Fact(float(placement.weight_bytes), "bytes")}
            section[placement.node] = {
                "layout": Fact(format_layout(placement.layout)),
                **more,
                **engine,
                **where,
                **weights,
            }
            if placement.sequences:
                section[placement.node] |= {"sequences at one time": Fact(placement.sequences)}
            if placement.cache_bytes:
                section[placement.node] |= {"KV cache": Fact(float(placement.cache_bytes), "bytes")}
        return section


def _is_on_hosts(plan: Plan, node: Node) -> bool:
    """Return whether a node runs on the hosts: a Python function or the source."""
    return node.verb == "source" or plan.graph.worker(node.worker).kind == "function"


def _write_parallel_calls(page: Sheet, plan: Plan, nodes: Sequence[Node]) -> None:
    """List the function nodes for which a host makes several calls in parallel."""
    workers = plan.deploy.run.function_workers
    calls_of = {
        node.name: concurrent_calls(node, workers, read_signature(node)) for node in nodes if node.verb != "source"
    }
    if pooled := [f"`{name}`" for name, calls in calls_of.items() if 1 < calls == workers]:
        page.line(f"called in parallel by {workers} worker processes on each host: {', '.join(pooled)}")
    if in_loop := [f"`{name}`" for name, calls in calls_of.items() if calls == MAX_ASYNC_CALLS != workers]:
        page.line(f"up to {MAX_ASYNC_CALLS} concurrent calls in one event loop: {', '.join(in_loop)}")


def _describe_engine(engine: EngineChoice, stated: EngineChoice | None) -> str:
    options = ", ".join(
        f"{option} = {format_option(value)}{'' if stated and option in stated.options else ' (planned)'}"
        for option, value in engine.options.items()
    )
    return f"{engine.name}{f' {{ {options} }}' if options else ''}, chosen by {engine.chosen}"


def _describe_cache(placement: Placement) -> str:
    """Describe how many sequences a generation runs at one time; "" for others."""
    if not placement.sequences:
        return ""
    cache = f", with {size(placement.cache_bytes)} of KV cache on a device" if placement.cache_bytes else ""
    return f"; {plural(placement.sequences, 'sequence')} at one time (planned){cache}"


def format_layout(layout: Layout) -> str:
    """Format a layout; the ZeRO stage is shown only if it is 2 or 3."""
    return f"{layout} zero{layout.zero}" if layout.zero > 1 else str(layout)


def describe_experts(experts: ExpertMlp, layout: Layout) -> str:
    """Describe a rank's share of a layer's experts, and the mesh of the experts.

    The mesh has three sizes: `ep`, `etp` and `edp` (the number of copies of each expert in a pipeline stage).
    """
    part = f"1/{layout.etp} of each of " if layout.etp > 1 else ""
    number = f"{experts.number // layout.ep} of {experts.number}" if layout.ep > 1 else f"all {experts.number}"
    return f"{part}{number} a rank; ep {layout.ep} x etp {layout.etp} x edp {layout.edp}"


def compare_rival(record: SearchRecord, rival: Rival) -> str:
    """Compare the chosen plan with the best plan of the other kind, its rival.

    There are two kinds of plans. In a plan of the first kind, pools of generations run ahead of the updates (with
    staleness). In a plan of the second kind, all pools are in step. The search compares both kinds if the file does not
    say whether any pool may run ahead.
    """
    kind = "with pools ahead of the updates" if rival.ahead else "with all pools in step"
    if not rival.seconds:
        return f"{kind}, nothing fits"
    best = f"{kind}, the best plan found takes {duration(rival.seconds)}"
    old = staleness(rival.mean, rival.bound)
    if rival.ahead:
        return f"{best}, {_compare_seconds(rival.seconds, record.seconds)}, with weights {old}"
    if record.seconds >= rival.seconds:
        return f"{best}, and staleness saves nothing; weights are {old}"
    return f"{best}, of which staleness saves {100 * (1 - record.seconds / rival.seconds):.3g} %; weights are {old}"


def _compare_seconds(seconds: float, others: float) -> str:
    more = seconds / others - 1
    return f"{100 * abs(more):.3g} % {'more' if more > 0 else 'less'}" if more else "as long"


def _format_seconds(figure: Figure | None) -> str:
    return duration(figure.value) if figure is not None else "-"


def _format_source(figure: Figure | None) -> str:
    return figure.source if figure is not None else "-"
