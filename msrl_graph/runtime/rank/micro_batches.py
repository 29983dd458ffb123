"""Micro-batches as engines take them: tensors by name.

Invariant: only this module makes them from rows. Token ids go through unchanged; a sequence is the context columns of
its row, in order, then one scored column of it. The tensors are as backends/spec.py describes them. They are on the
host: an engine copies them to its device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from tensordict import TensorDict

from ..data.columns import Array, ColumnData, offsets_from_lengths


class MicroBatches(Sequence[TensorDict]):
    """The micro-batches of a batch, by the positions of their rows.

    Each is made when it is read, so only one exists at a time.
    """

    def __init__(self, rows: list[Array], make: Callable[[Array], TensorDict]) -> None:
        self.rows = rows
        self.make = make

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> TensorDict:  # type: ignore[override]
        return self.make(self.rows[index])


def pack(
    contexts: Sequence[ColumnData],
    scored: Sequence[ColumnData],
    rows: Array,
    masks: Sequence[ColumnData | None] = (),
    after: bool = False,
    begins: Sequence[ColumnData | None] = (),
    **extra: torch.Tensor | None,
) -> TensorDict:
    """Pack the rows at positions `rows` into one micro-batch.

    - A sequence is a row's context and then one of the scored columns. The sequences of a column follow each other,
      then those of the next column. Without scored columns a sequence is the context alone, scored as a whole.
    - `begins`: a column may have several conversations; each begins where this is true, and is a sequence of its own
      after the context.
    - `masks`: only the tokens where the mask is true are requested.
    - `after`: a token is requested at the position before it, which predicts it; with `after` at its own position, so
      that the last one's result is that of the whole sequence.
    - `extra`: values for each requested token.

    Without rows the result is one sequence of one token with nothing requested, so that a rank without work can still
    take part in collectives.
    """
    prefixes = [
        np.concatenate([context_values[index] for context_values in contexts] or [np.zeros(0, np.int64)])
        for index in rows
    ]
    prefix_lengths = np.array([len(prefix) for prefix in prefixes], np.int64)
    pieces: list[Array] = []
    requested: list[tuple[Array, ...]] = []
    none: list[ColumnData | None] = [None] * len(scored)
    for column, mask, starts in zip(scored, masks or none, begins or none, strict=True):
        row, first, sequence = _sequences(column, rows, starts)
        position = prefix_lengths[row] - (not after) + np.arange(len(row)) - first
        selected = slice(None) if mask is None else mask.take(rows).values
        # The first token of a sequence has none before it. In an agent's conversation it is not sampled, so not used.
        position = position.clip(min=0)
        token = column.take(rows).values[selected].astype(np.int64)
        requested.append((len(pieces) + sequence[selected], position[selected], token))
        # The last token of a sequence predicts nothing that is requested, so it is fed only if it is scored itself.
        fed = slice(None if after else -1)
        for context, index in zip(prefixes, rows, strict=True):
            parts = (
                [column[index]] if starts is None else np.split(column[index], np.flatnonzero(starts[index][1:]) + 1)
            )
            pieces += [np.concatenate([context, part[fed]]) for part in parts]
    if not scored:
        pieces = prefixes
        requested = [(np.arange(len(rows)), prefix_lengths - 1, np.zeros(len(rows), np.int64))]
    pieces = pieces or [np.zeros(1, np.int64)]
    sequences = {
        "ids": np.concatenate(pieces).astype(np.int64),
        "offsets": offsets_from_lengths(np.array([*map(len, pieces)])),
    }
    tokens = dict(zip(("row", "position", "token"), map(np.concatenate, zip(*requested, strict=True)), strict=True))
    tensors = {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in (sequences | tokens).items()}
    return TensorDict(tensors | {name: tensor for name, tensor in extra.items() if tensor is not None}, batch_size=[])


def _sequences(column: ColumnData, rows: Array, begins: ColumnData | None) -> tuple[Array, Array, Array]:
    """Return for each token of some rows its row, sequence start and sequence.

    The row is its place in `rows`; the start is the sequence's first token. Sequences are numbered, one for each row or
    for each of its conversations.
    """
    lengths = column.lengths[rows]
    row = np.repeat(np.arange(len(rows)), lengths)
    opens = np.arange(len(row)) == np.repeat(np.cumsum(lengths) - lengths, lengths)
    if begins is not None:
        opens |= begins.take(rows).values
    counts = np.bincount(row[opens], minlength=len(rows))
    number = np.cumsum(opens) - 1
    empty = np.cumsum(counts == 0)  # rows without tokens are sequences too
    first: Array = np.flatnonzero(opens)[number]
    return row, first, number + empty[row]
