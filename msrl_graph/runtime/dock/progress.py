"""How far the rows of a node have come in one iteration: which of its units are ready to be handed out.

Invariant: what was found is what a look at all rows would find, and the work of it is that of the prompts of which
something was heard since the last look, however many rows wait.

A unit is ready when all of its rows are known (row_tables.py) and all that the node reads of them lies in some
warehouse. A prompt is settled when all of its rows are known, so that it has no other units.
"""

from __future__ import annotations

import numpy as np

from ..data.columns import Array
from ..process.task import Task
from .messages import RowLocation, RowsReady
from .readers import NodeReads
from .row_tables import RowTable, enumerate_rows, first_prompts

WAITS, READY, DEALT = range(3)  # what becomes of a unit, in this order


class Progress:
    """What a controller knows of the rows of one iteration.

    - `where` says of each row of a column where it lies, as an index of `places` and of their `warehouses` (-1: nowhere
      yet); `heard` how long the row is, or of a filter's verdict how often the row goes on.
    - `opened` counts the rounds of prompts of which some row was heard; `ended` those that were handed out to their
      end. Without a refill there is one round.
    - `ready` are the units that are ready and not dealt, as they became it; `fresh` counts them.
    """

    def __init__(self, reader: NodeReads, task: Task) -> None:
        self.reader = reader
        self.task = task
        self.numbers = reader.numbers(task)
        size = self.numbers.size
        prompts = self.numbers.size[0]
        self.where = {c: RowTable(size[rows], -1) for c, rows in reader.hears.items()}
        self.heard = {c: RowTable(size[rows], -1) for c, rows in reader.hears.items()}
        self.places: list[RowLocation] = []
        self.warehouses = np.zeros(16, np.int64)
        self.at: dict[RowLocation, int] = {}
        self.opened = 1
        self.ended = 0
        self.ready: list[Array] = []
        self.fresh = self.dealt = 0
        self._state = RowTable(size[reader.unit], WAITS)
        self._sieves = reader.passed if task.trains else reader.failing
        self._filter = reader.refilling if task.trains else None
        # By prompt: whether something was heard since it was looked at, by `look` and by `surviving`; whether it is
        # settled; how many units it has (rows, where all are one unit), and whether all that is read of them is there.
        self._news = np.ones(prompts, bool)
        self._unsifted = np.ones(prompts, bool)
        self._settled = np.zeros(prompts, bool)
        self._units = np.zeros(prompts, int)
        self._there = np.zeros(prompts, bool)
        # By prompt, of the filter that refills: what `first_prompts` asks for, and what it found.
        self._alive = np.zeros(prompts, bool)
        self._open = np.ones(prompts, bool)
        self._inside = np.zeros(prompts, bool)
        self._decided = np.zeros(prompts, bool)
        self._enough = True  # prompts survive, so that no others will come

    def note(self, news: RowsReady) -> None:
        """Rows have come to lie in a warehouse."""
        self.heard[news.column].set(news.rows, news.lengths)
        if (at := self.at.setdefault(news.place, len(self.places))) == len(self.places):
            self.places.append(news.place)
            if at == len(self.warehouses):
                self.warehouses = np.concatenate([self.warehouses, np.zeros_like(self.warehouses)])
            self.warehouses[at] = news.place.warehouse
        self.where[news.column].set(news.rows, at)
        prompts = self.numbers.above(news.rows, self.reader.hears[news.column], 0)
        self._news[prompts] = self._unsifted[prompts] = True
        if len(news.rows) and self._filter is not None:
            self.opened = max(self.opened, int(prompts.max()) // self.task.prompts + 1)

    def above(self, rows: Array, end: int) -> Array:
        """The row of set `end` that each row of the node came from."""
        return self.numbers.above(rows, self.reader.rows, end)

    def surviving(self, rounds: int) -> tuple[Array, Array, int]:
        """`first_prompts` of the filter that refills, of so many rounds."""
        filter = self._filter
        end = rounds * self.task.prompts
        assert filter is not None
        prompts = np.flatnonzero(self._unsifted[:end])
        if len(prompts):
            sieves = (*self.reader.before_refill, filter)
            rows, known = enumerate_rows(self.numbers, filter.left, prompts, sieves, self.heard)
            of = self.numbers.above(rows, filter.left, 0)
            self._alive[prompts] = self._open[prompts] = self._unsifted[prompts] = False
            self._alive[of[known]] = self._open[of[~known]] = True
        return first_prompts(self._alive[:end], self._open[:end], self.task.target)

    @property
    def _window(self) -> slice:
        """The prompts under way: of a node that works round by round those of its round."""
        count = self.task.prompts
        loops = self._filter is not None and self.reader.loops
        return slice(self.ended * count, (self.ended + 1) * count) if loops else slice(0, self.opened * count)

    def look(self) -> Array:
        """The units that have become ready since the last look."""
        reader = self.reader
        window = self._window
        if self._filter is not None and not reader.loops:
            self._sift(window)
        prompts: Array = np.flatnonzero(self._news[window]) + window.start
        if not len(prompts):
            return prompts
        self._news[prompts] = False
        rows, known = self.rows(prompts)
        ready = known.copy()
        for read in reader.reads:
            ready &= self.where[read.column].get(self.above(rows, read.rows)) >= 0
        of = self.above(rows, 0)
        self._settled[prompts] = self._there[prompts] = True
        self._settled[of[~known]] = self._there[of[~ready]] = False
        self._units[prompts] = 0
        if reader.whole:
            self._units += np.bincount(of, minlength=len(self._units))
            return self._became(np.zeros(int(self.left > 0 and self.complete and self._there[window].all()), np.int64))
        units, at = np.unique(self.above(rows, reader.unit), return_inverse=True)
        self._units += np.bincount(self.numbers.above(units, reader.unit, 0), minlength=len(self._units))
        whole = self._state.get(units) == WAITS
        whole[at[~ready]] = False
        return self._became(units[whole])

    def _became(self, units: Array) -> Array:
        if len(units):
            self._state.set(units, READY)
            self.ready.append(units)
            self.fresh += len(units)
        return units

    def _sift(self, window: slice) -> None:
        """Which prompts go on where a filter refills; those of which that is known now are to be looked at."""
        inside, decided, found = self.surviving(self.opened)
        self._enough = found >= self.task.target
        if self._filter in self.reader.passed:
            self._news[window] |= (inside != self._inside[window]) | (decided != self._decided[window])
            self._inside[window] = inside
            self._decided[window] = decided

    def rows(self, prompts: Array) -> tuple[Array, Array]:
        """The node's rows under some prompts, as far as filters have not dropped them, and which are known."""
        chosen = self._filter is not None and not self.reader.loops and self._filter in self.reader.passed
        if chosen:
            prompts = prompts[self._inside[prompts] | ~self._decided[prompts]]
        rows, known = enumerate_rows(self.numbers, self.reader.rows, prompts, self._sieves, self.heard)
        return rows, known & self._decided[self.above(rows, 0)] if chosen else known

    @property
    def every(self) -> tuple[Array, Array]:
        """`rows` of all prompts under way."""
        return self.rows(np.arange(self._window.start, self._window.stop))

    @property
    def complete(self) -> bool:
        """Whether no unit will come that is not counted yet."""
        return self._enough and bool(self._settled[self._window].all())

    @property
    def left(self) -> int:
        """Units that were not dealt, of those counted so far."""
        units = int(self._units[self._window].sum())
        return (min(units, 1) if self.reader.whole else units) - self.dealt

    @property
    def first(self) -> Array:
        """The units that are ready and not dealt, by number."""
        return np.sort(np.concatenate([*self.ready, np.zeros(0, np.int64)]))

    def next(self, count: int) -> Array:
        """So many of the units that are ready, the first by number; they are dealt now."""
        ready = self.first
        units = ready[:count]
        self.ready = [ready[count:]]
        self.fresh -= len(units)
        self.deal(units)
        return units

    def deal(self, units: Array) -> None:
        self._state.set(units, DEALT)
        self.dealt += len(units)

    def end(self) -> None:
        """All units are dealt, of a node that works round by round those of its round."""
        self.ended += 1
        if self.reader.loops:
            self.dealt = 0

    def rows_of(self, units: Array) -> tuple[Array, Array]:
        """The rows of some units, ascending, unit by unit, and how many each has."""
        reader = self.reader
        if reader.whole:
            rows = np.sort(self.every[0]) if len(units) else units
            return rows, np.full(len(units), len(rows))
        if reader.unit == reader.rows:
            return units, np.ones(len(units), np.int64)
        rows, _ = self.rows(np.unique(self.numbers.above(units, reader.unit, 0)))
        of = self.above(rows, reader.unit)
        order = np.lexsort((rows, of))
        rows = rows[order]
        of = of[order]
        return rows[np.isin(of, units)], np.searchsorted(of, units, "right") - np.searchsorted(of, units)
