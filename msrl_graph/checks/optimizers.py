"""Checks of optimizers: learning rates, optimizer states, and their type.

Invariant: the checks know an optimizer only from its call in the program (ir/optimizer_spec.py). If a mistake in a call
is already reported, the call is not checked.
"""

from __future__ import annotations

from collections.abc import Iterator

from .. import algorithms
from ..diagnostics import Diagnostic
from ..ir.attributes import UpdateAttributes
from ..ir.graph import Graph, Node
from ..ir.plan import EngineChoice, Plan
from .columns import Library
from .stage import PlanContext

ROUNDING = 2**-8  # the largest relative change that rounding to the nearest bf16 makes


def row_learning_rates(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report learning rates that use a state with one value per row.

    An optimizer step has only one learning rate.
    """
    diagnostics = []
    row_states = {state.name: state.per for state in graph.states if state.per}
    for node in _updates(graph):
        rate = UpdateAttributes.of(node).rate
        for name in [*([str(rate.value)] if rate.kind == "state" else []), *rate.columns().values()]:
            if name in row_states:
                message = (
                    f"the learning rate of `{node.name}` is the state `{name}`, which has one value for each "
                    f"`{row_states[name]}`"
                )
                diagnostics.append(
                    Diagnostic(
                        "bad-scope",
                        message,
                        node.span_of("optimizer"),
                        f"declare it without `per {row_states[name]}`: one value for the run",
                    )
                )
    return diagnostics


def shared_optimizers(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report updates of one worker whose optimizers have different optimizer states.

    For example, the optimizer of one update has momentum and the optimizer of another update has none.
    """
    diagnostics = []
    for worker in graph.workers:
        updates = [node for node in _updates(graph) if node.worker == worker.name]
        for first, node in ((updates[0], update) for update in updates[1:]):
            if _kept_states(node) != _kept_states(first):
                message = f"`{node.name}` and `{first.name}` share an optimizer, but keep different optimizer states"
                note = ((first.span_of("optimizer"), f"the optimizer of `{first.name}`"),)
                optimizer = UpdateAttributes.of(first).optimizer.value
                help = f"write `{optimizer}(…)` in both, with momentum in both or in none; other options may differ"
                diagnostics.append(Diagnostic("bad-value", message, node.span_of("optimizer"), help, related=note))
    return diagnostics


def check_moments(plan: Plan, context: PlanContext) -> list[Diagnostic]:
    """Report the option `moments` of updates whose optimizer has no float32 states."""
    diagnostics = []
    for node, choice in _list_rounded_updates(plan):
        call = UpdateAttributes.of(node).optimizer
        if not any(rule.can_round for rule in algorithms.optimizer(call).rules):
            message = f"`moments = bf16`: `{call.value}` of `{node.name}` has no float32 optimizer states"
            diagnostics.append(Diagnostic("bad-value", message, choice.span, "leave out `moments`"))
    return diagnostics


def check_decays(plan: Plan, context: PlanContext) -> list[Diagnostic]:
    """Warn of bf16 optimizer states whose decay is rounded away.

    A step multiplies a state by its decay rate before it adds the gradient's part. If the rate is above 1 - 2**-8, half
    the distance of two neighbouring bf16 numbers may exceed the change.
    """
    warnings = []
    for node, choice in _list_rounded_updates(plan):
        rules = algorithms.optimizer(UpdateAttributes.of(node).optimizer).rules
        rates = [rate for rule in rules for rate in (*rule.options.get("betas", ()), rule.options.get("momentum", 0.0))]
        if (highest := max(rates)) > 1 - ROUNDING:
            message = (
                f"`moments = bf16`: an optimizer state of `{node.name}` decays by {1 - highest:.2g} in a step, which "
                f"bf16 rounds away: the state rises, but hardly falls"
            )
            help = f"state decay rates up to {1 - ROUNDING:.3f}, such as `betas = [0.9, 0.99]`, or `moments = f32`"
            warnings.append(Diagnostic("known-bad", message, choice.span, help, "warning"))
    return warnings


def _list_rounded_updates(plan: Plan) -> list[tuple[Node, EngineChoice]]:
    """Return the updates whose engine states `moments = bf16`, with their engines."""
    pairs = [(node, plan.placement(node.name).engine) for node in _updates(plan.graph)]
    return [(node, choice) for node, choice in pairs if choice.options.get("moments") == "bf16"]


def _updates(graph: Graph) -> Iterator[Node]:
    for node in graph.verb("update"):
        if "lr" in UpdateAttributes.of(node).optimizer.keys:
            yield node


def _kept_states(node: Node) -> list[tuple[str, list[str]]]:
    return [(rule.name, [*rule.keeps]) for rule in algorithms.optimizer(UpdateAttributes.of(node).optimizer).rules]
