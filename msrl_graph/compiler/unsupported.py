"""What can be planned for and not run, in this version.

Invariant: all of it is refused by name before a run starts anything, and a plan has a note of it; nothing is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from .. import algorithms
from ..backends import ALONE, ENGINES, UNTRIED, runs
from ..backends.spec import EngineSpec
from ..diagnostics import Diagnostic, Span
from ..hardware.device_kinds import Where
from ..ir.attributes import CallAttributes, GenerateAttributes, SampleEdgeAttributes, SourceAttributes, UpdateAttributes
from ..ir.options import STATEMENTS
from ..ir.plan import Placement, Plan, PlanNote
from ..model.architecture import Model
from ..sharding.layout import AXES

NAMED = 6  # things that a note names


def unready(plan: Plan) -> list[Diagnostic]:
    """What a run refuses of a plan."""
    return [
        Diagnostic("not-yet", f"{x.what} can be planned for, not {x.how}, in this version", x.span, x.help)
        for x in _refused(plan)
    ]


def untried(plan: Plan) -> list[Diagnostic]:
    """What a run warns of: nobody has done it with this version."""
    kind = plan.cluster.device.backend
    span = plan.cluster.span
    help = "begin with few iterations, and compare them with the same on CPUs: --iterations 2"
    if kind in UNTRIED:
        return [Diagnostic("not-yet", f"nothing has run on devices of kind {kind} yet", span, help, "warning")]
    if kind in ALONE and plan.cluster.devices > 1:
        message = f"nothing has run on more than one device of kind {kind} yet"
        return [Diagnostic("not-yet", message, span, help, "warning")]
    return []


def notes(plan: Plan) -> tuple[PlanNote, ...]:
    """The notes on what a run would refuse, and would warn of, if there is such."""
    refused = list(dict.fromkeys(x.brief for x in _refused(plan)))
    more = f", and {len(refused) - NAMED} more" if len(refused) > NAMED else ""
    found = (
        [PlanNote("run", f"this version plans for and does not run: {', '.join(refused[:NAMED])}{more}")]
        if refused
        else []
    )
    found += [PlanNote("run", d.message) for d in untried(plan)]
    return tuple(found)


class _Refusal(NamedTuple):
    """`what` as the subject of a sentence, `brief` in a list."""

    what: str
    brief: str
    span: Span
    help: str
    how: str


def _honours(spec: EngineSpec, verb: str, key: str) -> bool:
    """Whether an engine keeps to an attribute of its nodes."""
    declared = STATEMENTS[verb].declared()
    if key in declared and declared[key].named:
        return key in spec.heeds
    return spec.honours is None or key in spec.honours


def _planned(spec: EngineSpec, placement: Placement, model: Model, where: Where) -> Iterator[tuple[str, Span, str]]:
    """What a placement asks of its engine that can be planned for only: what it is, where it stands, what to do."""
    layout = placement.layout
    family = model.family
    planned = spec.planned(where)
    if family in planned:
        able = [f for f in spec.families if f not in planned]
        yield f"{family} models", placement.engine.span, f"these run: {', '.join(able)}"
    if "ep" not in planned and not spec.spread.takes(layout, model):
        yield f"`ep = {layout.ep}` of tp = {layout.tp}", layout.span, f"`ep = {layout.tp}`, or leave `ep` out"
    own = spec.spread.settled(replace(layout, etp=0), model).etp  # which nobody states
    for name in planned:
        if name in AXES and getattr(layout, name) > 1 and not (name == "etp" and layout.etp == own):
            yield f"`{name} = {getattr(layout, name)}`", layout.span, f"leave `{name}` out"


def _refused(plan: Plan) -> list[_Refusal]:
    found: list[_Refusal] = []

    def tell(what: str, span: Span, help: str, how: str = "run", brief: str = "") -> None:
        found.append(_Refusal(what, brief or what.rstrip(","), span, help, how))

    device = plan.cluster.device
    where = plan.cluster.device.kind.where
    if device.dies > 1:
        more = plan.cluster.devices_per_node * device.dies
        help = f'a process has a die: `device = "{device.name}-die"` with `devices_per_node = {more}`'
        tell(f"devices `{device.name}`, of {device.dies} dies each,", plan.cluster.span, help, "run on")
    for placement in plan.placements:
        if placement.engine.name in ENGINES and not runs(placement.engine.name):
            verb = plan.graph.node(placement.node).verb
            others = [f"`{n}`" for n, e in ENGINES.items() if runs(n) and verb in e.verbs]
            layout = plan.deploy.layouts.get(placement.node)  # which may be why the plan chose the engine
            span = placement.engine.span if placement.engine.span.line or layout is None else layout.span
            engine = f"the engine `{placement.engine.name}`"
            tell(f"{engine} of `{placement.node}`", span, f"these run: {', '.join(others)}", brief=engine)
        elif placement.engine.name in ENGINES:
            node = plan.graph.node(placement.node)
            spec = ENGINES[placement.engine.name]
            for name, span, help in _planned(spec, placement, plan.model(node.name), where):
                tell(f"{name} by the engine `{spec.name}`", span, help)
            for key in [k for k in node.attributes if not _honours(spec, node.verb, k)]:
                others = [n for n, e in ENGINES.items() if runs(n) and node.verb in e.verbs]
                able = [n for n in others if _honours(ENGINES[n], node.verb, key)]
                help = f"`engine {node.name} = {able[0]}` honours it" if able else "leave it out"
                by = f"by the engine `{spec.name}`"
                span = node.at(key)
                tell(f"`{key}` of `{node.name}` {by}", span, help, brief=f"`{key}` {by}")
    for column in plan.graph.columns:
        if len(column.dims) > 1 and any(column.name in n.writes for n in plan.graph.verb("source")):
            tell(f"a field of the type of `{column.name}`", column.span, "fields of one dimension run", "run with")
    for node in plan.graph.verb("update"):
        call = UpdateAttributes.of(node).optimizer
        if not (made := algorithms.optimizer(call)).runs:
            help = f"{made.why}; `adamw` takes the same options"
            tell(
                f"the optimizer `{call.value}` of `{node.name}`",
                node.at("optimizer"),
                help,
                brief=f"the optimizer `{call.value}`",
            )
    for what, span in _beside_partial(plan):
        tell(f"{what} beside `partial`", span, "leave one of the two out")
    return found


def _beside_partial(plan: Plan) -> Iterator[tuple[str, Span]]:
    """What a program says that a run cannot do where responses go on in the next iteration, and where it stands."""
    graph = plan.graph
    growing = [n for n in graph.verb("generate") if n.cuts]
    if not growing:
        return
    node, *others = growing
    for key in ("environment", "agent"):  # an episode's state is not kept
        if node.stated(key) is not None and getattr(GenerateAttributes.of(node), key):
            yield f"`{key}` of `{node.name}`", node.at(key)
    for other in others:
        yield f"`partial` of `{other.name}`", other.at("partial")
    for filter in (n for n in graph.nodes if CallAttributes.of(n).refill):
        yield f"`refill` of `{filter.name}`", filter.at("refill")
    for name in sorted(
        graph.flow.before(node.name)
    ):  # a prompt that is there twice has one place among those under way
        if CallAttributes.of(filter := graph.node(name)).select is not None:
            yield f"`select` of `{name}`", filter.at("select")
    source = graph.node("source")
    if SourceAttributes.of(source).weights is not None:
        yield "`weights` of `source`", source.at("weights")
    for edge in (e for e in graph.samples() if e.dst == node.name):
        said = SampleEdgeAttributes.of(edge)
        for key in [k for k in ("stream", "stream_tokens") if getattr(said, k) is not None]:
            yield f"`{key}` of `{edge.src} -> {edge.dst}`", edge.at(key)
