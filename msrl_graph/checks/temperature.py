"""Temperatures: what responses are drawn at, and what can be computed of those that were.

Invariant: log-probabilities are at the temperature that their tokens were drawn at. At 0 a token has the probability 1
or 0, whatever the weights are, so nothing that a policy computes of such tokens has a meaning.
"""

from __future__ import annotations

from ..diagnostics import Diagnostic
from ..ir.attributes import GenerateAttributes
from ..ir.graph import ELEMENTS, Graph, Node
from ..ir.sequences import sequences
from .columns import Library


def one_number(graph: Graph, library: Library) -> list[Diagnostic]:
    """Temperatures of rows that are no plain numbers."""
    found = []
    for node in graph.verb("generate"):
        expr = GenerateAttributes.of(node).temperature
        column = graph.column(str(expr.value)) if expr.kind == "column" else None
        if (
            column is None
            or column.element not in ELEMENTS
            or (column.element in ("f32", "bf16", "i32", "i64") and not column.dims)
        ):
            continue
        message = f"`temperature` takes one number a row, and `{column.name}` is none"
        note = ((column.span, f"`{column.name}` is declared here"),)
        found.append(
            Diagnostic("bad-value", message, node.at("temperature"), f"declare `{column.name} : f32`", related=note)
        )
    return found


def greedy(graph: Graph, library: Library) -> list[Diagnostic]:
    """Generations at temperature 0 of which a policy scores what they draw."""
    scorers: dict[str, list[str]] = {}
    for node in (n for n in graph.nodes if n.verb in ("infer", "update") and graph.worker(n.worker).kind == "policy"):
        for column in sequences(graph, node).scored:
            scorers.setdefault(column, []).append(node.name)
    found = []
    for node in filter(_cold, graph.verb("generate")):
        for column in (c for c in node.writes if c in scorers):
            who = " and ".join(f"`{name}`" for name in scorers[column])
            does = "computes" if len(scorers[column]) == 1 else "compute"
            message = f"`{node.name}` draws `{column}` at temperature 0, and {who} {does} log-probabilities of it"
            help = (
                "a temperature above 0: at 0 a token is certain or impossible; or score what another generation draws"
            )
            found.append(Diagnostic("greedy", message, node.at("temperature"), help))
    return found


def equal(graph: Graph, library: Library) -> list[Diagnostic]:
    """Several responses to one prompt that are all the same."""
    found = []
    for node in filter(_cold, graph.verb("generate")):
        said = GenerateAttributes.of(node)
        if said.samples > 1 and said.partner is None:
            message = (
                f"`{node.name}` draws {said.samples:,} equal responses to each prompt: at temperature 0 it "
                "takes the likeliest tokens"
            )
            found.append(
                Diagnostic(
                    "greedy",
                    message,
                    node.at("temperature"),
                    "leave `samples` out, or give it a temperature above 0",
                    "warning",
                )
            )
    return found


def _cold(node: Node) -> bool:
    expr = GenerateAttributes.of(node).temperature
    return expr.kind == "number" and expr.value == 0
