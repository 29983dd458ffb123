"""Micro-batches, as engines take them: tensors by name, made of rows here and nowhere else.

Invariant: token ids go through unchanged; a sequence is the context columns of its row, in order, then one scored
column of it. What backends/spec.py says of a micro-batch's tensors holds. They lie on the host: an engine takes them to
its device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from tensordict import TensorDict

from ..data.columns import Array, ColumnData, offsets_of


class MicroBatches(Sequence[TensorDict]):
    """The micro-batches of a batch, by the positions of their rows; each is made when it is asked for, so that there is
    one at a time."""

    def __init__(self, rows: list[Array], make: Callable[[Array], TensorDict]) -> None:
        self.rows = rows
        self.make = make

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> TensorDict:  # type: ignore[override]
        return self.make(self.rows[i])


def pack(
    contexts: Sequence[ColumnData],
    scored: Sequence[ColumnData],
    rows: Array,
    masks: Sequence[ColumnData | None] = (),
    after: bool = False,
    begins: Sequence[ColumnData | None] = (),
    **more: torch.Tensor | None,
) -> TensorDict:
    """The rows at positions `rows`: of each the context, then one of the scored columns, a sequence for each of these,
    one column after another; where there is none, the context alone, scored as a whole. Of a column that holds several
    conversations, where it `begins` says, each is a sequence of its own after the context. Of a column with a mask only
    the tokens where it is true are asked for. A token is asked for at the position before it, which predicts it; with
    `after` at its own, so that the last one's is that of the whole sequence. No rows give one sequence of one token and
    ask for nothing, so that a rank without work can still take part in collectives. `more` is of each token that is
    asked for."""
    begin = [np.concatenate([c[r] for c in contexts] or [np.zeros(0, np.int64)]) for r in rows]
    before = np.array([len(b) for b in begin], np.int64)
    pieces: list[Array] = []
    asked: list[tuple[Array, ...]] = []
    none: list[ColumnData | None] = [None] * len(scored)
    for column, mask, starts in zip(scored, masks or none, begins or none, strict=True):
        row, first, sequence = _sequences(column, rows, starts)
        position = before[row] - (not after) + np.arange(len(row)) - first
        kept = slice(None) if mask is None else mask.take(rows).values
        # Before what begins a sequence nothing stands: of an agent's conversation, nobody's word, it says nothing.
        position = position.clip(min=0)
        token = column.take(rows).values[kept].astype(np.int64)
        asked.append((len(pieces) + sequence[kept], position[kept], token))
        # The last token of a sequence predicts nothing that is asked for, so it is fed only where it is scored itself.
        fed = slice(None if after else -1)
        for context, r in zip(begin, rows, strict=True):
            parts = [column[r]] if starts is None else np.split(column[r], np.flatnonzero(starts[r][1:]) + 1)
            pieces += [np.concatenate([context, part[fed]]) for part in parts]
    if not scored:
        pieces = begin
        asked = [(np.arange(len(rows)), before - 1, np.zeros(len(rows), np.int64))]
    pieces = pieces or [np.zeros(1, np.int64)]
    sequences = {"ids": np.concatenate(pieces).astype(np.int64), "offsets": offsets_of(np.array([*map(len, pieces)]))}
    tokens = dict(zip(("row", "position", "token"), map(np.concatenate, zip(*asked, strict=True)), strict=True))
    made = {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in (sequences | tokens).items()}
    return TensorDict(made | {name: tensor for name, tensor in more.items() if tensor is not None}, batch_size=[])


def _sequences(column: ColumnData, rows: Array, begins: ColumnData | None) -> tuple[Array, Array, Array]:
    """Of each token of some rows its row, by place, the token that its sequence begins with, and the number of that
    sequence: one for each row, or for each of its conversations."""
    lengths = column.lengths[rows]
    row = np.repeat(np.arange(len(rows)), lengths)
    opens = np.arange(len(row)) == np.repeat(np.cumsum(lengths) - lengths, lengths)
    if begins is not None:
        opens |= begins.take(rows).values
    each = np.bincount(row[opens], minlength=len(rows))
    number = np.cumsum(opens) - 1
    empty = np.cumsum(each == 0)  # rows without tokens are sequences too
    first: Array = np.flatnonzero(opens)[number]
    return row, first, number + empty[row]
