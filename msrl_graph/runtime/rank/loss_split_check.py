"""A check that tries a user's loss terms on made-up rows.

The check computes a term once with all rows, and once with each of two parts of the rows.

Invariant: a term that passes is computed per row, as far as made-up rows with the shapes of the columns can show. The
loss of a row and its gradients are the same as if the row were alone, so neither micro-batches nor ranks change a loss.
A loss that passes has a gradient. Terms that need the whole mini-batch (joint_loss.py) are not tried, because
micro-batches do not split the rows of such terms.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import torch

from ...analysis.sequences import sequences
from ...backends.engine_protocols import Outputs
from ...checks.scope import span
from ...diagnostics import Diagnostic
from ...ir.graph import Column as Declared
from ...ir.graph import Expr, Graph, Node
from ...ir.plan import Plan
from ..data.columns import DTYPES, Array, ColumnData, offsets_from_lengths
from ..functions.user_traceback import BadResult
from . import loss
from .joint_loss import FIELDS
from .loss_dry_run import list_user_terms, warn_untried
from .packing import PreparedBatch

# The number of rows and the maximal number of tokens per row: few, and so many that a small fraction of all tokens is
# at least one token.
SIZES = ((12, 6), (512, 64))
# The two computations do the same operations, but sum in another order.
NEAR: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-6, "equal_nan": True}


def check_terms(plan: Plan) -> list[Diagnostic]:
    """Return the problems of a plan's user-defined loss terms.

    A term has a problem if it fails, if a row's result depends on other rows, or if its loss has no gradient.
    """
    terms = list_user_terms(plan)
    problems = [problem for node, call in terms if (problem := _check_term(plan.graph, node, call)) is not None]
    if not problems:
        problems = [
            _report_no_gradient(node)
            for node in {update.name: update for update, _ in terms}.values()
            if has_no_gradient(plan.graph, node)
        ]
    return problems


def _check_term(graph: Graph, node: Node, call: Expr) -> Diagnostic | None:
    node = replace(node, attributes={**node.attributes, "loss": call})
    try:
        if loss.needs_mini_batch(node) or all(is_per_row(graph, node, seed) for seed in range(2 * len(SIZES))):
            return None
    except BadResult as error:  # this error would occur with any rows
        help = (
            "return one number per token and leave means and sums to `reduce`, or return one number per row and "
            "annotate the term `-> Rows`"
        )
        return Diagnostic("bad-value", f"on made-up rows {error}", span(call, node), help)
    except Exception as error:
        return warn_untried(node, call, f"{type(error).__name__}: {error}")
    name = str(call.value).rpartition(":")[2]
    message = (
        f"`{name}` changes a row's loss when other rows are computed with it, so the loss would depend on "
        "`micro_batch` and the layout"
    )
    help = (
        'mark it `@loss_term(scope="mini_batch")` to get all rows of the mini-batch, or compute each row from that '
        "row alone"
    )
    return Diagnostic("bad-scope", message, span(call, node), help)


def _report_no_gradient(node: Node) -> Diagnostic:
    message = f"the loss of `{node.name}` has no gradient: nothing in it depends on the weights"
    help = "let a term use `logp`, `values` or `entropy` without `detach()` and outside of `no_grad()`"
    return Diagnostic("bad-value", message, node.span_of("loss"), help)


def has_no_gradient(graph: Graph, node: Node) -> bool:
    """Return whether an update's loss does not depend on any output of a forward pass."""
    if loss.needs_mini_batch(node):
        return False
    seen, outputs = _made_up(graph, node, np.random.default_rng(0), SIZES[0], negative=True)
    value, _ = _evaluate(graph, node, seen, outputs, np.arange(len(seen.rows)))
    return not value.requires_grad


