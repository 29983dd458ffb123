"""Progress of a node's rows in one iteration: which units can be handed out.

Invariant: the method `look` examines only the prompts with news since its previous call, but finds the same ready units
as an examination of all rows. So its work is proportional to the number of these prompts, no matter how many rows wait.

A unit is ready when all of its rows are known (row_tables.py) and every column that the node reads for these rows is in
some warehouse. A prompt is settled when all of its rows are known, so that no more units can appear below the prompt. A
*prompt round* is one draw of prompts: a filter with `refill` may request further draws in the same iteration.
"""

from __future__ import annotations

import numpy as np

from ..data.columns import Array
from ..process.task import Task
from .messages import RowLocation, RowsReady
from .readers import NodeReads
from .row_tables import RowTable, enumerate_rows, first_prompts

WAITS, READY, DEALT = range(3)  # the states of a unit, in this order


class Progress:
    """What a controller knows of the rows of one iteration.

    - `where`: for each column and row, the location of the row, as an index into `places` and `warehouses` (-1: the row
      is not in a warehouse yet).
    - `heard`: for each column and row, the length of the row or, for a filter's verdict, how often the row continues.
    - `places`: the locations of rows, in the order in which the controller first received news of them. `warehouses`:
      for each location, the index of its warehouse.
    - `opened`: the number of prompt rounds that have begun. A round has begun when news of one of its rows has arrived.
      `ended`: the number of prompt rounds that were handed out completely. Without a refill there is one prompt round.
    - `ready`: the units that are ready and not handed out, in the order in which they became ready; `ready_count` is
      their number. `dealt` is the number of units that were handed out (in the current prompt round, if the node works
      in prompt rounds).
    """

    def __init__(self, reader: NodeReads, task: Task) -> None:
        self.reader = reader
        self.task = task
        self.numbers = reader.numbers(task)
        size = self.numbers.size
        prompts = self.numbers.size[0]
        self.where = {column: RowTable(size[rows], -1) for column, rows in reader.needed_columns.items()}
        self.heard = {column: RowTable(size[rows], -1) for column, rows in reader.needed_columns.items()}
        self.places: list[RowLocation] = []
        self.warehouses = np.zeros(16, np.int64)
        self.place_index: dict[RowLocation, int] = {}
        self.opened = 1
        self.ended = 0
        self.ready: list[Array] = []
        self.ready_count = self.dealt = 0
        self._state = RowTable(size[reader.unit], WAITS)
        self._sieves = reader.passed if task.trains else reader.failing
        self._filter = reader.refilling if task.trains else None
        # For each prompt: whether there is news since the last `look`, and since the last `find_surviving_prompts`;
        # whether the prompt is settled; its number of units (of rows, if all rows are one unit); and whether all
        # columns that the node reads for its rows are in a warehouse.
        self._news = np.ones(prompts, bool)
        self._unsifted = np.ones(prompts, bool)
        self._settled = np.zeros(prompts, bool)
        self._units = np.zeros(prompts, int)
        self._all_present = np.zeros(prompts, bool)
        # For each prompt, about the filter with `refill`: the arguments of `first_prompts` and its results.
        self._alive = np.zeros(prompts, bool)
        self._open = np.ones(prompts, bool)
        self._inside = np.zeros(prompts, bool)
        self._decided = np.zeros(prompts, bool)
        self._enough = True  # whether enough prompts survive, so that no more prompts will come

    def note(self, news: RowsReady) -> None:
        """Record the news that a warehouse has new rows."""
        self.heard[news.column].set(news.rows, news.lengths)
        if (place_index := self.place_index.setdefault(news.place, len(self.places))) == len(self.places):
            self.places.append(news.place)
            if place_index == len(self.warehouses):
                self.warehouses = np.concatenate([self.warehouses, np.zeros_like(self.warehouses)])
            self.warehouses[place_index] = news.place.warehouse
        self.where[news.column].set(news.rows, place_index)
        prompts = self.numbers.above(news.rows, self.reader.needed_columns[news.column], 0)
        self._news[prompts] = self._unsifted[prompts] = True
        if len(news.rows) and self._filter is not None:
            self.opened = max(self.opened, int(prompts.max()) // self.task.prompts + 1)

    def rows_above(self, rows: Array, end: int) -> Array:
        """Return, for each row, its ancestor in the row set `end`.

        `rows` are numbers of the node's rows, and `end` is the index of a row set (analysis/rowsets.py).
        """
        return self.numbers.above(rows, self.reader.rows, end)

    def find_surviving_prompts(self, rounds: int) -> tuple[Array, Array, int]:
        """Find the first prompts with rows that pass the filter with `refill`.

        Considers the prompts of the first `rounds` prompt rounds. Returns the result of `first_prompts`
        (row_tables.py).
        """
        filter = self._filter
        prompt_count = rounds * self.task.prompts
        assert filter is not None
        prompts = np.flatnonzero(self._unsifted[:prompt_count])
        if len(prompts):
            sieves = (*self.reader.before_refill, filter)
            rows, known = enumerate_rows(self.numbers, filter.remaining, prompts, sieves, self.heard)
            prompt_of_row = self.numbers.above(rows, filter.remaining, 0)
            self._alive[prompts] = self._open[prompts] = self._unsifted[prompts] = False
            self._alive[prompt_of_row[known]] = self._open[prompt_of_row[~known]] = True
        return first_prompts(self._alive[:prompt_count], self._open[:prompt_count], self.task.target)

    @property
    def _window(self) -> slice:
        """The range of prompts from which units are handed out.

        For a node that works in prompt rounds, these are the prompts of its current round; for any other node, the
        prompts of all rounds that have begun.
        """
        count = self.task.prompts
        loops = self._filter is not None and self.reader.loops
        return slice(self.ended * count, (self.ended + 1) * count) if loops else slice(0, self.opened * count)

    def look(self) -> Array:
        """Return the units that became ready since the previous call of `look`."""
        reader = self.reader
        window = self._window
        if self._filter is not None and not reader.loops:
            self._apply_refill_filter(window)
        prompts: Array = np.flatnonzero(self._news[window]) + window.start
        if not len(prompts):
            return prompts
        self._news[prompts] = False
        rows, known = self.rows(prompts)
        ready = known.copy()
        for read in reader.reads:
            ready &= self.where[read.column].get(self.rows_above(rows, read.rows)) >= 0
        prompt_of_row = self.rows_above(rows, 0)
        self._settled[prompts] = self._all_present[prompts] = True
        self._settled[prompt_of_row[~known]] = self._all_present[prompt_of_row[~ready]] = False
        self._units[prompts] = 0
        if reader.whole_batch:
            self._units += np.bincount(prompt_of_row, minlength=len(self._units))
            return self._mark_ready(
                np.zeros(int(self.undealt_count > 0 and self.complete and self._all_present[window].all()), np.int64)
            )
        units, unit_of_row = np.unique(self.rows_above(rows, reader.unit), return_inverse=True)
        self._units += np.bincount(self.numbers.above(units, reader.unit, 0), minlength=len(self._units))
        complete_units = self._state.get(units) == WAITS
        complete_units[unit_of_row[~ready]] = False
        return self._mark_ready(units[complete_units])

    def _mark_ready(self, units: Array) -> Array:
        if len(units):
            self._state.set(units, READY)
            self.ready.append(units)
            self.ready_count += len(units)
        return units

    def _apply_refill_filter(self, window: slice) -> None:
        """Update which prompts have rows that pass the filter with `refill`.

        If this changes for a prompt, the prompt is marked, so that the method `look` examines the prompt.
        """
        inside, decided, survivors = self.find_surviving_prompts(self.opened)
        self._enough = survivors >= self.task.target
        if self._filter in self.reader.passed:
            self._news[window] |= (inside != self._inside[window]) | (decided != self._decided[window])
            self._inside[window] = inside
            self._decided[window] = decided

    def rows(self, prompts: Array) -> tuple[Array, Array]:
        """Return the node's rows below some prompts, and a mask of the known rows.

        A row is known if all filters before the node have passed it. Rows that a filter dropped are left out.
        """
        chosen = self._filter is not None and not self.reader.loops and self._filter in self.reader.passed
        if chosen:
            prompts = prompts[self._inside[prompts] | ~self._decided[prompts]]
        rows, known = enumerate_rows(self.numbers, self.reader.rows, prompts, self._sieves, self.heard)
        return rows, known & self._decided[self.rows_above(rows, 0)] if chosen else known

    @property
    def rows_under_way(self) -> tuple[Array, Array]:
        """The result of the method `rows` for all prompts of `_window`.

        The result has the node's rows below these prompts, and a mask of the known rows.
        """
        return self.rows(np.arange(self._window.start, self._window.stop))

    @property
    def complete(self) -> bool:
        """Whether no more units can appear below the prompts of `_window`."""
        return self._enough and bool(self._settled[self._window].all())

    @property
    def undealt_count(self) -> int:
        """The number of existing units that are not handed out.

        Only units below the prompts of `_window` are counted.
        """
        units = int(self._units[self._window].sum())
        return (min(units, 1) if self.reader.whole_batch else units) - self.dealt

    @property
    def ready_units(self) -> Array:
        """The units that are ready and not handed out, sorted by number."""
        return np.sort(np.concatenate([*self.ready, np.zeros(0, np.int64)]))

    def deal_next(self, count: int) -> Array:
        """Hand out the `count` ready units with the lowest numbers; return their numbers."""
        ready = self.ready_units
        units = ready[:count]
        self.ready = [ready[count:]]
        self.ready_count -= len(units)
        self.deal(units)
        return units

    def deal(self, units: Array) -> None:
        self._state.set(units, DEALT)
        self.dealt += len(units)

    def end(self) -> None:
        """Note that all units of the iteration, or of the prompt round, are handed out."""
        self.ended += 1
        if self.reader.loops:
            self.dealt = 0

    def rows_of(self, units: Array) -> tuple[Array, Array]:
        """Return the rows of some units, unit by unit, and the number of rows per unit.

        The rows of each unit are ascending.
        """
        reader = self.reader
        if reader.whole_batch:
            rows = np.sort(self.rows_under_way[0]) if len(units) else units
            return rows, np.full(len(units), len(rows))
        if reader.unit == reader.rows:
            return units, np.ones(len(units), np.int64)
        rows, _ = self.rows(np.unique(self.numbers.above(units, reader.unit, 0)))
        unit_of_row = self.rows_above(rows, reader.unit)
        order = np.lexsort((rows, unit_of_row))
        rows = rows[order]
        unit_of_row = unit_of_row[order]
        return rows[np.isin(unit_of_row, units)], np.searchsorted(unit_of_row, units, "right") - np.searchsorted(
            unit_of_row, units
        )
