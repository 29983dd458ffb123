"""Checks of the sizes of layouts and pools.

A layout must fit its pool, the model and the engine. The pools must fit the cluster.

Invariant: a layout statement gets at most one diagnostic, for its first mistake. Other mistakes in the statement are
often consequences of the first mistake. The help text names the nearest layout that works.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from ..backends.divisibility import find_misfits, rows_in_step
from ..backends.spec import EngineSpec, can_compile, is_compiled
from ..diagnostics import Diagnostic, Span
from ..ir.attributes import UpdateAttributes
from ..ir.graph import Graph, Node
from ..ir.plan import Placement, Plan, Pool
from ..sharding.layout import AXES, Layout
from .stage import PlanContext


def check(plan: Plan, context: PlanContext) -> list[Diagnostic]:
    """Check the layouts of a plan whose nodes are placed."""
    diagnostics = list(_check_pools(plan))
    if diagnostics:
        return diagnostics  # mistakes of nodes in the size of their pool follow from these
    for placement in plan.placements:
        if placement.pool != "functions":
            first = next(_check_placement(plan, placement, context.engines), None)
            # Nodes that share a layout statement share its diagnostic.
            if first is not None and not any(
                diagnostic.span == first.span and diagnostic.code == first.code for diagnostic in diagnostics
            ):
                diagnostics.append(first)
    return diagnostics


def _check_pools(plan: Plan) -> Iterator[Diagnostic]:
    """Report pools that need too many devices, and devices that no pool uses.

    Unused devices are not reported if a `place` statement gives the number of devices of a pool.
    """
    available = plan.cluster.devices
    requested = sum(pool.devices for pool in plan.pools)
    table = "\n".join(f"{_devices(pool)} for {', '.join(pool.nodes)}: {pool.reason}" for pool in plan.pools)
    beyond = [pool for pool in plan.pools if pool.first + pool.devices > available]
    span = _span(plan, [*plan.pools, *beyond][-1])
    if requested > available or (requested < available and not any(pool.devices for pool in plan.deploy.pools)):
        help = f"{table}\na pool without a layout takes an even share of the remaining devices"
        yield Diagnostic("layout-size", f"the pools take {requested} devices; {_cluster(plan)}", span, help)
    elif beyond:
        yield Diagnostic(
            "layout-size", f"no {_devices(beyond[-1])} in a row are left for a pool; {_cluster(plan)}", span, table
        )


def _span(plan: Plan, pool: Pool) -> Span:
    """Return the span of the statement that decides the size of a pool.

    The statement is the layout of the first node in the pool for which a layout is stated. If no layout is stated for a
    node in the pool, the statement is the statement that made the pool.
    """
    return next((plan.deploy.layouts[node].span for node in pool.nodes if node in plan.deploy.layouts), pool.span)


def _devices(pool: Pool) -> str:
    return f"{pool.devices} device{'s' * (pool.devices > 1)}"


def _cluster(plan: Plan) -> str:
    return (
        f"cluster `{plan.cluster.name}` has {plan.cluster.devices} ({plan.cluster.nodes} x "
        f"{plan.cluster.devices_per_node})"
    )


def _check_placement(plan: Plan, placement: Placement, engines: Mapping[str, EngineSpec]) -> Iterator[Diagnostic]:
    node = placement.node
    layout = placement.layout
    spec = engines[placement.engine.name]
    stated = plan.deploy.layouts.get(node)
    graph_node = plan.graph.node(node)
    if graph_node.verb != "generate" and (update := _find_update(plan.graph, graph_node.worker)) not in (None, node):
        # The node has the layout of its update, whose mistakes are reported there.
        theirs = plan.placement(update).layout
        if stated is not None and any(getattr(stated, axis) not in (getattr(theirs, axis), 0) for axis in AXES):
            yield Diagnostic(
                "bad-layout",
                f"`{node}` shares the weights of `{update}`, so it must have the same layout: {theirs}",
                stated.span,
                f"leave `{node}` out of the layouts",
            )
        return
    model = plan.model(node)
    if is_compiled(placement) and not can_compile(model, layout):
        unsupported = "layers that tp shards" if layout.tp > 1 else f"the experts of `{model.name}`"
        message = f"the engine `{spec.name}` of `{node}` cannot compile {unsupported}"
        engine_span = placement.engine.span
        yield Diagnostic(
            "layout-divide", message, engine_span, "leave `compile` out" + ", or tp at 1" * (layout.tp > 1)
        )
    declared = plan.graph.worker(graph_node.worker).model
    near = [other for other in plan.graph.verb("update") if plan.placement(other.name).pool == placement.pool]
    if (
        stated is None
        and graph_node.verb == "infer"
        and any(plan.graph.worker(other.worker).model == declared for other in near)
    ):
        return  # the node took its layout from an update of the same model, where mistakes are reported
    if (
        stated is None
        and graph_node.verb == "infer"
        and any(other.name in plan.deploy.layouts for other in plan.graph.sharing(graph_node.worker))
    ):
        return  # the node took its layout from another node with the same weights
    span = (
        stated.span if stated is not None else placement.engine.span if placement.engine.span.line else plan.deploy.span
    )
    for axis in AXES:
        if getattr(layout, axis) > 1 and axis not in spec.capabilities.axes:
            help = (
                _list_capable_engines(engines, graph_node.verb, partial(_has_axis, axis=axis)) or f"leave `{axis}` at 1"
            )
            yield Diagnostic(
                "layout-divide", f"the engine `{spec.name}` of `{node}` does not support `{axis}` > 1", span, help
            )
    pool = plan.pool(placement.pool)
    devices = pool.devices
    if layout.devices != devices:
        width = layout.tp * layout.cp * layout.pp
        sizes = " x ".join(
            f"{axis} {getattr(layout, axis)}"
            for axis in ("tp", "cp", "pp", "dp")
            if getattr(layout, axis) > 1 or axis in ("tp", "dp")
        )
        full_layout = replace(layout, dp=devices // width)
        rows = rows_in_step(plan.graph, graph_node)
        if devices % width or any(find_misfits(plan.model(node), spec, full_layout)) or (rows or 0) % full_layout.dp:
            help = _suggest_layout(plan, placement, spec)
        else:
            help = f"dp = {full_layout.dp} takes all {devices}"
        where = _cluster(plan) if pool.name == "devices" else f"its pool has {devices}, {pool.reason}"
        yield Diagnostic("layout-size", f"`{node}` takes {layout.devices} devices ({sizes}); {where}", span, help)
    for message in find_misfits(plan.model(node), spec, layout):
        yield Diagnostic("layout-divide", message, span, _suggest_layout(plan, placement, spec))
    if graph_node.verb == "update" and layout.zero not in spec.capabilities.zero:
        help = f"the engine `{spec.name}` supports zero = {', '.join(map(str, spec.capabilities.zero))}"
        yield Diagnostic(
            "layout-divide",
            f"the engine `{spec.name}` of `{node}` does not support ZeRO stage {layout.zero}",
            span,
            help,
        )
    yield from _check_mini_batch(plan.graph, graph_node, layout)


def _find_update(graph: Graph, worker: str) -> str | None:
    return next((node.name for node in graph.sharing(worker)[:1] if node.verb == "update"), None)


def _has_axis(engine: EngineSpec, axis: str) -> bool:
    return axis in engine.capabilities.axes


def _list_capable_engines(engines: Mapping[str, EngineSpec], verb: str, can: Callable[[EngineSpec], bool]) -> str:
    """Return a help text with the engines that can run a verb and have a capability.

    `can` returns whether an engine has the capability.
    """
    names = sorted(name for name, engine in engines.items() if verb in engine.verbs and can(engine))
    return f"these can: {', '.join(f'`{name}`' for name in names)}" if names else ""


def _suggest_layout(plan: Plan, placement: Placement, spec: EngineSpec) -> str:
    """Return a help text with the nearest layout that works; "" if none works.

    A layout works if the engine and the model support the layout, and the layout uses all devices of the pool. Only
    layouts that differ from the wrong layout in tp, dp and the expert axes (ep, etp) are considered. The nearest layout
    is the layout with the smallest change of the stated sizes. The program may state no etp, and several layouts may be
    equally near. A layout with the etp that the engine would choose is then preferred, and after that the smallest etp.
    """
    devices = plan.pool(placement.pool).devices
    layout = placement.layout
    model = plan.model(placement.node)
    stated = plan.deploy.layouts.get(placement.node, layout)
    cp = 1 if model.recurrent_mixers else layout.cp
    rest = cp * layout.pp
    rows = rows_in_step(plan.graph, plan.graph.node(placement.node))
    works = []
    for tp in [size for size in range(1, min(devices, model.fewest_heads) + 1) if devices % (size * rest) == 0]:
        sized = replace(layout, tp=tp, cp=cp, dp=devices // (tp * rest))
        if rows is None or rows % sized.dp == 0:
            same = spec.sharding.spread.settle_etp(replace(sized, etp=stated.etp), model)
            works += [
                candidate
                for candidate in (same, *spec.sharding.spread.meshes(sized, model))
                if not any(find_misfits(model, spec, candidate))
            ]
    if not works:
        return ""

    def far(candidate: Layout) -> tuple[float, ...]:
        axes = ("tp", "ep", "etp") if stated.etp else ("tp", "ep")
        distance = sum(abs(math.log(getattr(candidate, axis) / getattr(layout, axis))) for axis in axes)
        own = candidate.etp == spec.sharding.spread.settle_etp(replace(candidate, etp=0), model).etp
        return (
            round(distance, 9),
            not own and not stated.etp,
            0 if stated.etp else candidate.etp,
            candidate.tp,
            candidate.ep,
        )

    best = min(works, key=far)
    sizes = [
        (axis, getattr(best, axis))
        for axis in ("cp", "pp", "ep")
        if getattr(best, axis) > 1 or getattr(stated, axis) > 1
    ]
    if stated.etp or best.etp != spec.sharding.spread.settle_etp(replace(best, etp=0), model).etp:
        sizes.append(("etp", best.etp))
    return f"the nearest that works: tp = {best.tp}, dp = {best.dp}" + "".join(
        f", {axis} = {size}" for axis, size in sizes
    )


def _check_mini_batch(graph: Graph, node: Node, layout: Layout) -> Iterator[Diagnostic]:
    """Report an update whose dp does not divide the rows of an optimizer step.

    All data-parallel ranks need the same number of these rows.
    """
    size = rows_in_step(graph, node)
    stated = UpdateAttributes.of(node).mini_batch
    if size is None:
        return
    if size % layout.dp:
        near = max(layout.dp, round(size / layout.dp) * layout.dp)
        rows = f"the mini-batch of {size:,} rows" if stated else f"the {size:,} rows of an iteration"
        help = (
            f"mini_batch = {near} is the nearest that dp = {layout.dp} divides"
            if stated
            else f"choose a dp that divides {size:,}"
        )
        yield Diagnostic(
            "mini-batch-divide",
            f"dp = {layout.dp} of `{node.name}` does not divide {rows}",
            node.span_of("mini_batch"),
            help,
        )
