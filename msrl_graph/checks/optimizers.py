"""Checks of optimizers: their learning rates, and their optimizer states.

Invariant: the checks know an optimizer only from its call in the program (ir/optimizer_spec.py). If a mistake in a call
is already reported, the call is not checked.
"""

from __future__ import annotations

from collections.abc import Iterator

from .. import algorithms
from ..diagnostics import Diagnostic
from ..ir.attributes import UpdateAttributes
from ..ir.graph import Graph, Node
from .columns import Library


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


def _updates(graph: Graph) -> Iterator[Node]:
    for node in graph.verb("update"):
        if "lr" in UpdateAttributes.of(node).optimizer.keys:
            yield node


def _kept_states(node: Node) -> list[tuple[str, list[str]]]:
    return [(rule.name, [*rule.keeps]) for rule in algorithms.optimizer(UpdateAttributes.of(node).optimizer).rules]
