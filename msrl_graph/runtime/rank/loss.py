"""The loss of an update: an expression of named terms, and how tokens are reduced.

Invariant: neither the micro-batch nor the layout changes the loss or its gradient: a term gives each row what it would
give it alone (loss_split_check.py holds a user's to that), or is of the whole mini-batch (joint_loss.py); and each
micro-batch contributes a sum that is divided by a count of the whole mini-batch, all ranks and micro-batches together.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch

from ...backends.spec import Outputs
from ...ir.attributes import UpdateAttributes
from ...ir.graph import Column, Expr, Graph, Node
from ...ir.sequences import sequences
from ...ir.signatures import ROUNDING, Signature
from ..data.columns import Array
from ..functions.user_traceback import BadResult
from ..functions.values import brief, called
from .packing import PreparedBatch, flat

# By the type of the weights, what rounding makes of a token's log-probability between two forward passes of the same
# weights, in nats: other micro-batches, another layout. A float32 logit near 32 is exact to 2e-6, and layers add up to
# some 1e-5. A bfloat16 logit near 32 is a multiple of 1/8, so off by 1/32 on average at the last rounding alone.
ROUNDS = {"f32": 1e-4, "bf16": 1 / 32}
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


@dataclass(frozen=True)
class LossNormalizer:
    """The mini-batch that a micro-batch belongs to: the response tokens and the rows that count, over all ranks."""

    tokens: int
    rows: int


@dataclass(frozen=True)
class LossInputs:
    """What loss terms are computed from, the rows of a micro-batch (or of the whole mini-batch) one after another.

    - `fills`: what a parameter of this name gets: `logp`, `entropy` and `values`, a number for each token of the one
      scored column, and `lengths`, how many tokens each row has of it.
    - By column: `logps`, the log-probabilities of its tokens (or of the ids that it holds for each token), `scores`,
      the score of each row up to its last token, `lengths`, the tokens of each row, and `columns`, what it holds.
    - `rng`: where terms of the whole mini-batch draw from.
    - `rounding`: what a log-probability may be off by between two passes of the same weights, in nats.
    """

    fills: Mapping[str, torch.Tensor]
    columns: Mapping[str, torch.Tensor]
    logps: Mapping[str, torch.Tensor] = field(default_factory=dict)
    scores: Mapping[str, torch.Tensor] = field(default_factory=dict)
    lengths: Mapping[str, torch.Tensor] = field(default_factory=dict)
    rng: np.random.Generator | None = None
    rounding: float = ROUNDS["f32"]


@dataclass(frozen=True)
class Value:
    """The loss of each token, or of each row; by name what each term gives, and the figures that terms tell, as
    TERM/FIGURE."""

    loss: torch.Tensor
    terms: dict[str, torch.Tensor]
    figures: dict[str, torch.Tensor]


def terms(expr: Expr) -> Iterator[tuple[Expr, Signature]]:
    """The calls in a loss, with their signatures."""
    return ((call, _term(call)[1]) for call in expr.calls())


def bound(term: Expr, signature: Signature, node: Node) -> dict[str, str]:
    """Parameter -> column, or state, of a term."""
    renamed = term.columns()
    return {p: renamed.get(p, p) for p in signature.columns if renamed.get(p, p) in (*node.reads, *node.states)}


def fills(node: Node) -> set[str]:
    """What the terms of an update want filled."""
    return {f for _, signature in terms(UpdateAttributes.of(node).loss) for f in signature.fills}


def columns(node: Node) -> tuple[set[str], set[str]]:
    """The columns and states that the loss needs of those that the node reads: for what they hold, and for the
    log-probabilities of the tokens that they hold."""
    held = _named(UpdateAttributes.of(node).loss)
    scored = set[str]()
    for term, signature in terms(UpdateAttributes.of(node).loss):
        for parameter, column in bound(term, signature, node).items():
            if parameter not in signature.scores:
                (scored if parameter in signature.logps else held).add(column)
    return held, scored


def beside(graph: Graph, node: Node) -> dict[str, Column]:
    """The columns of ids whose log-probabilities terms want beside those of the tokens that are scored."""
    return {c: graph.column(c) for c in sorted(columns(node)[1] - {*sequences(graph, node).scored})}


def inputs(
    graph: Graph,
    node: Node,
    seen: PreparedBatch,
    rows: Array,
    made: Outputs,
    rng: np.random.Generator | None = None,
    rounding: float = ROUNDS["f32"],
) -> LossInputs:
    """What the terms of an update are computed from, of what a forward pass over the rows at these positions made."""
    wants = fills(node)
    target = next(iter(seen.lengths))
    place = next(x.device for x in made if x is not None)
    lengths = {c: torch.from_numpy(n[rows]).to(place) for c, n in seen.lengths.items()}
    logps = {} if made.logp is None else seen.split(rows, made.logp)
    if made.given is not None:
        ids = beside(graph, node)
        widths = [math.prod(d.size for d in column.dims[1:]) for column in ids.values()]
        for part, (name, column) in zip(torch.split(made.given, widths, 1), ids.items(), strict=True):
            logps[name] = seen.split(rows, part)[column.dims[0].like].reshape(-1, *(d.size for d in column.dims[1:]))
            lengths[name] = lengths[column.dims[0].like]
    # A scalar stands for each token of its row, but where the loss is of rows.
    spread = None if of_rows(node) else seen.lengths[target][rows]
    named = sorted(columns(node)[0] & seen.columns.keys())
    held = {c: flat(seen.columns[c], rows, spread).to(place, non_blocking=True) for c in named}
    filled = {name: getattr(made, name) for name in ("logp", "values", "entropy") if name in wants}
    values = {} if made.values is None else seen.split(rows, made.values)
    scores = {c: _last(values[c], lengths[c]) for c in node.scores}
    return LossInputs(filled | {"lengths": lengths[target]}, held, logps, scores, lengths, rng, rounding)


def _last(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The last number of each row, rows one after another in `values`; nan for a row that has none."""
    some = lengths > 0
    found = values.new_full((len(lengths),), math.nan)
    return found.masked_scatter(some, values[(lengths.cumsum(0) - 1)[some]])