def is_per_row(graph: Graph, node: Node, seed: int) -> bool:
    """Return whether the loss of a row does not depend on the other rows.

    The function computes the loss and gradients of a made-up mini-batch, and of two parts of this mini-batch. The
    results must be equal.
    """
    draw = np.random.default_rng(seed)
    seen, outputs = _made_up(graph, node, draw, SIZES[seed // 2 % len(SIZES)], negative=bool(seed % 2))
    rows = len(seen.rows)
    full = [*_loss_and_gradients(graph, node, seen, outputs, np.arange(rows))]
    parts = np.split(draw.permutation(rows), [rows * 2 // 5])
    for part in map(np.sort, parts):
        for one, all_ in zip(_loss_and_gradients(graph, node, seen, outputs, part), full, strict=True):
            if not np.allclose(one.values, all_.take(part).values, **NEAR):
                return False
    return True


def _made_up(
    graph: Graph, node: Node, draw: np.random.Generator, size: tuple[int, int], negative: bool
) -> tuple[PreparedBatch, dict[str, dict[str, ColumnData]]]:
    """Make random rows that an update's loss terms can read, and random model outputs.

    `size` is the number of rows, and the largest number of a row's tokens in each scored column. Floats are normally
    distributed. If `negative` is true, all floats are negative, as log-probabilities are.
    """
    rows, most = size

    def numbers(shape: tuple[int, ...], element: str = "f32", below: bool = negative) -> Array:
        if DTYPES[element] not in (np.float32,):
            return draw.integers(0, 2, shape).astype(DTYPES[element])
        normal = draw.standard_normal(shape).astype(np.float32)
        return -np.abs(normal) if below else normal

    lengths = {scored: draw.integers(1, most + 1, rows) for scored in sequences(graph, node).scored}

    def column(declared: Declared) -> ColumnData:
        if not declared.dims:
            return ColumnData(numbers((rows,), declared.element))
        first, *rest = declared.dims
        own = lengths[first.like] if first.like in lengths else np.full(rows, first.size or 1)
        return ColumnData(
            numbers((int(own.sum()), *(dim.size for dim in rest)), declared.element), offsets_from_lengths(own)
        )

    names = loss.columns_read(node)[0] - lengths.keys()
    columns = {name: column(graph.column(name)) for name in sorted(names - {*node.states})}
    columns |= {state: ColumnData(np.full(rows, 0.5, np.float32)) for state in sorted(names & {*node.states})}
    width = sum(int(np.prod([dim.size for dim in ids.dims[1:]])) for ids in loss.id_columns(graph, node).values())
    kinds = {"logp": ((), True), "values": ((), False), "entropy": ((), True), "given": ((width,), True)}
    outputs = {
        name: {
            scored: ColumnData(
                numbers((int(counts.sum()), *shape), below=below) * (-1 if name == "entropy" else 1),
                offsets_from_lengths(counts),
            )
            for scored, counts in lengths.items()
        }
        for name, (shape, below) in kinds.items()
    }
    return PreparedBatch(np.arange(rows), columns, lengths, np.zeros(rows, bool)), outputs


def _loss_and_gradients(
    graph: Graph, node: Node, seen: PreparedBatch, outputs: dict[str, dict[str, ColumnData]], rows: Array
) -> Iterator[ColumnData]:
    """Yield the loss of each row in `rows`, and then the gradients of the loss.

    The gradients are with respect to the outputs of forward passes.
    """
    value, leaves = _evaluate(graph, node, seen, outputs, rows)
    lengths = next(iter(seen.lengths.values()))[rows]
    yield ColumnData(value.detach().numpy(), None if loss.is_per_row(node) else offsets_from_lengths(lengths))
    if value.requires_grad:
        # Rows have different weights, as under `reduce`: the gradient of a plain sum may be right even if the
        # gradients of single rows are wrong.
        weight = torch.from_numpy((1.0 + rows % 3).astype(np.float32).repeat(1 if loss.is_per_row(node) else lengths))
        slopes = torch.autograd.grad(value, [*leaves.values()], weight, materialize_grads=True)
        for slope in slopes:
            for scored, part in seen.split(rows, slope).items():
                yield ColumnData(part.numpy(), offsets_from_lengths(seen.lengths[scored][rows]))


def _evaluate(
    graph: Graph, node: Node, seen: PreparedBatch, outputs: dict[str, dict[str, ColumnData]], rows: Array
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Evaluate the loss of some rows.

    Returns the loss and the outputs of forward passes. The outputs are leaf tensors, so gradients of the loss with
    respect to the outputs can be computed.
    """
    leaves = {
        name: torch.cat(
            [torch.from_numpy(column.take(rows).values) for column in outputs[name].values()]
        ).requires_grad_()
        for name in FIELDS
    }
    torch.manual_seed(0)
    return loss.evaluate(node, loss.make_inputs(graph, node, seen, rows, Outputs(**leaves))).loss, leaves


def main() -> None:
    """Check the plan on stdin and write the problems to stdout.

    Anything that the called code prints is redirected to stderr.
    """
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=Plan)
    with os.fdopen(os.dup(1), "wb") as answer:
        os.dup2(2, 1)
        torch.set_num_threads(1)
        answer.write(msgspec.json.encode(check_terms(plan)))


if __name__ == "__main__":
    main()
