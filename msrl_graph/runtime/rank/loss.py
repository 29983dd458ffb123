"""The loss of an update: an expression of named terms, reduced to one number.

A *scored column* is a column for whose tokens the model computes log-probabilities or values.

Invariant: neither the micro-batch nor the layout changes the loss or its gradient. A term either computes each row as
if the row were alone (loss_split_check.py checks this for a user's terms), or is computed from the whole mini-batch
(joint_loss.py). Each micro-batch contributes a sum, which is divided by a count of the whole mini-batch, over all ranks
and micro-batches.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from ...analysis.sequences import sequences
from ...backends.engine_protocols import Outputs
from ...ir.attributes import UpdateAttributes
from ...ir.graph import Column, Expr, Graph, Node
from ...ir.signatures import ROUNDING, Signature
from ..data.columns import Array
from ..functions.user_traceback import BadResult
from ..functions.values import describe_briefly, load_with_signature
from .packing import PreparedBatch, flatten_column

# For each type of weights: how much rounding may change a token's log-probability, in nats, between two forward passes
# with the same weights (in other micro-batches or another layout). A float32 logit near 32 is exact to 2e-6, and the
# errors of all layers add up to about 1e-5. A bfloat16 logit near 32 is a multiple of 1/8, so that the last rounding
# alone has an error of 1/32 on average.
ROUNDS = {"f32": 1e-4, "bf16": 1 / 32}
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


@dataclass(frozen=True)
class LossNormalizer:
    """The two numbers by which a loss may be divided: response tokens, and rows.

    Both are counted in one mini-batch, over all ranks.
    """

    tokens: int
    rows: int


@dataclass(frozen=True)
class LossInputs:
    """The inputs of loss terms: the rows of a micro-batch or of a mini-batch.

    They exist from the forward pass of the rows until their loss is computed. Tensors contain all rows, one after
    another.

    - `fills`: the values of parameters that no column provides. `logp`, `entropy` and `values` have one number for each
      token of the only scored column, and `lengths` has the number of these tokens in each row. `rng` is the random
      generator for terms of the whole mini-batch. `rounding` is the difference, in nats, that rounding may cause in a
      log-probability between two forward passes with the same weights.
    - `columns`: the values of each column that the loss reads.
    - `logps`: by column, log-probabilities. A scored column has the log-probabilities of its tokens. A column with
      several token ids per token has the log-probabilities of these ids.
    - `scores`: for each scored column, one score per row: the output of a value or reward model at the row's last
      token.
    - `lengths`: for each column, the number of tokens of each row.
    """

    fills: Mapping[str, Any]
    columns: Mapping[str, torch.Tensor]
    logps: Mapping[str, torch.Tensor] = field(default_factory=dict)
    scores: Mapping[str, torch.Tensor] = field(default_factory=dict)
    lengths: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Value:
    """The loss of each token or row, the values of loss terms, and the terms' figures.

    A figure is a metric that a term reports; the figure's name is TERM/FIGURE.
    """

    loss: torch.Tensor
    terms: dict[str, torch.Tensor]
    figures: dict[str, torch.Tensor]


def list_terms(expr: Expr) -> Iterator[tuple[Expr, Signature]]:
    """Yield each call of a term in a loss, with the signature of the term."""
    return ((call, _load_term(call)[1]) for call in expr.calls())


def bind_columns(term: Expr, signature: Signature, node: Node) -> dict[str, str]:
    """Return for each parameter of a loss term the column or state that it receives."""
    renamed = term.columns()
    return {
        parameter: renamed.get(parameter, parameter)
        for parameter in signature.columns
        if renamed.get(parameter, parameter) in (*node.reads, *node.states)
    }


def filled_parameters(node: Node) -> set[str]:
    """Return which parameters of an update's loss terms the runtime fills in."""
    return {name for _, signature in list_terms(UpdateAttributes.of(node).loss) for name in signature.fills}


