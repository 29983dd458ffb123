"""What can be planned for and not run, in this version.

Invariant: all of it is refused by name before a run starts anything, and a plan has a note of it; nothing is ignored.
"""

from __future__ import annotations

from typing import NamedTuple

from .. import algorithms
from ..backends import ENGINES
from ..diagnostics import Diagnostic, Span
from ..ir.graph import Edge, Node
from ..ir.plan import Note, Plan

# Attributes of edges that the runtime does not know, and what to do meanwhile.
EDGES = {"every": "leave it out: every version is sent"}
# What a run may make use of, and does not: it keeps within what they allow.
ALLOWED = {"partial": "each response is generated whole", "staleness": "all rows are of the newest weights"}
# The values that mean nothing.
NOTHING = {"partial": 1, "every": 1, "staleness": 0}
NAMED = 6  # things that a note names


def unready(plan: Plan) -> list[Diagnostic]:
    """What a run refuses of a plan."""
    return [
        Diagnostic("not-yet", f"{x.what} can be planned for, not {x.how}, in this version", x.span, x.help)
        for x in _refused(plan)
        if not x.follows
    ]


def notes(plan: Plan) -> tuple[Note, ...]:
    """The note on what a run would refuse, if there is such."""
    refused = list(dict.fromkeys(x.brief for x in _refused(plan)))
    more = f", and {len(refused) - NAMED} more" if len(refused) > NAMED else ""
    found = [Note("run", f"this version plans for and does not run: {', '.join(refused[:NAMED])}{more}")] if refused else []
    stated = [(n.name, n) for n in plan.graph.verb("generate")] + [(f"{e.src} => {e.dst}", e) for e in plan.graph.reshards()]
    for name, part in stated:
        for key in _stated(part, ALLOWED):
            found.append(Note("run", f"`{key}` of `{name}` is allowed and not made use of in this version: {ALLOWED[key]}"))
    return tuple(found)


class _Refusal(NamedTuple):
    """`what` as the subject of a sentence, `brief` in a list; `follows`: from another, so that it is no mistake of its own."""

    what: str
    brief: str
    span: Span
    help: str
    how: str
    follows: bool


def _refused(plan: Plan) -> list[_Refusal]:
    found: list[_Refusal] = []

    def tell(what: str, span: Span, help: str, how: str = "run", brief: str = "", follows: bool = False) -> None:
        found.append(_Refusal(what, brief or what.rstrip(","), span, help, how, follows))

    backend = plan.cluster.device.backend
    if lacking := not any(backend in e.runs for e in ENGINES.values()):
        tell(f"devices of kind {backend}", plan.cluster.span, 'run on `device = "cpu"`', "run on")
    if plan.docks.capacity:
        tell("`capacity` of the dock", plan.deploy.dock.span, "leave it out: the hosts' memory is the bound")
    if plan.docks.imbalance > 1:
        tell("`imbalance` of the dock", plan.deploy.dock.span, "leave it out: shares are even")
    for placement in plan.placements:
        if placement.engine.name in ENGINES and not ENGINES[placement.engine.name].runs:
            others = [f"`{n}`" for n, e in ENGINES.items() if e.runs and plan.graph.node(placement.node).verb in e.verbs]
            layout = plan.deploy.layouts.get(placement.node)  # which may be why the plan chose the engine
            span = placement.engine.span if placement.engine.span.line or layout is None else layout.span
            engine = f"the engine `{placement.engine.name}`"
            chosen = lacking and not placement.engine.span.line  # for these devices
            tell(f"{engine} of `{placement.node}`", span, f"these run: {', '.join(others)}", brief=engine, follows=chosen)
    for column in plan.graph.columns:
        if len(column.dims) > 1 and any(column.name in n.writes for n in plan.graph.verb("source")):
            tell(f"a field of the type of `{column.name}`", column.span, "fields of one dimension run", "run with")
    for node in plan.graph.verb("update"):
        if not (made := algorithms.optimizer(node.attributes["optimizer"])).runs:
            call = node.attributes["optimizer"]
            span = call.span if call.span.line else node.span
            help = f"{made.why}; `adamw` takes the same options"
            tell(f"the optimizer `{call.value}` of `{node.name}`", span, help, brief=f"the optimizer `{call.value}`")
    for edge in plan.graph.reshards():
        for key in _stated(edge, EDGES):
            tell(f"`{key}` of `{edge.src} => {edge.dst}`", edge.attributes[key].span, EDGES[key])
    return found


def _stated(part: Node | Edge, known: dict[str, str]) -> list[str]:
    return [k for k in known if k in part.attributes and (k not in NOTHING or part.attributes[k].value != NOTHING[k])]
