"""Tables with one number per row, and the search for rows that pass the filters.

Invariant: all results are pure functions of the received news. A row is *known* when every filter before the node has
decided that the row continues. More news never makes a known row unknown: news only turns unknown rows into known ones,
or removes unknown rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ...analysis.rowsets import Numbers, Sieve, chain, common
from ..data.columns import Array


class RowTable:
    """A table from row numbers to integers; `empty` is the value of all unset rows.

    A repeat (a copy of a row that a `select` makes, analysis/rowsets.py) has a number beyond `size`: with a size of 8,
    the repeats of row 3 have the numbers 11, 19, … Therefore the table consists of blocks of `size` numbers. A block is
    allocated when its first row is set. Block 0 is for the rows themselves, block 1 for the first repeat of each row,
    and so on.
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
    """List the rows that no filter has dropped, in row set `end` and below `prompts`.

    Returns the rows, and for each row whether it is known that the row continues. The function goes down from the set
    of prompts to `end`, the index of a row set (analysis/rowsets.py):

    - A generation makes `fan` rows of each row.
    - A filter drops each row whose verdict is 0.
    - A `select` repeats each row whose verdict is 2 or more.
    - A row without a verdict remains, but is not known to continue.

    Example: 2 prompts have 2 responses each. The verdicts on the responses 0 to 2 are 1, 0 and 1, and response 3 has no
    verdict. The rows are [0, 2, 3], and the second result is [True, True, False].
    """
    rows = prompts
    known = np.ones(len(prompts), bool)
    path = chain(numbers.sets, end)[::-1]
    for row_set, next_set in zip(path, [*path[1:], -1], strict=True):
        if row_set and not numbers.sets[row_set].repeats:
            fan = numbers.fans[row_set]
            rows = (rows[:, None] * fan + np.arange(fan)).reshape(-1)
            known = np.repeat(known, fan)
        # A `select` turns the rows of this set into rows of another set. So filters that choose from the rows of this
        # set are applied before the `select`, wherever the `select` is in the graph.
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
        # The filter chooses from rows that are not above the rows of `end`. Both sets have a common set above them. A
        # row of `end` continues if, below its row in the common set, any row of the filter continues.
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
    """Find the first `count` prompts, in order, that have a row after the filters.

    For each prompt, `alive` means that some row is known to continue, and `open_` means that a filter has not yet
    decided on some row. Returns:

    - for each prompt, whether it is one of the first `count`,
    - for each prompt, whether the first result is final,
    - how many of the first `count` prompts were found.

    Example with count = 2: if only the prompts 0, 2 and 3 have rows left, the first two are 0 and 2. But if prompt 1
    has an undecided row and no row that is known to continue, the results for all prompts after prompt 0 are not final.
    """
    decided = np.logical_and.accumulate(alive | ~open_)  # one row that continues is enough for the prompt
    rank = np.cumsum(alive & decided)
    found_count = int(rank[-1]) if len(rank) else 0
    return alive & decided & (rank <= count), decided | (found_count >= count), min(found_count, count)
