"""From rows of the dock to what a model sees of them, and to tensors that terms of a loss read.

Invariant: token ids go through unchanged, and columns of numbers keep their values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ...ir import graph as ir
from ...ir.graph import Graph, Node
from ...ir.sequences import as_drawn, beginnings, heating, sequences
from ..data import numerics
from ..data.columns import DTYPES, Array, ColumnData, offsets_of
from ..dock.messages import Batch


@dataclass(frozen=True)
class PreparedBatch:
    """The rows of a batch as a model sees them.

    - `contexts` and `scored`: the token columns that stand before, and those whose tokens are scored; `columns`: what
      else is read beside them, by name.
    - `masks`: of a scored column the mask that is read with it. Tokens that it leaves out are context only: `lengths`
      does not count them, and columns with a value a token hold the values of the other tokens.
    - `strange`: the rows that hold tokens which the model does not know.
    - `begins`: of a scored column that holds several conversations at which tokens these begin.
    """

    contexts: list[ColumnData]
    scored: dict[str, ColumnData]
    masks: dict[str, ColumnData]
    columns: dict[str, ColumnData]
    lengths: dict[str, Array]
    strange: Array
    begins: Mapping[str, ColumnData] = field(default_factory=dict)

    @property
    def size(self) -> Array:
        """Tokens of each row."""
        total: Array = np.sum([c.lengths for c in (*self.contexts, *self.scored.values())], axis=0)
        return total

    def split(self, rows: Array, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """By scored column, what a forward pass over these rows gave of its tokens."""
        return dict(
            zip(self.lengths, torch.split(values, [int(n[rows].sum()) for n in self.lengths.values()]), strict=True)
        )


def given(graph: Graph, node: Node, batch: Batch, vocabulary: int, like: dict[str, str]) -> PreparedBatch:
    """What a node's model sees of a batch; `like` says of undeclared columns whose length they have."""
    read = sequences(graph, node)
    declared = {c.name: c for c in graph.columns}
    like = like | {name: column.dims[0].like for name, column in declared.items() if column.dims}
    # A group without rows has no columns either.
    columns = {c: _empty(declared[c]) for c in node.reads if c in declared}
    states = (*node.states, *map(as_drawn, heating(graph, node)))
    columns |= {s: ColumnData(np.zeros(0)) for s in states} | batch.columns
    names = [*read.context, *read.scored]
    tokens, strange = numerics.known_tokens([columns.pop(c) for c in names], vocabulary)
    found = dict(zip(names, tokens, strict=True))
    held = {c: columns.pop(name, None) for c, name in beginnings(graph, node).items()}
    begins = {c: column for c, column in held.items() if column is not None}  # a group without rows has none
    masks: dict[str, ColumnData] = {}
    for name in [c for c in columns if c in declared and declared[c].element == "bool" and like.get(c) in read.scored]:
        mask = columns.pop(name)
        other = masks.get(like[name])
        masks[like[name]] = mask if other is None else replace(mask, values=mask.values & other.values)
    columns = {name: kept(column, masks.get(like.get(name, ""))) for name, column in columns.items()}
    lengths = {c: kept(found[c], masks.get(c)).lengths for c in read.scored}
    contexts = [found[c] for c in read.context]
    scored = {c: found[c] for c in read.scored}
    return PreparedBatch(contexts, scored, masks, columns, lengths, strange, begins)


def _empty(column: ir.Column) -> ColumnData:
    values: Array = np.zeros((0, *(d.size for d in column.dims[1:])), DTYPES[column.element])
    return ColumnData(values, offsets_of(np.zeros(0, np.int64)) if column.dims or column.element == "text" else None)


def kept(column: ColumnData, mask: ColumnData | None) -> ColumnData:
    """What a mask leaves of a column."""
    if mask is None:
        return column
    row = np.repeat(np.arange(len(column)), column.lengths)
    return ColumnData(column.values[mask.values], offsets_of(np.bincount(row[mask.values], minlength=len(column))))


def flat(column: ColumnData, rows: Array, lengths: Array | None = None) -> torch.Tensor:
    """A ragged column end to end, one value (or row of values) a token; of a scalar column the value of each row, given
    to each of its tokens where `lengths` says how many there are. Floats in float32, ids in int64."""
    some = column.take(rows)
    values = some.values if some.offsets is not None or lengths is None else np.repeat(some.values, lengths)
    return torch.from_numpy(values.astype(np.int64 if values.dtype.kind == "i" else np.float32, copy=False))


def distinct(rows: Sequence[Array], groups: Array) -> tuple[int, int]:
    """How many different beginnings rows have, which is how many tokens there are to compute where rows share them, and
    how many rows differ, in each group: the responses to a prompt, or all prompts. `groups` says whose each row is."""
    lengths = np.array([len(r) for r in rows], np.int64)
    tokens = np.zeros((len(rows), int(lengths.max(initial=0)) + 1), np.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    base = int(tokens.max(initial=0)) + 1
    live = np.arange(len(rows))
    parent = np.unique(groups, return_inverse=True)[1]
    beginnings = ended = 0
    for column in range(tokens.shape[1]):
        over = lengths[live] == column
        ended += len(np.unique(parent[over]))
        live = live[~over]
        parent = parent[~over]
        if len(np.unique(parent)) == len(live):  # nothing is alike any more
            return beginnings + int((lengths[live] - column).sum()), ended + len(live)
        _, parent = np.unique(parent * base + tokens[live, column], return_inverse=True)
        beginnings += int(parent.max(initial=-1)) + 1
    return beginnings, ended
