"""Features that this version can plan but not run.

Invariant: a run rejects each of these features before it starts anything, with an error that names the feature. A plan
has a note that lists these features. None of these features is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from .. import algorithms
from ..analysis.sequences import routing_columns
from ..backends import ENGINES, SINGLE_DEVICE_KINDS, UNTESTED_KINDS, can_build
from ..backends.spec import EngineSpec
from ..diagnostics import Diagnostic, Span
from ..diagnostics.surface import name_option
from ..hardware.device_kinds import Where
from ..ir.attributes import CallAttributes, GenerateAttributes, SampleEdgeAttributes, SourceAttributes, UpdateAttributes
from ..ir.plan import Placement, Plan, PlanNote
from ..model.architecture import Model
from ..model.features import FEATURES
from ..sharding.layout import AXES

NAMED = 6  # features that a note names at most


def find_unsupported(plan: Plan) -> list[Diagnostic]:
    """Return an error for each feature that a plan uses but a run rejects."""
    return [
        Diagnostic("not-yet", f"{refusal.what} can be planned, but not run", refusal.span, refusal.help)
        for refusal in dict.fromkeys(_list_refusals(plan))
    ]


def find_untested(plan: Plan) -> list[Diagnostic]:
    """Return warnings for devices on which this version has never run."""
    kind = plan.cluster.device.backend
    span = plan.cluster.span
    help = "start with a few iterations, and compare them with the same run on CPUs: "
    help += name_option("iterations", 2)
    if kind in UNTESTED_KINDS:
        return [Diagnostic("not-yet", f"nothing has run on devices of kind {kind} yet", span, help, "warning")]
    if kind in SINGLE_DEVICE_KINDS and plan.cluster.devices > 1:
        message = f"nothing has run on more than one device of kind {kind} yet"
        return [Diagnostic("not-yet", message, span, help, "warning")]
    return []


def notes(plan: Plan) -> tuple[PlanNote, ...]:
    """Return the plan's notes on features that a run rejects or warns about."""
    refused = list(dict.fromkeys(refusal.brief for refusal in _list_refusals(plan)))
    more = f", and {len(refused) - NAMED} more" if len(refused) > NAMED else ""
    plan_notes = (
        [PlanNote("run", f"this version can plan but not run: {', '.join(refused[:NAMED])}{more}")] if refused else []
    )
    plan_notes += [PlanNote("run", diagnostic.message) for diagnostic in find_untested(plan)]
    return tuple(plan_notes)


class _Refusal(NamedTuple):
    """A feature that a run rejects.

    `what` is the feature as the subject of the error's sentence. `brief` is the feature as an item of a list.
    """

    what: str
    brief: str
    span: Span
    help: str


def _list_planned_only(
    spec: EngineSpec, placement: Placement, verb: str, model: Model, where: Where
) -> Iterator[tuple[str, Span, str]]:
    """Yield the features of a placement that the engine can plan but not run.

    Each feature is a tuple of a description, a span and a help text.
    """
    layout = placement.layout
    planned = spec.list_plan_only(where)
    if missing := spec.list_missing_features(model, where):
        span = placement.engine.span if placement.engine.span.line else model.span
        yield " and ".join(FEATURES.get(name, name) for name in missing), span, _list_capable(model, verb, where)
    if "ep" not in planned and not spec.sharding.spread.can_run(layout, model):
        yield f"`ep = {layout.ep}` of tp = {layout.tp}", layout.span, f"`ep = {layout.tp}`, or leave `ep` out"
    own = spec.sharding.spread.settle_etp(replace(layout, etp=0), model).etp  # the engine's own value if none is stated
    for name in planned:
        if name in AXES and getattr(layout, name) > 1 and not (name == "etp" and layout.etp == own):
            yield f"`{name} = {getattr(layout, name)}`", layout.span, f"leave `{name}` out"


def _list_capable(model: Model, verb: str, where: Where) -> str:
    """Return a help text with the engines that can run all features of a model."""
    names = [
        f"`{name}`"
        for name, spec in sorted(ENGINES.items())
        if verb in spec.verbs and can_build(name) and not spec.list_missing_features(model, where)
    ]
    return f"these can: {', '.join(names)}" if names else "no engine can: use a model without this feature"


