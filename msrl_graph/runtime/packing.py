"""From rows of the dock to tensors of a micro-batch.

Invariant: token ids go through unchanged; a row is its context columns, in order, then its response.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..engine import Packed
from .columns import Array, Column


def pack(contexts: Sequence[Column], response: Column, rows: Array) -> Packed:
    """The rows at positions `rows`, padded at the right. No rows give one row of one token and no response, so that a rank without
    work can still take part in collectives."""
    lengths = np.array([len(response[r]) for r in rows], np.int64)
    # The last token of a row predicts nothing that is asked for, so it is not fed.
    pieces = [np.concatenate([c[r] for c in contexts] + [response[r][:-1]]) for r in rows]
    ids = np.zeros((max(len(pieces), 1), max((len(p) for p in pieces), default=1)), np.int64)
    for i, piece in enumerate(pieces):
        ids[i, : len(piece)] = piece
    first = np.array([sum(len(c[r]) for c in contexts) for r in rows], np.int64) - 1
    row = np.repeat(np.arange(len(pieces)), lengths)
    position = np.repeat(first, lengths) + np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    token = response.take(rows).values.astype(np.int64)
    return Packed(*(torch.from_numpy(np.ascontiguousarray(a)) for a in (ids, row, position, token)))


def flat(column: Column, rows: Array, lengths: Array) -> torch.Tensor:
    """One float value a response token: a ragged column end to end, or a scalar given to every token of its row."""
    some = column.take(rows)
    values = some.values if some.offsets is not None else np.repeat(some.values, lengths)
    return torch.from_numpy(values.astype(np.float32, copy=False))


def distinct(rows: Sequence[Array], fan: int) -> tuple[int, int]:
    """How many different beginnings rows have, which is how many tokens there are to compute where rows share them, and how many rows
    differ; in each `fan` rows in turn: the responses to one prompt, or as many prompts as there are."""
    lengths = np.array([len(r) for r in rows], np.int64)
    tokens = np.zeros((len(rows), int(lengths.max(initial=0)) + 1), np.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    base = int(tokens.max(initial=0)) + 1
    live, parent = np.arange(len(rows)), np.arange(len(rows)) // fan
    beginnings = ended = 0
    for column in range(tokens.shape[1]):
        over = lengths[live] == column
        ended += len(np.unique(parent[over]))
        live, parent = live[~over], parent[~over]
        if len(np.unique(parent)) == len(live):  # nothing is alike any more
            return beginnings + int((lengths[live] - column).sum()), ended + len(live)
        _, parent = np.unique(parent * base + tokens[live, column], return_inverse=True)
        beginnings += int(parent.max(initial=-1)) + 1
    return beginnings, ended