def _named(expr: Expr) -> set[str]:
    """Columns and states that stand in the loss itself, as factors of terms."""
    return (
        {str(expr.value)}
        if expr.kind in ("column", "state")
        else {c for a in expr.args if expr.kind != "call" for c in _named(a)}
    )


def of_rows(node: Node) -> bool:
    """Whether the loss is one number a row, not one a token."""
    return any(signature.rows for _, signature in terms(UpdateAttributes.of(node).loss))


def of_mini_batch(node: Node) -> bool:
    """Whether a term of the loss needs all rows of the mini-batch at once."""
    return any(signature.scope == "mini_batch" for _, signature in terms(UpdateAttributes.of(node).loss))


def evaluate(node: Node, inputs: LossInputs) -> Value:
    """The loss of the rows of a micro-batch, or of the mini-batch."""
    found: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = {}, {}
    return Value(_value(UpdateAttributes.of(node).loss, node, inputs, *found), *found)


def _value(
    expr: Expr, node: Node, inputs: LossInputs, parts: dict[str, torch.Tensor], figures: dict[str, torch.Tensor]
) -> Any:
    """The value of a part of the loss; terms go into `parts`. (A function within `evaluate` that calls itself would be
    a cycle, which holds what it sees, the graph behind `logp` too, until the garbage is collected.)"""
    if expr.kind == "call":
        term, signature = _term(expr)
        part = term(**_arguments(expr, node, inputs), **expr.options())
        part, told = part if isinstance(part, tuple) else (part, {})
        parts[signature.name] = _fitting(part, signature, inputs)
        figures |= {f"{signature.name}/{figure}": torch.as_tensor(value).detach() for figure, value in told.items()}
        return part
    if expr.kind in ("column", "state"):
        return inputs.columns[str(expr.value)]
    if expr.kind == "neg" or not expr.args:
        return expr.literal() if not expr.args else -_value(expr.args[0], node, inputs, parts, figures)
    left, right = (_value(arg, node, inputs, parts, figures) for arg in expr.args)
    return OPERATORS[expr.kind](left, right)


def _arguments(term: Expr, node: Node, inputs: LossInputs) -> dict[str, Any]:
    _, signature = _term(term)
    binds = bound(term, signature, node)
    special = dict.fromkeys(signature.logps, inputs.logps) | dict.fromkeys(signature.scores, inputs.scores)
    given: dict[str, Any] = {p: special.get(p, inputs.columns)[c] for p, c in binds.items()}
    for name in signature.fills:
        of = name.removesuffix("_lengths")
        if name in ("rng", ROUNDING):
            given[name] = getattr(inputs, name)
        else:
            given[name] = inputs.lengths[binds[of]] if of != name else inputs.fills[name]
    return given


def _fitting(part: Any, signature: Signature, inputs: LossInputs) -> torch.Tensor:
    """What a term gave; BadResult where it is not a number a token, or a row: `reduce` alone knows the whole
    mini-batch."""
    lengths = inputs.fills["lengths"]
    count, each = (len(lengths), "row") if signature.rows else (int(lengths.sum()), "token")
    if isinstance(part, torch.Tensor) and part.shape == (count,):
        return part
    what = f"a tensor of the shape {tuple(part.shape)}" if isinstance(part, torch.Tensor) else brief(part)
    raise BadResult(f"`{signature.name}` returned {what}, where one of the shape ({count},) belongs, a number a {each}")


@cache
def _term(call: Expr) -> tuple[Callable[..., Any], Signature]:
    """A term of a loss and its signature: a file is read once."""
    return called(call, "loss")


def reduce(node: Node, value: torch.Tensor, lengths: torch.Tensor, whole: LossNormalizer) -> torch.Tensor:
    """This micro-batch's part of the loss. `lengths` are the response tokens of each row."""
    how = UpdateAttributes.of(node).reduce
    kind = "rows" if of_rows(node) else str(how.value)
    if kind == "tokens":
        return value.sum() / max(whole.tokens, 1)
    if kind == "rows":
        return value.sum() / max(whole.rows, 1)
    if kind == "sequences":
        weight = lengths.clamp(min=1).to(value.dtype).reciprocal().repeat_interleave(lengths)
        return (value * weight).sum() / max(whole.rows, 1)
    if kind != "constant":
        raise ValueError(f"no loss is reduced by `{kind}`")
    return value.sum() / float(how.args[0].literal()) / max(whole.rows, 1)
