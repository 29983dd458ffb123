"""Multi-turn responses while they grow: tokens of the policy and the environment.

Invariant: a response ends with tokens of the policy, and has at most `bound` tokens. A token of the environment has the
log-probability NaN, because it was not sampled. A log-probability of the policy that is not finite is stored as -inf.
"""

from __future__ import annotations

import numpy as np

from ..data.columns import Array, ColumnData, offsets_from_lengths


class Responses:
    """The responses of some rows, to which turns are appended.

    Methods identify a row by its position. Each response has room for `bound` tokens.
    """

    def __init__(self, rows: int, bound: int) -> None:
        self.bound = bound
        self.lengths = np.zeros(rows, np.int64)
        self._ids = np.zeros((rows, bound), np.int32)
        self._logps = np.full((rows, bound), np.nan, np.float32)
        self._written = np.zeros((rows, bound), bool)  # by the policy

    def __getitem__(self, row: int) -> Array:
        """Return the tokens that were appended to a row's response so far."""
        return self._ids[row, : self.lengths[row]]

    def append_sampled(self, rows: Array, tokens: list[Array], logps: list[Array]) -> None:
        """Append the tokens that the policy sampled for these rows."""
        for row, ids, logp in zip(rows, tokens, logps, strict=True):
            new = slice(self.lengths[row], self.lengths[row] + len(ids))
            self._ids[row, new] = ids
            self._logps[row, new] = logp
            self._written[row, new] = True
            self.lengths[row] += len(ids)

    def append_replies(self, rows: Array, tokens: list[Array]) -> Array:
        """Append the tokens that the environment replied for these rows.

        A reply is appended only if the response has room for the reply and for one more token of the policy. Returns
        the rows that had room.
        """
        fits = self.lengths[rows] + [len(ids) for ids in tokens] < self.bound
        for row, ids, fit in zip(rows, tokens, fits, strict=True):
            if fit:
                self._ids[row, self.lengths[row] : self.lengths[row] + len(ids)] = ids
                self.lengths[row] += len(ids)
        fitting: Array = rows[fits]
        return fitting

    def columns(self) -> tuple[ColumnData, ColumnData, ColumnData]:
        """Return the tokens, the log-probabilities, and a mask of the policy's tokens."""
        inside = np.arange(self.bound) < self.lengths[:, None]
        offsets = offsets_from_lengths(self.lengths)
        mask = self._written[inside]
        logps = self._logps[inside]
        logps[mask & ~np.isfinite(logps)] = -np.inf
        return ColumnData(self._ids[inside], offsets), ColumnData(logps, offsets), ColumnData(mask, offsets)
