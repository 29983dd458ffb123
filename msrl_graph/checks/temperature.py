"""Checks of sampling temperatures, and of what is computed from the samples.

Invariant: the log-probabilities of tokens are computed at the temperature at which the tokens were sampled. At
temperature 0, a token has the probability 1 or 0 whatever the weights are. So a policy can compute nothing meaningful
from tokens that were sampled at temperature 0.
"""

from __future__ import annotations

from ..analysis.sequences import sequences
from ..diagnostics import Diagnostic
from ..ir.attributes import GenerateAttributes
from ..ir.graph import ELEMENTS, Graph, Node
from .columns import Library


def one_number(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report temperature columns that do not hold one number per row."""
    diagnostics = []
    for node in graph.verb("generate"):
        expr = GenerateAttributes.of(node).temperature
        column = graph.column(str(expr.value)) if expr.kind == "column" else None
        if (
            column is None
            or column.element not in ELEMENTS
            or (column.element in ("f32", "bf16", "i32", "i64") and not column.dims)
        ):
            continue
        message = f"`temperature` takes one number per row, but `{column.name}` is not a number"
        note = ((column.span, f"`{column.name}` is declared here"),)
        diagnostics.append(
            Diagnostic(
                "bad-value", message, node.span_of("temperature"), f"declare `{column.name} : f32`", related=note
            )
        )
    return diagnostics


def greedy(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report generations at temperature 0 whose responses a policy scores.

    To score a response is to compute the log-probabilities of its tokens.
    """
    scorers: dict[str, list[str]] = {}
    for node in (
        candidate
        for candidate in graph.nodes
        if candidate.verb in ("infer", "update") and graph.worker(candidate.worker).kind == "policy"
    ):
        for column in sequences(graph, node).scored:
            scorers.setdefault(column, []).append(node.name)
    diagnostics = []
    for node in filter(_is_greedy, graph.verb("generate")):
        for column in (written for written in node.writes if written in scorers):
            who = " and ".join(f"`{name}`" for name in scorers[column])
            does = "computes" if len(scorers[column]) == 1 else "compute"
            message = f"`{node.name}` draws `{column}` at temperature 0, and {who} {does} log-probabilities of it"
            help = (
                "use a temperature above 0, since at 0 a token is certain or impossible; or score the responses of "
                "another generation"
            )
            diagnostics.append(Diagnostic("greedy", message, node.span_of("temperature"), help))
    return diagnostics


def equal_responses(graph: Graph, library: Library) -> list[Diagnostic]:
    """Warn of generations that draw several responses per prompt at temperature 0.

    All responses to a prompt are then equal. Generations with an environment or an agent are not checked.
    """
    diagnostics = []
    for node in filter(_is_greedy, graph.verb("generate")):
        options = GenerateAttributes.of(node)
        if options.samples > 1 and options.partner is None:
            message = (
                f"`{node.name}` draws {options.samples:,} equal responses to each prompt: at temperature 0 it always "
                "takes the likeliest token"
            )
            diagnostics.append(
                Diagnostic(
                    "greedy",
                    message,
                    node.span_of("temperature"),
                    "leave `samples` out, or use a temperature above 0",
                    "warning",
                )
            )
    return diagnostics


def _is_greedy(node: Node) -> bool:
    expr = GenerateAttributes.of(node).temperature
    return expr.kind == "number" and expr.value == 0
