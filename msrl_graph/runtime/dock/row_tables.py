"""What a controller knows of rows by number, and which rows pass the filters.

Invariant: pure functions of the received news. A row is *known* when every filter before it has decided that it
continues. It stays known: more news only turns unknown rows into known ones, or removes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ...ir.rowsets import Numbers, Sieve, chain, common
from ..data.columns import Array


class RowTable:
    """A number for each row, by the row's number; `empty` if none was set.

    Row numbers of repeats (rowsets.py) are far beyond `size`: row 3 of 8 has the repeats 11, 19, … So the table
    consists of blocks of `size` numbers, each made when its first row comes: block 0 for the rows themselves, block 1
    for the first repeat of each, and so on.
    """

    def __init__(self, size: int, empty: int) -> None:
        self.size = max(size, 1)
        self.empty = empty
        self.blocks: dict[int, Array] = {0: np.full(self.size, empty, np.int64)}

    def set(self, rows: Array, values: Array | int) -> None:
        for block, positions in self._blocks(rows):
            if block not in self.blocks:
                self.blocks[block] = np.full(self.size, self.empty, np.int64)
            self.blocks[block][rows[positions] - block * self.size] = (
                values if isinstance(values, int) else values[positions]
            )

    def get(self, rows: Array) -> Array:
        if self._plain(rows):
            return np.asarray(self.blocks[0][rows])
        out = np.full(len(rows), self.empty, np.int64)
        for block, positions in self._blocks(rows):
            if block in self.blocks:
                out[positions] = self.blocks[block][rows[positions] - block * self.size]
        return out

    def _plain(self, rows: Array) -> bool:
        """Return whether none of these rows is a repeat."""
        return not len(rows) or bool(rows.max() < self.size)

    def _blocks(self, rows: Array) -> list[tuple[int, Array | slice]]:
        if self._plain(rows):
            return [(0, slice(None))]
        blocks = rows // self.size
        return [(int(block), np.flatnonzero(blocks == block)) for block in np.unique(blocks)]


def enumerate_rows(
    numbers: Numbers, end: int, prompts: Array, sieves: Sequence[Sieve], verdicts: Mapping[str, RowTable]
) -> tuple[Array, Array]:
    """List the rows of set `end` under some prompts that filters have not dropped.

    Also returns which of them are known to stay. The function walks from the prompts down to the set: a generation
    makes `fan` rows of each row, a filter drops rows whose verdict is 0, a `select` repeats rows whose verdict is 2 or
    more. A row without a verdict stays, but is not known. For 2 prompts with 2 responses each and the verdicts 1, 0, 1
    and none for the responses 0 to 3, the rows are [0, 2, 3], known [True, True, False].
    """
    rows = prompts
    known = np.ones(len(prompts), bool)
    path = chain(numbers.sets, end)[::-1]
    for row_set, next_set in zip(path, [*path[1:], -1], strict=True):
        if row_set and not numbers.sets[row_set].repeats:
            fan = numbers.fans[row_set]
            rows = (rows[:, None] * fan + np.arange(fan)).reshape(-1)
            known = np.repeat(known, fan)
        # A `select` turns rows into other rows, so filters that choose from these rows come before it, wherever it is
        # in the graph.
        for sieve in sorted(
            (candidate for candidate in sieves if candidate.rows == row_set),
            key=lambda candidate: candidate.remaining != row_set,
        ):
            times = verdicts[sieve.column].get(rows)
            if sieve.remaining == row_set:
                stay = times != 0
                rows = rows[stay]
                known = (known & (times > 0))[stay]
            elif sieve.remaining == next_set:
                # For a row without a verdict, one row represents all of its repeats.
                count = np.where(times < 0, 1, times)
                first = np.cumsum(count) - count
                repeat = np.arange(int(count.sum())) - np.repeat(first, count)
                rows = np.repeat(rows, count) + repeat * numbers.space[row_set]
                known = np.repeat(known & (times >= 0), count)
    for sieve in sieves:
        # A filter of rows that are not above these: a row stays if any row of the filter under the row above both
        # stays.
        if sieve.remaining in path:
            continue
        meeting = common(numbers.sets, sieve.remaining, end)
        filter_rows, filter_known = enumerate_rows(
            numbers,
            sieve.remaining,
            prompts,
            [candidate for candidate in sieves if candidate.remaining in chain(numbers.sets, sieve.remaining)],
            verdicts,
        )
        above = numbers.above(filter_rows, sieve.remaining, meeting)
        meeting_rows = numbers.above(rows, end, meeting)
        alive = np.isin(meeting_rows, above[filter_known])
        possible = np.isin(meeting_rows, above)
        rows = rows[possible]
        known = (known & alive)[possible]
    return rows, known


def first_prompts(alive: Array, open_: Array, count: int) -> tuple[Array, Array, int]:
    """Find the first `count` prompts, in order, that keep any row, as far as is known.

    For each prompt, `alive` means that some row surely stays, and `open_` that some row is undecided. Returns for each
    prompt whether it is one of the first `count` and whether that is decided, and the number found so far. With count =
    2, and rows left of the prompts 0, 2 and 3, the prompts 0 and 2 are the first. If any row of prompt 1 is undecided,
    only prompt 0 is decided.
    """
    decided = np.logical_and.accumulate(alive | ~open_)  # one row that stays is enough to keep the prompt
    rank = np.cumsum(alive & decided)
    found_count = int(rank[-1]) if len(rank) else 0
    return alive & decided & (rank <= count), decided | (found_count >= count), min(found_count, count)
