"""A loss with terms that need all rows of a mini-batch at once.

All ranks first run the forward passes of all micro-batches. The loss is then computed from all outputs of these passes.
A *scored column* is a column for whose tokens the model computes log-probabilities or values.

Invariant: the terms see each row of the mini-batch once, in the order of the row numbers, no matter which rank computed
the row. So neither the micro-batch nor the layout changes the result of a term. The gradient is computed by the chain
rule in two stages (arXiv:2101.06983, section 3.2). This module computes the gradient of the loss with respect to each
output of a forward pass. The backward pass of each micro-batch then computes the gradient of these outputs with respect
to the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import distributed as dist

from ...backends.engine_protocols import Outputs
from ..data.columns import Array, ColumnData, concatenate, offsets_from_lengths
from . import object_collectives
from .loss import Value
from .packing import PreparedBatch

FIELDS = ("logp", "values", "entropy", "given")  # the fields of Outputs with respect to which terms are differentiated


@dataclass(frozen=True)
class _Part:
    """The rows that a rank contributes to a mini-batch.

    - `rows`: the numbers of the rows. `strange`: for each row, whether it contains a wrong value, such as nan.
    - `lengths`: for each scored column, the number of tokens of each row.
    - `columns`: the columns that terms read.
    - `pass_outputs`: for each field of `Outputs` and each scored column, the outputs of the rank's forward passes.
    """

    rows: Array
    strange: Array
    lengths: dict[str, Array]
    columns: dict[str, ColumnData]
    pass_outputs: dict[str, dict[str, ColumnData]]


class JointMiniBatch:
    """All rows of a mini-batch, gathered from the ranks of a process group.

    - `numbers`: the numbers of all rows, in ascending order. `prepared`: the prepared rows, in this order.
    - `outputs`: the outputs of the forward passes, as leaves of a separate autograd graph.
    - `has_wrong_row`: whether any row contains a wrong value, such as nan, so that values computed from all rows are
      wrong.

    The constructor is a collective. Each rank passes its own data:

    - `seen`: the rank's prepared rows, with only the columns that terms read. In these rows, `has_unknown_tokens` is
      true for every row that is known to be wrong.
    - `rows`: the numbers of the rank's rows.
    - `micro`: for each micro-batch, the positions of its rows among the rank's rows.
    - `outputs`: for each micro-batch, the outputs of the forward pass.

    In the methods, `rows` are positions among the rank's own rows.
    """

    def __init__(
        self,
        seen: PreparedBatch,
        rows: Array,
        micro: list[Array],
        outputs: list[Outputs],
        group: dist.ProcessGroup | None,
    ) -> None:
        fields = {name: [getattr(output, name) for output in outputs] for name in FIELDS}
        pass_outputs = {
            name: _by_column(seen, micro, values) for name, values in fields.items() if values[0] is not None
        }
        mine = _Part(rows, seen.has_unknown_tokens, seen.lengths, seen.columns, pass_outputs)
        parts = [mine] if group is None else object_collectives.all_gather(mine, group)
        all_rows = np.concatenate([part.rows for part in parts])
        order = np.argsort(all_rows)
        self.numbers = all_rows[order]
        self._mine = np.searchsorted(self.numbers, rows)
        self.prepared = PreparedBatch(
            contexts=[],
            scored={},
            masks={},
            columns={
                column: concatenate([part.columns[column] for part in parts]).take(order) for column in seen.columns
            },
            lengths={
                column: np.concatenate([part.lengths[column] for part in parts])[order] for column in seen.lengths
            },
            has_unknown_tokens=np.concatenate([part.strange for part in parts])[order],
        )
        joined = {
            name: torch.cat(
                [
                    torch.from_numpy(
                        concatenate([rank_part.pass_outputs[name][column] for rank_part in parts]).take(order).values
                    )
                    for column in seen.lengths
                ]
            )
            for name in pass_outputs
        }
        self.outputs = Outputs(**{name: values.requires_grad_() for name, values in joined.items()})
        self.has_wrong_row = bool(self.prepared.has_unknown_tokens.any()) or not all(
            bool(values.isfinite().all()) for values in joined.values()
        )

    def backward(self, value: Value, total: torch.Tensor) -> None:
        """Store the loss `value`; compute and store the gradient of `total`.

        `total` is the loss as one number for the mini-batch. The gradient is with respect to the outputs of the forward
        passes.
        """
        self._value = value
        leaves = {name: values for name, values in self.outputs._asdict().items() if values is not None}
        slopes = torch.autograd.grad(total, [*leaves.values()], materialize_grads=True)
        all_rows = np.arange(len(self.numbers))
        self._slopes = {
            name: {
                column: ColumnData(part.numpy(), offsets_from_lengths(self.prepared.lengths[column]))
                for column, part in self.prepared.split(all_rows, slope).items()
            }
            for name, slope in zip(leaves, slopes, strict=True)
        }

    def linearized_loss(self, outputs: Outputs, rows: Array) -> torch.Tensor:
        """Return a scalar that has the same gradient as the loss.

        The gradient is with respect to the weights. `outputs` is the output of a forward pass over the rows at the
        positions `rows`.
        """
        positions = self._mine[rows]
        total = torch.zeros(())
        for name, slopes in self._slopes.items():
            slope = torch.cat([torch.from_numpy(column.take(positions).values) for column in slopes.values()])
            values = getattr(outputs, name)
            total = total + (values * slope.to(values.device)).sum()
        return total

    def value_of_rows(self, rows: Array) -> Value:
        """Return some rows' loss, values of terms, and figures.

        A figure is a metric that a term reports. A figure without a value per token or per row is a figure of the whole
        mini-batch, and is returned unchanged.
        """
        lengths = next(iter(self.prepared.lengths.values()))
        positions = self._mine[rows]
        tokens = int(lengths.sum())

        def part(values: torch.Tensor) -> torch.Tensor:
            if values.shape[:1] == (tokens,):
                return torch.from_numpy(
                    ColumnData(values.detach().numpy(), offsets_from_lengths(lengths)).take(positions).values
                )
            return values.detach()[positions] if values.shape[:1] == (len(lengths),) else values.detach()

        terms = self._value.terms.items()
        figures = self._value.figures.items()
        return Value(
            part(self._value.loss),
            {name: part(value) for name, value in terms},
            {name: part(value) for name, value in figures},
        )


def _by_column(seen: PreparedBatch, micro: list[Array], pass_outputs: list[torch.Tensor]) -> dict[str, ColumnData]:
    """Join the outputs of forward passes; the keys of the result are scored columns.

    A scored column is a column for whose tokens the model computes log-probabilities or values. `micro` has the
    positions of the rows of each forward pass. The rows of the result are in the order of the prepared rows `seen`.
    """
    order = np.concatenate(micro)
    split = [seen.split(rows, values.detach().cpu()) for rows, values in zip(micro, pass_outputs, strict=True)]
    values = {column: torch.cat([part[column] for part in split]).numpy() for column in seen.lengths}
    return {
        column: ColumnData(joined, offsets_from_lengths(seen.lengths[column][order])).take(np.argsort(order))
        for column, joined in values.items()
    }
