"""Optimizers: that updates of one worker agree on theirs, and that a learning rate is one number.

Invariant: what an optimizer is follows from its call (optimizer_spec.py); calls whose own mistakes were told are left
out.
"""

from __future__ import annotations

from collections.abc import Iterator

from .. import algorithms
from ..diagnostics import Diagnostic
from ..ir.attributes import UpdateAttributes
from ..ir.graph import Graph, Node
from .columns import Library


def rated(graph: Graph, library: Library) -> list[Diagnostic]:
    """Learning rates from a state of which each row has one: a step has one rate."""
    found = []
    each = {s.name: s.per for s in graph.states if s.per}
    for node in _updates(graph):
        rate = UpdateAttributes.of(node).rate
        for name in [*([str(rate.value)] if rate.kind == "state" else []), *rate.columns().values()]:
            if name in each:
                message = (
                    f"the learning rate of `{node.name}` is from the state `{name}`, of which each "
                    f"`{each[name]}` has one"
                )
                found.append(
                    Diagnostic(
                        "bad-scope",
                        message,
                        node.at("optimizer"),
                        f"declare it without `per {each[name]}`: one for the run",
                    )
                )
    return found


def shared(graph: Graph, library: Library) -> list[Diagnostic]:
    """Updates of one worker whose optimizers keep something else of the weights that they share."""
    found = []
    for worker in graph.workers:
        updates = [n for n in _updates(graph) if n.worker == worker.name]
        for first, node in ((updates[0], n) for n in updates[1:]):
            if _kept(node) != _kept(first):
                message = (
                    f"`{node.name}` and `{first.name}` share an optimizer, and keep different states of the weights"
                )
                note = ((first.at("optimizer"), f"the optimizer of `{first.name}`"),)
                optimizer = UpdateAttributes.of(first).optimizer.value
                help = f"write `{optimizer}(…)` in both, with momentum in both or in none; other options may differ"
                found.append(Diagnostic("bad-value", message, node.at("optimizer"), help, related=note))
    return found


def _updates(graph: Graph) -> Iterator[Node]:
    for node in graph.verb("update"):
        if "lr" in UpdateAttributes.of(node).optimizer.keys:
            yield node


def _kept(node: Node) -> list[tuple[str, list[str]]]:
    return [(rule.name, [*rule.keeps]) for rule in algorithms.optimizer(UpdateAttributes.of(node).optimizer).rules]
