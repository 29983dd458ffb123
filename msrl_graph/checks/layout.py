"""Layouts: their sizes against their pool, the model and the engine; and the pools' against the cluster.

Invariant: one diagnostic a layout statement, the first that makes the others moot; the help names the nearest layout
that works.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from ..backends.divisibility import misfits, rows_in_step
from ..backends.spec import EngineSpec, compiled, compiles
from ..diagnostics import Diagnostic, Span
from ..ir.attributes import UpdateAttributes
from ..ir.graph import Graph, Node
from ..ir.plan import Placement, Plan, Pool
from ..sharding.layout import AXES, Layout


def check(plan: Plan, engines: Mapping[str, EngineSpec]) -> list[Diagnostic]:
    """What is wrong with the layouts of a plan whose nodes are placed."""
    found = list(_pools(plan))
    if found:
        return found  # what the nodes of a pool say of its size follows from it
    for placement in plan.placements:
        if placement.pool != "functions":
            first = next(_wrong(plan, placement, engines), None)
            # Nodes that share a layout statement share its fault.
            if first is not None and not any(d.span == first.span and d.code == first.code for d in found):
                found.append(first)
    return found


def _pools(plan: Plan) -> Iterator[Diagnostic]:
    """Pools for which there are too few devices, and devices that no pool takes though no `place` says so."""
    every = plan.cluster.devices
    taken = sum(p.devices for p in plan.pools)
    table = "\n".join(f"{_devices(p)} for {', '.join(p.nodes)}: {p.reason}" for p in plan.pools)
    beyond = [p for p in plan.pools if p.first + p.devices > every]
    span = _span(plan, [*plan.pools, *beyond][-1])
    if taken > every or (taken < every and not any(p.devices for p in plan.deploy.pools)):
        help = f"{table}\nwhere no layout says how many, a pool takes an even share of what is left"
        yield Diagnostic("layout-size", f"the pools take {taken} devices; {_cluster(plan)}", span, help)
    elif beyond:
        yield Diagnostic(
            "layout-size", f"no {_devices(beyond[-1])} in a row are left for a pool; {_cluster(plan)}", span, table
        )


def _span(plan: Plan, pool: Pool) -> Span:
    """The layout that sizes a pool, else what parts it."""
    return next((plan.deploy.layouts[n].span for n in pool.nodes if n in plan.deploy.layouts), pool.span)


def _devices(pool: Pool) -> str:
    return f"{pool.devices} device{'s' * (pool.devices > 1)}"


def _cluster(plan: Plan) -> str:
    return (
        f"cluster `{plan.cluster.name}` has {plan.cluster.devices} ({plan.cluster.nodes} x "
        f"{plan.cluster.devices_per_node})"
    )


def _wrong(plan: Plan, placement: Placement, engines: Mapping[str, EngineSpec]) -> Iterator[Diagnostic]:
    node = placement.node
    layout = placement.layout
    spec = engines[placement.engine.name]
    stated = plan.deploy.layouts.get(node)
    graph_node = plan.graph.node(node)
    if graph_node.verb != "generate" and (update := _update(plan.graph, graph_node.worker)) not in (None, node):
        # It has its update's layout already, whose faults are told there.
        theirs = plan.placement(update).layout
        if stated is not None and any(getattr(stated, a) not in (getattr(theirs, a), 0) for a in AXES):
            yield Diagnostic(
                "bad-layout",
                f"`{node}` computes with the weights of `{update}`, so it has that layout: {theirs}",
                stated.span,
                f"leave `{node}` out of the layouts",
            )
        return
    model = plan.model(node)
    if compiled(placement) and not compiles(model, layout):
        what = "layers that tp divides" if layout.tp > 1 else f"experts, as `{model.name}` has them"
        message = f"the engine `{spec.name}` of `{node}` compiles no {what}"
        at = placement.engine.span
        yield Diagnostic("layout-divide", message, at, "leave `compile` out" + ", or tp at 1" * (layout.tp > 1))
    declared = plan.graph.worker(graph_node.worker).model
    near = [n for n in plan.graph.verb("update") if plan.placement(n.name).pool == placement.pool]
    if (
        stated is None
        and graph_node.verb == "infer"
        and any(plan.graph.worker(n.worker).model == declared for n in near)
    ):
        return  # so has a node that took the layout of an update of the same model
    if (
        stated is None
        and graph_node.verb == "infer"
        and any(n.name in plan.deploy.layouts for n in plan.graph.sharing(graph_node.worker))
    ):
        return  # and one that took the layout of another node of the same weights
    span = (
        stated.span if stated is not None else placement.engine.span if placement.engine.span.line else plan.deploy.span
    )
    for axis in AXES:
        if getattr(layout, axis) > 1 and axis not in spec.axes:
            help = _others(engines, graph_node.verb, lambda e, a=axis: a in e.axes) or f"leave `{axis}` at 1"  # type: ignore[misc]
            yield Diagnostic(
                "layout-divide", f"the engine `{spec.name}` of `{node}` cannot divide along `{axis}`", span, help
            )
    family = plan.model(node).family
    if family not in spec.families:
        message = f"the engine `{spec.name}` of `{node}` has no models of the family `{family}`"
        yield Diagnostic(
            "layout-divide", message, span, _others(engines, graph_node.verb, lambda e: family in e.families)
        )
    pool = plan.pool(placement.pool)
    devices = pool.devices
    if layout.devices != devices:
        width = layout.tp * layout.cp * layout.pp
        sizes = " x ".join(
            f"{a} {getattr(layout, a)}" for a in ("tp", "cp", "pp", "dp") if getattr(layout, a) > 1 or a in ("tp", "dp")
        )
        whole = replace(layout, dp=devices // width)
        rows = rows_in_step(plan.graph, graph_node)
        if devices % width or any(misfits(plan.model(node), spec, whole)) or (rows or 0) % whole.dp:
            help = _nearest(plan, placement, spec)
        else:
            help = f"dp = {whole.dp} takes all {devices}"
        where = _cluster(plan) if pool.name == "devices" else f"its pool has {devices}, {pool.reason}"
        yield Diagnostic("layout-size", f"`{node}` takes {layout.devices} devices ({sizes}); {where}", span, help)
    for message in misfits(plan.model(node), spec, layout):
        yield Diagnostic("layout-divide", message, span, _nearest(plan, placement, spec))
    if graph_node.verb == "update" and layout.zero not in spec.zero:
        help = f"the engine `{spec.name}` has zero = {', '.join(map(str, spec.zero))}"
        yield Diagnostic(
            "layout-divide", f"the engine `{spec.name}` of `{node}` has no ZeRO stage {layout.zero}", span, help
        )
    yield from _mini_batch(plan.graph, graph_node, layout)


def _update(graph: Graph, worker: str) -> str | None:
    return next((n.name for n in graph.sharing(worker)[:1] if n.verb == "update"), None)


def _others(engines: Mapping[str, EngineSpec], verb: str, can: Callable[[EngineSpec], bool]) -> str:
    """The engines that can do what one cannot."""
    found = sorted(n for n, e in engines.items() if verb in e.verbs and can(e))
    return f"these can: {', '.join(f'`{n}`' for n in found)}" if found else ""


def _nearest(plan: Plan, placement: Placement, spec: EngineSpec) -> str:
    """The layout with the nearest tp and experts that the engine and the devices allow, all else as stated. An etp that
    nobody states gives way before what is stated, to 1 at first, as public recipes have it."""
    devices = plan.pool(placement.pool).devices
    layout = placement.layout
    model = plan.model(placement.node)
    stated = plan.deploy.layouts.get(placement.node, layout)
    rest = layout.cp * layout.pp
    rows = rows_in_step(plan.graph, plan.graph.node(placement.node))
    works = []
    for tp in [t for t in range(1, min(devices, model.heads) + 1) if devices % (t * rest) == 0]:
        sized = replace(layout, tp=tp, dp=devices // (tp * rest))
        if rows is None or rows % sized.dp == 0:
            same = spec.spread.settled(replace(sized, etp=stated.etp), model)
            works += [x for x in (same, *spec.spread.meshes(sized, model)) if not any(misfits(model, spec, x))]
    if not works:
        return ""

    def far(found: Layout) -> tuple[float, ...]:
        axes = ("tp", "ep", "etp") if stated.etp else ("tp", "ep")
        apart = sum(abs(math.log(getattr(found, a) / getattr(layout, a))) for a in axes)
        own = found.etp == spec.spread.settled(replace(found, etp=0), model).etp
        return (round(apart, 9), not own and not stated.etp, 0 if stated.etp else found.etp, found.tp, found.ep)

    best = min(works, key=far)
    sizes = [(a, getattr(best, a)) for a in ("cp", "pp", "ep") if getattr(best, a) > 1 or getattr(stated, a) > 1]
    if stated.etp or best.etp != spec.spread.settled(replace(best, etp=0), model).etp:
        sizes.append(("etp", best.etp))
    return f"the nearest that works: tp = {best.tp}, dp = {best.dp}" + "".join(f", {a} = {n}" for a, n in sizes)


def _mini_batch(graph: Graph, node: Node, layout: Layout) -> Iterator[Diagnostic]:
    """Every rank of an update needs the same share of every mini-batch."""
    size = rows_in_step(graph, node)
    stated = UpdateAttributes.of(node).mini_batch
    if size is None:
        return
    if size % layout.dp:
        near = max(layout.dp, round(size / layout.dp) * layout.dp)
        what = f"the mini-batch of {size:,} rows" if stated else f"the {size:,} rows of an iteration"
        help = (
            f"mini_batch = {near} is the nearest that dp = {layout.dp} divides"
            if stated
            else f"choose a dp that divides {size:,}"
        )
        yield Diagnostic(
            "mini-batch-divide",
            f"dp = {layout.dp} of `{node.name}` does not divide {what}",
            node.at("mini_batch"),
            help,
        )