def _list_refusals(plan: Plan) -> list[_Refusal]:
    refusals: list[_Refusal] = []

    def tell(feature: str, span: Span, help: str, brief: str = "") -> None:
        refusals.append(_Refusal(feature, brief or feature.rstrip(","), span, help))

    device = plan.cluster.device
    where = plan.cluster.device.kind.where
    if device.dies > 1:
        more = plan.cluster.devices_per_node * device.dies
        help = f'each process uses one die: `device = "{device.name}-die"` with `devices_per_node = {more}`'
        devices = f"devices `{device.name}` of {device.dies} dies each"
        tell(f"a program for {devices}", plan.cluster.span, help, brief=devices)
    for placement in plan.placements:
        if placement.engine.name in ENGINES and not can_build(placement.engine.name):
            verb = plan.graph.node(placement.node).verb
            others = [
                f"`{other}`" for other, candidate in ENGINES.items() if can_build(other) and verb in candidate.verbs
            ]
            layout = plan.deploy.layouts.get(placement.node)  # may be the reason for the choice of the engine
            span = placement.engine.span if placement.engine.span.line or layout is None else layout.span
            engine = f"the engine `{placement.engine.name}`"
            tell(f"{engine} of `{placement.node}`", span, f"these run: {', '.join(others)}", brief=engine)
        elif placement.engine.name in ENGINES:
            node = plan.graph.node(placement.node)
            spec = ENGINES[placement.engine.name]
            for name, span, help in _list_planned_only(spec, placement, node.verb, plan.model(node.name), where):
                tell(f"{name} with the engine `{spec.name}`", span, help)
            for key in [name for name in node.attributes if not spec.capabilities.supports(node.verb, name)]:
                others = [
                    other for other, candidate in ENGINES.items() if can_build(other) and node.verb in candidate.verbs
                ]
                able = [other for other in others if ENGINES[other].capabilities.supports(node.verb, key)]
                help = f"`engine {node.name} = {able[0]}` supports it" if able else "leave it out"
                by = f"with the engine `{spec.name}`"
                span = node.span_of(key)
                tell(f"`{key}` of `{node.name}` {by}", span, help, brief=f"`{key}` {by}")
    for column in plan.graph.columns:
        if len(column.dims) > 1 and any(column.name in writer.writes for writer in plan.graph.verb("source")):
            tell(f"a field of the type of `{column.name}`", column.span, "use fields of one dimension")
    for node in plan.graph.verb("update"):
        call = UpdateAttributes.of(node).optimizer
        if not (optimizer := algorithms.optimizer(call)).runs:
            help = f"{optimizer.why}; `adamw` takes the same options"
            tell(
                f"the optimizer `{call.value}` of `{node.name}`",
                node.span_of("optimizer"),
                help,
                brief=f"the optimizer `{call.value}`",
            )
    for feature, span, help in _list_route_conflicts(plan):
        tell(feature, span, help)
    for feature, span in _list_partial_conflicts(plan):
        tell(f"{feature} together with `partial`", span, "leave one of the two out")
    return refusals


def _list_route_conflicts(plan: Plan) -> Iterator[tuple[str, Span, str]]:
    """Yield each use of routes that a run rejects.

    A use is a description, a span and a help text.
    """
    graph = plan.graph
    for placement in plan.placements:
        node = graph.node(placement.node)
        routes = [*routing_columns(graph, (*node.writes, *node.reads)).values()]
        if not routes or placement.engine.name not in ENGINES:
            continue
        if not ENGINES[placement.engine.name].capabilities.routes:
            able = [name for name, spec in ENGINES.items() if spec.capabilities.routes and node.verb in spec.verbs]
            engine = f"the engine `{placement.engine.name}`"
            help = f"`engine {node.name} = {able[0]}` supports it" if able else f"leave `{routes[0]}` out"
            yield f"routes (`{routes[0]}`) of `{node.name}` with {engine}", node.span, help
        if node.verb == "infer" and routing_columns(graph, node.writes) and placement.layout.pp > 1:
            # A rank records the layers of its stage.
            where = f"written by `{node.name}` with `pp = {placement.layout.pp}`"
            yield f"routes (`{routes[0]}`) {where}", placement.layout.span, "let the generation write them"
        attributes = GenerateAttributes.of(node)
        partner = "environment" if attributes.environment is not None else "agent"
        if node.verb == "generate" and (node.cuts or attributes.partner is not None):
            # Routes are those of one pass: they would have to be kept from turn to turn, or by the driver.
            key = "partial" if node.cuts else partner
            help = f"leave `{routes[0]}` or `{key}` out"
            yield f"routes (`{routes[0]}`) together with `{key}` of `{node.name}`", node.span_of(key), help


def _list_partial_conflicts(plan: Plan) -> Iterator[tuple[str, Span]]:
    """Yield each feature of a plan that a run cannot combine with `partial`.

    A feature is a pair of a description and a span. `partial` is an attribute of a generation: with it, the generation
    can cut responses and continue them in a later iteration.
    """
    graph = plan.graph
    growing = [generation for generation in graph.verb("generate") if generation.cuts]
    if not growing:
        return
    node, *others = growing
    for key in ("environment", "agent"):  # the state of an episode is not kept
        if node.stated(key) is not None and getattr(GenerateAttributes.of(node), key):
            yield f"`{key}` of `{node.name}`", node.span_of(key)
    for other in others:
        yield f"`partial` of `{other.name}`", other.span_of("partial")
    for filter in (generation for generation in graph.nodes if CallAttributes.of(generation).refill):
        yield f"`refill` of `{filter.name}`", filter.span_of("refill")
    for name in sorted(graph.flow.before(node.name)):  # a repeated prompt has only one place among those under way
        if CallAttributes.of(filter := graph.node(name)).select is not None:
            yield f"`select` of `{name}`", filter.span_of("select")
    source = graph.node("source")
    if SourceAttributes.of(source).weights is not None:
        yield "`weights` of `source`", source.span_of("weights")
    for edge in (sample for sample in graph.samples() if sample.dst == node.name):
        options = SampleEdgeAttributes.of(edge)
        for key in [option for option in ("stream", "stream_tokens") if getattr(options, option) is not None]:
            yield f"`{key}` of `{edge.src} -> {edge.dst}`", edge.span_of(key)