def columns_read(node: Node) -> tuple[set[str], set[str]]:
    """Return the columns and states that an update's loss reads.

    The first set has the columns and states whose values the loss reads. The second set has the columns of tokens whose
    log-probabilities the loss reads.
    """
    read = _direct_columns(UpdateAttributes.of(node).loss)
    scored = set[str]()
    for term, signature in list_terms(UpdateAttributes.of(node).loss):
        for parameter, column in bind_columns(term, signature, node).items():
            if parameter not in signature.scores:
                (scored if parameter in signature.logps else read).add(column)
    return read, scored


def id_columns(graph: Graph, node: Node) -> dict[str, Column]:
    """Return the columns of token ids whose log-probabilities the loss terms read.

    Scored columns (columns for whose tokens the update's model computes log-probabilities or values) are not included.
    """
    return {name: graph.column(name) for name in sorted(columns_read(node)[1] - {*sequences(graph, node).scored})}


def make_inputs(
    graph: Graph, node: Node, prepared: PreparedBatch, rows: Array, outputs: Outputs, **fills: Any
) -> LossInputs:
    """Return the inputs of an update's loss terms for some rows.

    `rows` are positions in the prepared batch, and `outputs` is the output of a forward pass over these rows. `fills`
    are values of further parameters (`LossInputs.fills`).
    """
    wants = filled_parameters(node)
    target = next(iter(prepared.lengths))
    place = next(output.device for output in outputs if output is not None)
    lengths = {scored: torch.from_numpy(counts[rows]).to(place) for scored, counts in prepared.lengths.items()}
    logps = {} if outputs.logp is None else prepared.split(rows, outputs.logp)
    if outputs.given is not None:
        ids = id_columns(graph, node)
        widths = [math.prod(dim.size for dim in column.dims[1:]) for column in ids.values()]
        for part, (name, column) in zip(torch.split(outputs.given, widths, 1), ids.items(), strict=True):
            logps[name] = prepared.split(rows, part)[column.dims[0].like].reshape(
                -1, *(dim.size for dim in column.dims[1:])
            )
            lengths[name] = lengths[column.dims[0].like]
    # A scalar is repeated for each token of its row, unless the loss is per row.
    row_lengths = None if is_per_row(node) else prepared.lengths[target][rows]
    names = sorted(columns_read(node)[0] & prepared.columns.keys())
    read = {
        column: flatten_column(prepared.columns[column], rows, row_lengths).to(place, non_blocking=True)
        for column in names
    }
    fills |= {name: getattr(outputs, name) for name in ("logp", "values", "entropy") if name in wants}
    values = {} if outputs.values is None else prepared.split(rows, outputs.values)
    scores = {scored: _last_values(values[scored], lengths[scored]) for scored in node.scores}
    return LossInputs({ROUNDING: ROUNDS["f32"], "lengths": lengths[target], **fills}, read, logps, scores, lengths)


