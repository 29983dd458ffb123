"""Rows that older weights generated than those that they update: staleness, versions that are not sent, and partial
rollout.

Invariant: what can be seen of the graph alone is told of the graph; who shares devices, of a plan whose nodes are
placed.
"""

from __future__ import annotations

from ..diagnostics import Diagnostic, Span
from ..ir.async_schedule import aged, by_state, hindered, in_turns, late_states
from ..ir.attributes import ReshardingEdgeAttributes
from ..ir.graph import Graph, Node
from ..ir.plan import Plan, shared_staleness
from ..ir.sequences import heating, of_response
from ..planner.pools import open_to_staleness
from .columns import Library
from .scope import taken


def uncorrected(graph: Graph, library: Library) -> list[Diagnostic]:
    """Generations off-policy whose log-probabilities as sampled no loss takes."""
    found = []
    for node in graph.verb("generate"):
        cause = _cause(graph, node)
        updates = [u for u in graph.verb("update") if u.worker == node.worker]
        drawn = {of_response(graph, node, "f32")} - {""}
        if cause is None or not updates or any(drawn & taken(u, library) for u in updates):
            continue
        name, span = cause
        readers = [u.name for u in updates if drawn & {*u.reads}]
        update = (readers or [updates[0].name])[0]
        lacks = "reads no log-probabilities as they were sampled"
        if readers:
            lacks = f"reads `{min(drawn)}` and has no term that takes it"
            help = (
                f"multiply what it learns from by `truncated(gen_logp = {min(drawn)})`, or compare with it at once: "
                f"`clip(old_logp = {min(drawn)})`"
            )
        elif drawn:
            help = f"read `{min(drawn)}` in `{update}`, and correct its loss by it"
        else:
            response = next((c for c in node.writes if graph.column(c).element == "i32"), "response")
            help = (
                f"declare `gen_logp : f32[{response}]`, let `{node.name}` write it beside `{response}`, and "
                f"`{update}` read it and correct its loss by it: `truncated()`"
            )
        message = f"`{name}` lets older weights generate than those of `{update}`, which {lacks}"
        found.append(Diagnostic("uncorrected-staleness", message, span, help, "warning"))
    return found


def sampled(graph: Graph, node: Node) -> set[str]:
    """The log-probabilities as they were sampled by older weights than those that an update changes: that no term takes
    them `uncorrected` tells."""
    older = [n for n in graph.verb("generate") if n.worker == node.worker and _cause(graph, n) is not None]
    return {of_response(graph, n, "f32") for n in older} - {""}


def _cause(graph: Graph, node: Node) -> tuple[str, Span] | None:
    """What makes a generation off-policy, and where it stands."""
    edge = next((e for e in graph.reshards() if e.dst == node.name and ReshardingEdgeAttributes.of(e).staleness), None)
    if edge is not None:
        return "staleness", edge.at("staleness")
    if node.cuts:
        return "partial", node.at("partial")
    return None


def missing(graph: Graph, library: Library) -> list[Diagnostic]:
    """Versions that are not sent, where the rows of the iterations between would be too old."""
    found = []
    for edge in graph.reshards():
        said = ReshardingEdgeAttributes.of(edge)
        if said.staleness >= said.every - 1:
            continue
        least = said.every - 1
        behind = f"{least} version{'s' * (least > 1)} behind"
        message = (
            f"with `every = {said.every}` rows of `{edge.dst}` are of weights up to {behind}, and `staleness` allows "
            f"{said.staleness}"
        )
        help = f"state `staleness = {least}` beside it, or leave `every` out"
        found.append(Diagnostic("missing-staleness", message, edge.at("every"), help))
    return found


def loops(plan: Plan) -> list[Diagnostic]:
    """Temperatures that a function sets by what was drawn at them, where a generation takes an older value than the
    last."""
    graph = plan.graph
    late = late_states(plan)
    found = []
    for node in graph.verb("generate"):
        for state in (s for s in heating(graph, node) if s in late):
            setters = [n.name for n in graph.nodes if state in n.sets and n.name in graph.flow.after(node.name)]
            if not setters:
                continue
            most = f"{late[state]} iteration{'s' * (late[state] > 1)}"
            message = (
                f"`{node.name}` draws at `{state}`, which `{setters[0]}` sets by what was drawn, and with `staleness` "
                f"takes its value of up to {most} before"
            )
            help = "change it in small steps, or leave `staleness` out"
            found.append(Diagnostic("delayed-state", message, node.at("temperature"), help, "warning"))
    return found


def check(plan: Plan) -> list[Diagnostic]:
    """Staleness that gains nothing, and versions that are sent all the same: between nodes on the same devices, which
    cannot be ahead of themselves, and of a pool that has to be in step. Where the planner has them take turns, a note
    says why."""
    shared = shared_staleness(plan.graph, lambda node: plan.placement(node).pool)
    held = hindered(plan)
    turns = in_turns(plan)
    behind = aged(plan)
    found = loops(plan)
    for edge in plan.graph.reshards():
        said = ReshardingEdgeAttributes.of(edge)
        pool = plan.placement(edge.dst).pool
        if not said.staleness or (edge.src, edge.dst) in behind:
            continue
        seldom = said.every > 1
        key, leave = ("every", "leave `every` and `staleness` out") if seldom else ("staleness", "leave it out")
        gains = "`every` leaves none out" if seldom else "`staleness` gains nothing"
        is_so = "gets every version" if seldom else "is never behind"
        state = by_state(plan, [edge.dst])
        others = f"{leave}, or let only the source's `weights` or a temperature read the state before `{edge.dst}`"
        if edge in shared:
            if not seldom and open_to_staleness(plan):
                continue
            message = f"`{edge.dst}` shares its devices with `{edge.src}`, and {turns[pool]}: it {is_so}, so {gains}"
            apart = f"{leave}, or give each its own devices: `apart {edge.dst}, {edge.src}`"
            help = others if state else apart
            found.append(Diagnostic("shared-staleness", message, edge.at(key), help))
            continue
        message = f"`{edge.dst}` {is_so}, since its pool {held[pool]}: {gains}"
        help = f"{leave}, or `place` what hinders it on other devices"
        if state:
            help = others
        elif "`deterministic`" in held[pool]:
            help = f"{leave}, or `deterministic`"
        found.append(Diagnostic("shared-staleness", message, edge.at(key), help, "error" if seldom else "warning"))
    return found
