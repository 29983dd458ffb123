"""What a controller knows of rows by their number, and which rows there are, as far as filters have said.

Invariant: pure functions of what was heard; a row is *known* when every filter before it has said that it goes on, and
stays known: more news only turn unknown rows into known ones, or take them away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ...ir.rowsets import Numbers, Sieve, chain, common
from ..data.columns import Array


class RowTable:
    """A number for each row, by the row's number, `empty` where none was set.

    Row numbers of repeats (rowsets.py) are far beyond `size`: row 3 of 8 has repeats 11, 19, … So the table is kept
    in blocks of `size` numbers, made when the first row of theirs comes: block 0 for the rows themselves, block 1 for
    the first repeat of each, and so on.
    """

    def __init__(self, size: int, empty: int) -> None:
        self.size = max(size, 1)
        self.empty = empty
        self.blocks: dict[int, Array] = {0: np.full(self.size, empty, np.int64)}

    def set(self, rows: Array, values: Array | int) -> None:
        for block, some in self._blocks(rows):
            if block not in self.blocks:
                self.blocks[block] = np.full(self.size, self.empty, np.int64)
            self.blocks[block][rows[some] - block * self.size] = values if isinstance(values, int) else values[some]

    def get(self, rows: Array) -> Array:
        if self._plain(rows):
            return np.asarray(self.blocks[0][rows])
        out = np.full(len(rows), self.empty, np.int64)
        for block, some in self._blocks(rows):
            if block in self.blocks:
                out[some] = self.blocks[block][rows[some] - block * self.size]
        return out

    def _plain(self, rows: Array) -> bool:
        """Whether none of these rows repeats another."""
        return not len(rows) or bool(rows.max() < self.size)

    def _blocks(self, rows: Array) -> list[tuple[int, Array | slice]]:
        if self._plain(rows):
            return [(0, slice(None))]
        blocks = rows // self.size
        return [(int(b), np.flatnonzero(blocks == b)) for b in np.unique(blocks)]


def enumerate_rows(
    numbers: Numbers, end: int, prompts: Array, sieves: Sequence[Sieve], verdicts: Mapping[str, RowTable]
) -> tuple[Array, Array]:
    """The rows of set `end` that filters have not dropped, under some prompts, and which of them are known to stay.

    It walks from the prompts down to the set: a generation makes `fan` rows of each, a filter drops those whose
    verdict is 0, a `select` repeats those whose verdict is 2 or more. A row whose verdict is not there yet stays, but
    is not known. Of 2 prompts with 2 responses each and the verdicts 1, 0, 1 and none for the responses 0 to 3: rows
    [0, 2, 3], known [True, True, False].
    """
    rows = prompts
    known = np.ones(len(prompts), bool)
    path = chain(numbers.sets, end)[::-1]
    for here, below in zip(path, [*path[1:], -1], strict=True):
        if here and not numbers.sets[here].repeats:
            fan = numbers.fans[here]
            rows = (rows[:, None] * fan + np.arange(fan)).reshape(-1)
            known = np.repeat(known, fan)
        # One that repeats rows makes others of them: who chooses from these rows comes before it, wherever it stands in
        # the graph.
        for sieve in sorted((s for s in sieves if s.rows == here), key=lambda s: s.left != here):
            times = verdicts[sieve.column].get(rows)
            if sieve.left == here:
                stay = times != 0
                rows = rows[stay]
                known = (known & (times > 0))[stay]
            elif sieve.left == below:
                # Of a row whose verdict is not there yet one stands for all.
                count = np.where(times < 0, 1, times)
                first = np.cumsum(count) - count
                which = np.arange(int(count.sum())) - np.repeat(first, count)
                rows = np.repeat(rows, count) + which * numbers.space[here]
                known = np.repeat(known & (times >= 0), count)
    for sieve in sieves:
        # A filter of rows that are not above these: one stays where any that belongs to it, or to the row above both,
        # does.
        if sieve.left in path:
            continue
        meeting = common(numbers.sets, sieve.left, end)
        there, sure = enumerate_rows(
            numbers, sieve.left, prompts, [s for s in sieves if s.left in chain(numbers.sets, sieve.left)], verdicts
        )
        above = numbers.above(there, sieve.left, meeting)
        mine = numbers.above(rows, end, meeting)
        alive = np.isin(mine, above[sure])
        possible = np.isin(mine, above)
        rows = rows[possible]
        known = (known & alive)[possible]
    return rows, known


def first_prompts(alive: Array, open_: Array, count: int) -> tuple[Array, Array, int]:
    """Of prompts, in order, which are the first `count` that any row is left of, as far as that is known?

    Of each prompt `alive` says that a row of it is sure to stay, `open_` that of some row it is not known. Gives for
    each whether it is one of the first `count`, whether that is decided, and how many are found so far. With count = 2,
    and rows left of the prompts 0, 2 and 3, the prompts 0 and 2 are the first; if it is open whether any row of prompt
    1 stays, that is decided of prompt 0 only.
    """
    decided = np.logical_and.accumulate(alive | ~open_)  # one row that stays is enough to know that the prompt does
    rank = np.cumsum(alive & decided)
    found = int(rank[-1]) if len(rank) else 0
    return alive & decided & (rank <= count), decided | (found >= count), min(found, count)