def _last_values(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the last number of each row; nan for an empty row.

    `values` has the numbers of all rows, one row after another.
    """
    nonempty = lengths > 0
    last = values.new_full((len(lengths),), math.nan)
    return last.masked_scatter(nonempty, values[(lengths.cumsum(0) - 1)[nonempty]])


def _direct_columns(expr: Expr) -> set[str]:
    """Return the columns and states that a loss uses outside of the calls of terms.

    Example: for a loss `weight * term()`, this is only `weight`.
    """
    return (
        {str(expr.value)}
        if expr.kind in ("column", "state")
        else {name for argument in expr.args if expr.kind != "call" for name in _direct_columns(argument)}
    )


def is_per_row(node: Node) -> bool:
    """Return whether the loss is one number per row instead of one per token."""
    return any(signature.rows for _, signature in list_terms(UpdateAttributes.of(node).loss))


def needs_mini_batch(node: Node) -> bool:
    """Return whether a term of the loss needs all rows of the mini-batch at once."""
    return any(signature.scope == "mini_batch" for _, signature in list_terms(UpdateAttributes.of(node).loss))


def evaluate(node: Node, inputs: LossInputs) -> Value:
    """Return the loss of an update for the rows of `inputs`."""
    collected: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = {}, {}
    return Value(_value(UpdateAttributes.of(node).loss, node, inputs, *collected), *collected)


def _value(
    expr: Expr, node: Node, inputs: LossInputs, parts: dict[str, torch.Tensor], figures: dict[str, torch.Tensor]
) -> Any:
    """Return the value of a subexpression of the loss; record the values of terms.

    The function writes the value of each term into `parts`, and the figures that terms report into `figures`. (This
    function is not nested in `evaluate`: a nested function that calls itself is a reference cycle, which would keep the
    autograd graph of `logp` alive until garbage is collected.)
    """
    if expr.kind == "call":
        term, signature = _load_term(expr)
        part = term(**_arguments(expr, node, inputs), **expr.options())
        part, term_figures = part if isinstance(part, tuple) else (part, {})
        parts[signature.name] = _check_shape(part, signature, inputs)
        figures |= {
            f"{signature.name}/{figure}": torch.as_tensor(value).detach() for figure, value in term_figures.items()
        }
        return part
    if expr.kind in ("column", "state"):
        return inputs.columns[str(expr.value)]
    if expr.kind == "neg" or not expr.args:
        return expr.literal() if not expr.args else -_value(expr.args[0], node, inputs, parts, figures)
    left, right = (_value(arg, node, inputs, parts, figures) for arg in expr.args)
    return OPERATORS[expr.kind](left, right)


def _arguments(term: Expr, node: Node, inputs: LossInputs) -> dict[str, Any]:
    _, signature = _load_term(term)
    binds = bind_columns(term, signature, node)
    special = dict.fromkeys(signature.logps, inputs.logps) | dict.fromkeys(signature.scores, inputs.scores)
    arguments: dict[str, Any] = {
        parameter: special.get(parameter, inputs.columns)[column] for parameter, column in binds.items()
    }
    for name in signature.fills:
        parameter = name.removesuffix("_lengths")
        arguments[name] = inputs.lengths[binds[parameter]] if parameter != name else inputs.fills[name]
    return arguments


def _check_shape(part: Any, signature: Signature, inputs: LossInputs) -> torch.Tensor:
    """Return the result of a loss term after a check of its shape.

    Raises BadResult unless the result is one number per token or, for a term that is computed per row, one number per
    row. A term must not return a mean or sum, because only `reduce` knows the whole mini-batch.
    """
    lengths = inputs.fills["lengths"]
    count, unit = (len(lengths), "row") if signature.rows else (int(lengths.sum()), "token")
    if isinstance(part, torch.Tensor) and part.shape == (count,):
        return part
    returned = f"a tensor of shape {tuple(part.shape)}" if isinstance(part, torch.Tensor) else describe_briefly(part)
    raise BadResult(f"`{signature.name}` returned {returned}; expected shape ({count},), one number per {unit}")


@cache
def _load_term(call: Expr) -> tuple[Callable[..., Any], Signature]:
    """Return the function and the signature of a loss term; cached."""
    return load_with_signature(call, "loss")


def reduce(node: Node, value: torch.Tensor, lengths: torch.Tensor, normalizer: LossNormalizer) -> torch.Tensor:
    """Return the contribution of this micro-batch to the loss of the mini-batch.

    `value` is the loss of each token or row of the micro-batch. `lengths` is the number of response tokens of each row.
    `normalizer` has the numbers by which the loss is divided.
    """
    reduction = UpdateAttributes.of(node).reduce
    kind = "rows" if is_per_row(node) else str(reduction.value)
    if kind == "tokens":
        return value.sum() / max(normalizer.tokens, 1)
    if kind == "rows":
        return value.sum() / max(normalizer.rows, 1)
    if kind == "sequences":
        weight = lengths.clamp(min=1).to(value.dtype).reciprocal().repeat_interleave(lengths)
        return (value * weight).sum() / max(normalizer.rows, 1)
    if kind != "constant":
        raise ValueError(f"unknown reduction of a loss: `{kind}`")
    return value.sum() / float(reduction.args[0].literal()) / max(normalizer.rows, 1)
