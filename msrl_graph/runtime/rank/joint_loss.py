"""A loss with terms of the whole mini-batch: computed ahead of its micro-batches, from what all of them and all ranks
gave.

Invariant: the terms see each row of the mini-batch once, in the order of the rows' numbers, whoever computed it; so
neither the micro-batch nor the layout changes what they give. The gradient is the chain rule in two parts
(arXiv:2101.06983, section 3.2): here that of the loss at each number that a forward pass gave, and in each micro-batch
that of those numbers at the weights, by which it goes on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import distributed as dist

from ...backends.spec import Outputs
from ..data.columns import Array, ColumnData, concatenate, offsets_of
from . import object_collectives
from .loss import Value
from .packing import PreparedBatch

FIELDS = ("logp", "values", "entropy", "given")  # of Outputs, what terms are differentiable at


@dataclass(frozen=True)
class _Part:
    """What a rank brings: its rows, which of them are wrong, how many tokens of each scored column they have, what
    columns hold, and by field and scored column what forward passes gave."""

    rows: Array
    strange: Array
    lengths: dict[str, Array]
    columns: dict[str, ColumnData]
    made: dict[str, dict[str, ColumnData]]


class JointMiniBatch:
    """The rows of a mini-batch that all ranks of a group hold together: by position their `numbers`, ascending, what is
    `seen` of them, and what forward passes gave, `outputs`, as leaves of a graph of their own. `spoilt` says that one
    is wrong, and so what is computed of all.

    It begins with what a rank has, as a collective: `seen` with the columns that terms read and, as `strange`, the rows
    that are known to be wrong; and the `outputs` of its micro-batches `micro`. Positions that the methods take are
    those of the rank's own rows."""

    def __init__(
        self,
        seen: PreparedBatch,
        rows: Array,
        micro: list[Array],
        outputs: list[Outputs],
        group: dist.ProcessGroup | None,
    ) -> None:
        given = {name: [getattr(o, name) for o in outputs] for name in FIELDS}
        made = {name: _by_column(seen, micro, values) for name, values in given.items() if values[0] is not None}
        mine = _Part(rows, seen.strange, seen.lengths, seen.columns, made)
        parts = [mine] if group is None else object_collectives.all_gather(mine, group)
        everyone = np.concatenate([part.rows for part in parts])
        order = np.argsort(everyone)
        self.numbers = everyone[order]
        self._mine = np.searchsorted(self.numbers, rows)
        self.seen = PreparedBatch(
            contexts=[],
            scored={},
            masks={},
            columns={c: concatenate([part.columns[c] for part in parts]).take(order) for c in seen.columns},
            lengths={c: np.concatenate([part.lengths[c] for part in parts])[order] for c in seen.lengths},
            strange=np.concatenate([part.strange for part in parts])[order],
        )
        whole = {
            name: torch.cat(
                [
                    torch.from_numpy(concatenate([p.made[name][c] for p in parts]).take(order).values)
                    for c in seen.lengths
                ]
            )
            for name in made
        }
        self.outputs = Outputs(**{name: values.requires_grad_() for name, values in whole.items()})
        self.spoilt = bool(self.seen.strange.any()) or not all(
            bool(values.isfinite().all()) for values in whole.values()
        )

    def back(self, found: Value, total: torch.Tensor) -> None:
        """Takes the loss of the rows, and what it comes to."""
        self._found = found
        leaves = {name: values for name, values in self.outputs._asdict().items() if values is not None}
        slopes = torch.autograd.grad(total, [*leaves.values()], materialize_grads=True)
        everyone = np.arange(len(self.numbers))
        self._slopes = {
            name: {
                c: ColumnData(part.numpy(), offsets_of(self.seen.lengths[c]))
                for c, part in self.seen.split(everyone, slope).items()
            }
            for name, slope in zip(leaves, slopes, strict=True)
        }

    def linear(self, made: Outputs, rows: Array) -> torch.Tensor:
        """What has the gradient of the loss at what a forward pass over these rows gave."""
        at = self._mine[rows]
        total = torch.zeros(())
        for name, slopes in self._slopes.items():
            slope = torch.cat([torch.from_numpy(column.take(at).values) for column in slopes.values()])
            values = getattr(made, name)
            total = total + (values * slope.to(values.device)).sum()
        return total

    def found(self, rows: Array) -> Value:
        """The loss of these rows, and what terms tell; figures that are of no token or row are those of all."""
        lengths = next(iter(self.seen.lengths.values()))
        at = self._mine[rows]
        tokens = int(lengths.sum())

        def part(values: torch.Tensor) -> torch.Tensor:
            if values.shape[:1] == (tokens,):
                return torch.from_numpy(ColumnData(values.detach().numpy(), offsets_of(lengths)).take(at).values)
            return values.detach()[at] if values.shape[:1] == (len(lengths),) else values.detach()

        of = self._found.terms.items()
        told = self._found.figures.items()
        return Value(part(self._found.loss), {k: part(v) for k, v in of}, {k: part(v) for k, v in told})


def _by_column(seen: PreparedBatch, micro: list[Array], made: list[torch.Tensor]) -> dict[str, ColumnData]:
    """By scored column, what forward passes gave of each row's tokens."""
    order = np.concatenate(micro)
    split = [seen.split(rows, values.detach().cpu()) for rows, values in zip(micro, made, strict=True)]
    values = {c: torch.cat([part[c] for part in split]).numpy() for c in seen.lengths}
    return {c: ColumnData(v, offsets_of(seen.lengths[c][order])).take(np.argsort(order)) for c, v in values.items()}
