"""Checks of off-policy rows: staleness, skipped versions and partial rollout.

An off-policy row was generated with older weights than the weights that are trained on the row.

Invariant: a mistake that depends only on the graph is reported for the graph. A mistake that depends on which nodes
share devices is reported for a plan whose nodes are placed.
"""

from __future__ import annotations

from ..analysis.async_schedule import late_states, staleness_bounds
from ..analysis.pools_in_step import describe_state_wait, reasons_in_step, reasons_in_turns
from ..analysis.sequences import find_response_column, temperature_states
from ..diagnostics import Diagnostic, Span
from ..ir.attributes import ReshardingEdgeAttributes
from ..ir.graph import Graph, Node
from ..ir.plan import Plan, shared_staleness
from ..planner.pools import open_to_staleness
from .columns import Library
from .scope import loss_columns
from .stage import PlanContext


def uncorrected(graph: Graph, library: Library) -> list[Diagnostic]:
    """Warn of off-policy generations if no loss corrects for the older weights.

    A loss corrects for older weights if it uses the log-probabilities that the generation wrote when it sampled.
    """
    diagnostics = []
    for node in graph.verb("generate"):
        cause = _find_cause(graph, node)
        updates = [update for update in graph.verb("update") if update.worker == node.worker]
        drawn = {find_response_column(graph, node, "f32")} - {""}
        if cause is None or not updates or any(drawn & loss_columns(update, library) for update in updates):
            continue
        name, span = cause
        readers = [update.name for update in updates if drawn & {*update.reads}]
        update = (readers or [updates[0].name])[0]
        lacks = "reads no sampled log-probabilities"
        if readers:
            lacks = f"reads `{min(drawn)}` but has no term that uses it"
            help = (
                f"multiply its loss by `truncated(gen_logp = {min(drawn)})`, or compare with it directly: "
                f"`clip(old_logp = {min(drawn)})`"
            )
        elif drawn:
            help = f"read `{min(drawn)}` in `{update}`, and correct its loss with it"
        else:
            response = next((column for column in node.writes if graph.column(column).element == "i32"), "response")
            help = (
                f"declare `gen_logp : f32[{response}]`, let `{node.name}` write it next to `{response}`, and "
                f"`{update}` read it and correct its loss with it: `truncated()`"
            )
        message = f"with `{name}`, rows may come from older weights than those of `{update}`, which {lacks}"
        diagnostics.append(Diagnostic("uncorrected-staleness", message, span, help, "warning"))
    return diagnostics


def stale_logp_columns(graph: Graph, node: Node) -> set[str]:
    """Return the log-probability columns that a worker's off-policy generations write.

    The worker is the worker of `node`. If no loss uses the column of a generation, the check `uncorrected` warns of the
    generation.
    """
    older = [
        generation
        for generation in graph.verb("generate")
        if generation.worker == node.worker and _find_cause(graph, generation) is not None
    ]
    return {find_response_column(graph, generation, "f32") for generation in older} - {""}


def _find_cause(graph: Graph, node: Node) -> tuple[str, Span] | None:
    """Return the attribute that makes a generation off-policy, and its span.

    Return None if the generation is not off-policy.
    """
    edge = next(
        (
            reshard
            for reshard in graph.reshards()
            if reshard.dst == node.name and ReshardingEdgeAttributes.of(reshard).staleness
        ),
        None,
    )
    if edge is not None:
        return "staleness", edge.span_of("staleness")
    if node.cuts:
        return "partial", node.span_of("partial")
    return None


def missing_staleness(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report resharding edges whose `every` makes rows older than `staleness` allows."""
    diagnostics = []
    for edge in graph.reshards():
        options = ReshardingEdgeAttributes.of(edge)
        if options.staleness >= options.every - 1:
            continue
        least = options.every - 1
        age = f"{least} version{'s' * (least > 1)} old"
        message = (
            f"with `every = {options.every}`, rows of `{edge.dst}` may be up to {age}, but `staleness` allows "
            f"{options.staleness}"
        )
        help = f"add `staleness = {least}`, or leave `every` out"
        diagnostics.append(Diagnostic("missing-staleness", message, edge.span_of("every"), help))
    return diagnostics


def delayed_states(plan: Plan) -> list[Diagnostic]:
    """Warn of a sampling temperature that reacts late to the sampled rows.

    The temperature of a generation is a state, and a function sets this state from the sampled rows. With `staleness`,
    the generation may use an older value than the last value that the function set.
    """
    graph = plan.graph
    late = late_states(plan)
    diagnostics = []
    for node in graph.verb("generate"):
        for state in (name for name in temperature_states(graph, node) if name in late):
            setters = [
                setter.name
                for setter in graph.nodes
                if state in setter.sets and setter.name in graph.flow.after(node.name)
            ]
            if not setters:
                continue
            most = f"{late[state]} iteration{'s' * (late[state] > 1)}"
            message = (
                f"`{node.name}` draws at `{state}`, which `{setters[0]}` sets from what was drawn, but with "
                f"`staleness` it uses a value up to {most} old"
            )
            help = "change it in small steps, or leave `staleness` out"
            diagnostics.append(Diagnostic("delayed-state", message, node.span_of("temperature"), help, "warning"))
    return diagnostics


def check(plan: Plan, context: PlanContext) -> list[Diagnostic]:
    """Report resharding edges on which `staleness` or `every` has no effect.

    In each of these cases, neither attribute has an effect:

    - The two nodes of the edge share devices and take turns.
    - The pool of the generation must be in step with the updates.

    If the deploy allows separate devices, but the planner lets the nodes take turns, `staleness` is not reported.
    Instead, a note of the plan explains the planner's choice.
    """
    shared = shared_staleness(plan.graph, lambda node: plan.placement(node).pool)
    hindrances = reasons_in_step(plan)
    turns = reasons_in_turns(plan)
    stale_edges = staleness_bounds(plan)
    diagnostics = delayed_states(plan)
    for edge in plan.graph.reshards():
        options = ReshardingEdgeAttributes.of(edge)
        pool = plan.placement(edge.dst).pool
        if not options.staleness or (edge.src, edge.dst) in stale_edges:
            continue
        seldom = options.every > 1
        key, leave = ("every", "leave `every` and `staleness` out") if seldom else ("staleness", "leave it out")
        gains = "`every` skips none" if seldom else "`staleness` gains nothing"
        is_so = "gets every version" if seldom else "is never behind"
        state = describe_state_wait(plan, [edge.dst])
        others = f"{leave}, or let only the source's `weights` or a temperature read the state before `{edge.dst}`"
        if edge in shared:
            if not seldom and open_to_staleness(plan):
                continue
            message = f"`{edge.dst}` shares its devices with `{edge.src}`, and {turns[pool]}: it {is_so}, so {gains}"
            apart = f"{leave}, or give each its own devices: `apart {edge.dst}, {edge.src}`"
            help = others if state else apart
            diagnostics.append(Diagnostic("shared-staleness", message, edge.span_of(key), help))
            continue
        message = f"`{edge.dst}` {is_so}, since its pool {hindrances[pool]}: {gains}"
        help = f"{leave}, or `place` the node in its way on other devices"
        if state:
            help = others
        elif "`deterministic`" in hindrances[pool]:
            help = f"{leave}, or `deterministic`"
        diagnostics.append(
            Diagnostic("shared-staleness", message, edge.span_of(key), help, "error" if seldom else "warning")
        )
    return diagnostics
