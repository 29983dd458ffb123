"""The loss of an update: an expression of named terms, and how tokens are reduced.

Invariant: neither the micro-batch nor the layout changes the loss or its gradient: each micro-batch contributes a sum that is divided
by a count of the whole mini-batch, all ranks and micro-batches together.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch

from .. import algorithms
from ..graph import Expr, Node
from ..unready import FILLED

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


@dataclass(frozen=True)
class Whole:
    """The mini-batch that a micro-batch belongs to: its response tokens and its rows, over all ranks."""

    tokens: int
    rows: int


def terms(expr: Expr) -> list[Expr]:
    """The calls in a loss."""
    return [expr] if expr.kind == "call" else [t for a in expr.args for t in terms(a)]


def columns(node: Node) -> set[str]:
    """The columns that the loss's terms need of those that the node reads."""
    needed: set[str] = set()
    for term in terms(node.attributes["loss"]):
        needed |= set(_bound(term, node).values())
    return needed


def _bound(term: Expr, node: Node) -> dict[str, str]:
    """Parameter -> column of a term."""
    signature = algorithms.library()["loss", str(term.value)][0]
    renamed = term.columns()
    return {p: renamed.get(p, p) for p in signature.columns if renamed.get(p, p) in node.reads}


def evaluate(
    node: Node, logp: torch.Tensor, lengths: torch.Tensor, values: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of each response token, and each term's own value by its name. `lengths` are the response tokens of each row."""
    parts: dict[str, torch.Tensor] = {}
    return _value(node.attributes["loss"], node, dict(zip(FILLED, (logp, lengths), strict=True)), values, parts), parts


def _value(expr: Expr, node: Node, filled: dict[str, torch.Tensor], values: dict[str, torch.Tensor], parts: dict[str, torch.Tensor]) -> Any:
    """The value of a part of the loss; terms go into `parts`. (A function within `evaluate` that calls itself would be a cycle, which
    holds what it sees, the graph behind `logp` too, until the garbage is collected.)"""
    if expr.kind == "call":
        function, fills = algorithms.load("loss", str(expr.value)), algorithms.library()["loss", str(expr.value)][0].fills
        given = {p: filled[p] for p in fills} | {p: values[c] for p, c in _bound(expr, node).items()}
        parts[str(expr.value)] = function(**given, **expr.options())
        return parts[str(expr.value)]
    if expr.kind == "neg" or not expr.args:
        return expr.literal() if not expr.args else -_value(expr.args[0], node, filled, values, parts)
    left, right = (_value(arg, node, filled, values, parts) for arg in expr.args)
    return OPERATORS[expr.kind](left, right)


def reduce(node: Node, per_token: torch.Tensor, lengths: torch.Tensor, whole: Whole) -> torch.Tensor:
    """This micro-batch's part of the loss. `lengths` are the response tokens of each row."""
    how = node.attributes.get("reduce")
    kind = "tokens" if how is None else str(how.value)
    if kind == "tokens":
        return per_token.sum() / max(whole.tokens, 1)
    if kind == "sequences":
        weight = lengths.clamp(min=1).to(per_token.dtype).reciprocal().repeat_interleave(lengths)
        return (per_token * weight).sum() / max(whole.rows, 1)
    assert how is not None and kind == "constant"
    return per_token.sum() / float(how.args[0].literal()) / max(whole.rows, 1)
