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

import numpy as np
import torch
from torch import distributed as dist

from ...backends.engine_protocols import Outputs
from ..data.columns import Array, ColumnData, concatenate, offsets_from_lengths
from . import object_collectives
from .loss import Value
from .packing import PreparedBatch

FIELDS = ("logp", "values", "entropy", "given")  # the fields of Outputs with respect to which terms are differentiated


class JointMiniBatch:
    """All rows of a mini-batch, gathered from the ranks of a process group.

    - `prepared`: the rows, in ascending order of their numbers, with only the columns that terms read.
    - `outputs`: the outputs of the forward passes, as leaves of a separate autograd graph.
    - `has_wrong_row`: whether any row contains a wrong value, such as nan, so that values computed from all rows are
      wrong.

    The constructor is a collective. Each rank passes its own prepared rows, with only the columns that terms read, and
    for each of its micro-batches the output of the forward pass.

    In the methods, `rows` are positions among the rank's own rows.
    """

    def __init__(self, own: PreparedBatch, outputs: list[Outputs], group: dist.ProcessGroup | None) -> None:
        fields = {name: [getattr(output, name) for output in outputs] for name in FIELDS}
        own_outputs = {name: _by_column(own, values) for name, values in fields.items() if values[0] is not None}
        mine = (PreparedBatch(own.rows, own.columns, own.lengths, own.wrong), own_outputs)
        parts = [mine] if group is None else object_collectives.all_gather(mine, group)
        batches = [batch for batch, _ in parts]
        order = np.argsort(np.concatenate([batch.rows for batch in batches]))
        self.prepared = PreparedBatch(
            np.concatenate([batch.rows for batch in batches])[order],
            {name: concatenate([batch.columns[name] for batch in batches]).take(order) for name in own.columns},
            {name: np.concatenate([batch.lengths[name] for batch in batches])[order] for name in own.lengths},
            np.concatenate([batch.wrong for batch in batches])[order],
        )
        self._mine = np.searchsorted(self.prepared.rows, own.rows)
        joined = {
            name: torch.cat(
                [
                    torch.from_numpy(
                        concatenate([pass_outputs[name][column] for _, pass_outputs in parts]).take(order).values
                    )
                    for column in own.lengths
                ]
            )
            for name in own_outputs
        }
        self.outputs = Outputs(**{name: values.requires_grad_() for name, values in joined.items()})
        self.has_wrong_row = bool(self.prepared.wrong.any()) or not all(
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
        all_rows = np.arange(len(self.prepared.rows))
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

        terms = {name: part(value) for name, value in self._value.terms.items()}
        figures = {name: part(value) for name, value in self._value.figures.items()}
        return Value(part(self._value.loss), terms, figures)


def _by_column(own: PreparedBatch, pass_outputs: list[torch.Tensor]) -> dict[str, ColumnData]:
    """Join the outputs of forward passes; the keys of the result are scored columns.

    The rows of the result are in the order of the prepared rows.
    """
    order = own.order
    split = [own.split(rows, values.detach().cpu()) for rows, values in zip(own.micro, pass_outputs, strict=True)]
    values = {column: torch.cat([part[column] for part in split]).numpy() for column in own.lengths}
    return {
        column: ColumnData(joined, offsets_from_lengths(own.lengths[column][order])).take(np.argsort(order))
        for column, joined in values.items()
    }
