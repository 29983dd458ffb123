"""Micro-batches for engines: tensors by name.

Invariant: only this module makes micro-batches from rows. Token ids are not changed. A sequence consists of the context
columns of a row, in order, and then one scored column of the row (a column for whose tokens the model computes
log-probabilities or values). backends/engine_protocols.py describes the tensors. The tensors are on the host: an engine
copies them to its device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tensordict import TensorDict

from ...backends.engine_protocols import MicroBatch
from ..data.columns import Array, ColumnData, offsets_from_lengths


def pack(
    contexts: Sequence[ColumnData],
    scored: Sequence[ColumnData],
    rows: Array,
    masks: Sequence[ColumnData | None] = (),
    after: bool = False,
    begins: Sequence[ColumnData | None] = (),
) -> MicroBatch:
    """Pack the rows at positions `rows` into one micro-batch.

    A token is *requested* if the engine must compute its log-probability or value.

    - `contexts`, `scored`: a sequence is a row's context, followed by the row's tokens of one scored column. All
      sequences of the first scored column come first, then all sequences of the next one. Without scored columns, a
      sequence is the context alone, and its last position is requested.
    - `begins`: for a scored column whose rows consist of several conversations, true at the first token of each
      conversation. Each conversation is then a sequence of its own, after the context.
    - `masks`: only tokens whose mask is true are requested.
    - `after`: if false, the result of a token comes from the position before the token, which predicts the token. If
      true, the result comes from the token's own position, so that the result of the last token depends on the whole
      sequence.

    If `rows` is empty, the result is one sequence of one token, and no token is requested. So a rank without work can
    still take part in collectives.
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
        # No token precedes the first one of a sequence. In an agent's conversation, that token is not sampled or used.
        position = position.clip(min=0)
        token = column.take(rows).values[selected].astype(np.int64)
        requested.append((len(pieces) + sequence[selected], position[selected], token))
        # The last token of a sequence predicts no requested token, so the model reads it only if `after` is true.
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
    return TensorDict(tensors, batch_size=[])


def _sequences(column: ColumnData, rows: Array, begins: ColumnData | None) -> tuple[Array, Array, Array]:
    """Return each token's row, the start of its sequence, and its sequence's number.

    The row is a position in `rows`. The start is the index of the sequence's first token among all tokens. The
    sequences (one for each row, or one for each conversation of a row) are numbered from 0.
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
