"""The transfer dock (arXiv:2507.19017, figure 4): controllers that know which rows are ready, and where they lie.

Invariant: which rows form a round of an update is a function of (seed, iteration, epoch, row) and of nothing else; a controller only
chooses which data-parallel group computes a unit. Every unit of an iteration is handed out once (an update: once an epoch), and whoever
asks for a group's n-th share gets the same one however often it asks. What a controller decided and what it heard of are all that it is
made of: `restore` builds it anew from the warehouses. Nothing here knows Ray or torch; actors.py puts it on processes.

Rows are those of rowsets.py. A node's *units* are what it is handed at once: its rows, or with `per = prompt` whole groups. Filters say how
often each row goes on (their *verdict*); who comes after one is handed the rows that are left, and is done when all verdicts are there.
With a refill the nodes up to the filter work round by round of prompts, and the first groups that survive it, in the source's order, go on.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from ... import noise
from ...ir.rowsets import Numbers, chain
from ..data.columns import Array, Column
from ..process.report import RunError
from ..process.task import Task
from .readers import Reader
from .view import Table, View, enumerate_rows, first_prompts, view
from .warehouse import Part, Round


@dataclass(frozen=True)
class Share:
    """What one group gets of a round: its units, how many rows each has, those rows, and for each column the warehouses of the rows
    that they came from (each once, ascending). `most` are the rows of the largest share (so that all make as many micro-batches),
    `round_units` those of the whole round, `elements` the length of each column over them."""

    units: Array
    sizes: Array
    rows: Array
    where: dict[str, Array]
    most: int
    round_units: int
    elements: dict[str, int]
    epoch: int
    last: bool


def deal(units: Array, home: Array, weight: Array | None, groups: int) -> list[Array]:
    """Shares units among groups: with weights, the heaviest first to the lightest group; else even stretches, rows of one home together."""
    if weight is None:
        order = units[np.lexsort((units, home))]
        return [np.sort(part) for part in np.array_split(order, groups)]
    heap = [(0, g) for g in range(groups)]
    parts: list[list[int]] = [[] for _ in range(groups)]
    for position in np.lexsort((units, -weight)):
        load, group = heapq.heappop(heap)
        parts[group].append(int(units[position]))
        heapq.heappush(heap, (load + int(weight[position]), group))
    return [np.sort(np.asarray(p, np.int64)) for p in parts]


@dataclass
class Book:
    """What a controller knows of one iteration. Of each column heard of, `where` says which warehouse has a row (-1: none yet) and `heard`
    its length, or of a filter's verdict how often it goes on. `opened` are the rounds of prompts of which a row was heard, `ended` those
    that were handed out to their end; `seen` is the view once it is complete, since it changes no more."""

    task: Task
    numbers: Numbers
    where: dict[str, Table]
    heard: dict[str, Table]
    dealt: Table
    shares: list[list[Share]]  # by group
    opened: int = 1
    ended: int = 0
    seen: View | None = None
    rounds: deque[tuple[int, Array]] | None = None  # of an update whose rows are all known: (epoch, rows), in order


class Controller:
    """The metadata of one node-state: which rows are ready, where they lie, who gets them."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.books: dict[str, Book] = {}

    def open(self, task: Task) -> list[Round]:
        """Begins an iteration. What that decides, as `heard` tells it: a node that reads nothing but states waits for no row."""
        self._begin(task)
        return self._deal(self.books[task.key])

    def _begin(self, task: Task) -> None:
        reader, numbers = self.reader, self.reader.numbers(task)
        self.books[task.key] = Book(
            task=task,
            numbers=numbers,
            where={c: Table(numbers.size[rows], -1) for c, rows in reader.hears.items()},
            heard={c: Table(numbers.size[rows], -1) for c, rows in reader.hears.items()},
            dealt=Table(numbers.size[reader.unit], 0),
            shares=[[] for _ in range(reader.groups)],
        )

    def close(self, key: str) -> None:
        self.books.pop(key, None)

    def heard(self, key: str, column: str, rows: Array, lengths: Array, warehouse: int) -> list[Round]:
        """Rows of a column have come to lie in a warehouse. What that decides: to be given to `hand`, in order, after it was kept safe
        where it depends on what came first (Reader.by_arrival)."""
        book = self.books.get(key)
        if book is None or column not in book.where:
            return []
        self._note(book, column, rows, lengths, warehouse)
        return self._deal(book)

    def restore(self, task: Task, found: Iterable[tuple[str, Array, Array, int]], rounds: Iterable[Round]) -> list[Round]:
        """Takes the place of a controller that had opened the iteration, heard of `found` (column, rows, lengths, warehouse) and decided
        `rounds` (those that were kept). What else is decided now, as `heard` tells it."""
        self._begin(task)
        key, book = task.key, self.books[task.key]
        for column, rows, lengths, warehouse in found:
            if column in book.where:
                self._note(book, column, rows, lengths, warehouse)
        for round in rounds:
            book.dealt.set(np.concatenate([p.units for p in round.parts]), 1)
            book.ended += round.last
            self.hand(key, round)
        return self._deal(book)

    def hand(self, key: str, round: Round) -> None:
        """Makes the shares of a round, for `take`."""
        book, reader = self.books[key], self.reader
        everyone = np.concatenate([p.rows for p in round.parts])
        most = max(len(p.rows) for p in round.parts)
        elements = {c: int(book.heard[c].get(self._above(book, everyone, rows)).sum()) for c, rows, _ in reader.reads}
        for shares, part in zip(book.shares, round.parts, strict=True):
            where = {c: book.where[c].get(np.unique(self._above(book, part.rows, rows))) for c, rows, _ in reader.reads}
            shares.append(Share(part.units, part.sizes, part.rows, where, most, len(everyone), elements, round.epoch, round.last))

    def take(self, key: str, group: int, index: int) -> Share | None:
        """The group's share number `index`, None while there is none."""
        shares = self.books[key].shares[group]
        return shares[index] if index < len(shares) else None

    def again(self, key: str, rounds: int) -> bool | None:
        """Whether after so many rounds of prompts another one is needed, for the filter that refills; None while that is not known.
        RunError where there were as many rounds as there may be."""
        book, filter = self.books[key], self.reader.refilling
        assert filter is not None
        _, decided, count = self._surviving(book, rounds)
        if not decided.all():
            return None
        if count >= book.task.prompts:
            return False
        if rounds > filter.refill:
            drawn = rounds * book.task.prompts
            what = f"of {drawn} prompts in {rounds} rounds {count} have rows that it lets pass, where {book.task.prompts} are to go on"
            raise RunError(
                f"`{filter.node}` in iteration {book.task.number}: {what}; raise `refill`, ask for fewer prompts, or look at the filter"
            )
        return True

    def missing(self, key: str) -> str:
        """What the node waits for, in words."""
        book, reader, parts = self.books[key], self.reader, []
        seen = self._view(book)
        for column, rows, writer in reader.reads:
            wanted = np.unique(self._above(book, seen.rows, rows))
            absent = wanted[book.where[column].get(wanted) < 0]
            if len(absent):
                first = ", ".join(map(str, absent[:5])) + (", ..." if len(absent) > 5 else "")
                parts.append(f"`{column}` from `{writer}` ({len(absent)} of {len(wanted)} rows missing: {first})")
        if not seen.complete:
            filters = ", ".join(f"`{s.node}`" for s in (reader.passed or (reader.refilling,)) if s)
            parts.append(f"the verdict of {filters} on {int((~seen.known).sum())} of {len(seen.rows)} rows" if filters else "more prompts")
        return "; ".join(parts) or "nothing: all its rows are there"

    def _note(self, book: Book, column: str, rows: Array, lengths: Array, warehouse: int) -> None:
        book.heard[column].set(rows, lengths)
        book.where[column].set(rows, warehouse)
        if len(rows) and self.reader.refilling is not None and book.task.trains:
            prompt = int(book.numbers.above(rows, self.reader.hears[column], 0).max())
            book.opened = max(book.opened, prompt // book.task.prompts + 1)

    def _above(self, book: Book, rows: Array, end: int) -> Array:
        return book.numbers.above(rows, self.reader.rows, end)

    def _surviving(self, book: Book, rounds: int) -> tuple[Array, Array, int]:
        """`first_prompts` of the filter that refills, of so many rounds."""
        filter, prompts = self.reader.refilling, rounds * book.task.prompts
        assert filter is not None
        sieves = (*self.reader.before_refill, filter)
        rows, known = enumerate_rows(book.numbers, filter.left, np.arange(prompts), sieves, book.heard)
        return first_prompts(rows, known, book.numbers.above(rows, filter.left, 0), prompts, book.task.prompts)

    def _view(self, book: Book) -> View:
        if book.seen is None:
            found = self._look(book)
            book.seen = found if found.complete else None
            return found
        return book.seen

    def _look(self, book: Book) -> View:
        reader, count = self.reader, book.task.prompts
        prompts, sure, complete = np.arange(book.opened * count), None, True
        if reader.refilling is not None and book.task.trains:
            if reader.loops:  # the round that is under way
                prompts = np.arange(book.ended * count, (book.ended + 1) * count)
            else:
                inside, decided, found = self._surviving(book, book.opened)
                complete = found >= count
                if reader.refilling in reader.passed:
                    prompts = np.flatnonzero(inside | ~decided)
                    sure = decided[prompts]
        sieves = reader.passed if book.task.trains else ()
        rows, known = enumerate_rows(book.numbers, reader.rows, prompts, sieves, book.heard)
        if sure is not None:
            known &= sure[np.searchsorted(prompts, book.numbers.above(rows, reader.rows, 0))]
        units = np.zeros(len(rows), np.int64) if reader.whole else book.numbers.above(rows, reader.rows, reader.unit)
        return view(rows, known, units, complete)

    def _ready(self, book: Book, seen: View) -> Array:
        """The units that are known whole and of which all is there."""
        ready = seen.known.copy()
        for column, rows, _ in self.reader.reads:
            ready &= book.where[column].get(self._above(book, seen.rows, rows)) >= 0
        return seen.each(ready)

    def _deal(self, book: Book) -> list[Round]:
        if self.reader.update:
            return self._deal_update(book)
        found: list[Round] = []
        while book.ended < (book.opened if self.reader.loops else 1):
            some = self._deal_units(book, self._view(book))
            found += some
            if not some or not some[-1].last:
                break
            book.ended += 1
            book.seen = None if self.reader.loops else book.seen  # of another round
        return found

    def _deal_units(self, book: Book, seen: View) -> list[Round]:
        """Batches of what is ready, to the end of a view."""
        found: list[Round] = []
        dealt = book.dealt.get(seen.units) > 0
        fresh, left = seen.units[self._ready(book, seen) & ~dealt], int((~dealt).sum())
        chunk = self.reader.chunk or max(left, 1)
        while True:
            enough = max(1, min(chunk, left)) if seen.complete else self.reader.chunk
            if not enough or len(fresh) < enough or (self.reader.whole and not seen.complete):
                break
            units, fresh = fresh[:chunk], fresh[chunk:]
            book.dealt.set(units, 1)
            left -= len(units)
            found.append(self._round(book, seen, 0, units, seen.complete and not left))
        if seen.complete and not left and not found:
            found.append(self._round(book, seen, 0, seen.units[:0], True))  # what was handed out before was all
        return found

    def _deal_update(self, book: Book) -> list[Round]:
        reader, seen, found = self.reader, self._view(book), []
        if book.rounds is None and seen.complete:
            book.rounds, size = deque(), reader.mini_batch or max(len(seen.rows), 1)
            for epoch in range(reader.epochs):
                order = np.argsort(noise.keys(reader.seed, book.task.number, epoch, seen.rows), kind="stable")
                book.rounds.extend((epoch, np.sort(seen.rows[order[i : i + size]])) for i in range(0, max(len(order), 1), size))
        if book.rounds:
            ready = self._ready(book, seen)
            while book.rounds and ready[np.searchsorted(seen.units, book.rounds[0][1])].all():
                epoch, rows = book.rounds.popleft()
                found.append(self._round(book, seen, epoch, rows, not book.rounds))
        return found

    def _round(self, book: Book, seen: View, epoch: int, units: Array, last: bool) -> Round:
        """Shares units among the groups."""
        reader = self.reader
        rows, sizes = seen.rows_of(units)
        home, weight = np.zeros(len(units), np.int64), np.zeros(len(units), np.int64)
        if len(units) and not reader.whole:
            starts = np.cumsum(sizes) - sizes
            for column, of, _ in sorted(
                reader.reads, key=lambda r: len(chain(reader.sets, r[1]))
            ):  # the deepest says where a unit is at home
                above = self._above(book, rows, of)
                home = book.where[column].get(above[starts])
                weight += np.add.reduceat(book.heard[column].get(above), starts)
        parts = []
        for some in deal(units, home, weight if reader.balance else None, reader.groups):
            mine, each = seen.rows_of(some)
            parts.append(Part(some, each, mine))
        return Round(epoch, tuple(parts), last)


@dataclass(frozen=True)
class Batch:
    """The rows of a share: their numbers, and each column with one entry a row."""

    share: Share
    rows: Array
    columns: dict[str, Column]


def wanted(share: Share, reader: Reader, numbers: Numbers) -> dict[str, Array]:
    """The rows of each column that a share needs, ascending, each once."""
    return {c: np.unique(numbers.above(share.rows, reader.rows, rows)) for c, rows, _ in reader.reads} if len(share.rows) else {}


def assemble(share: Share, reader: Reader, numbers: Numbers, asked: Mapping[str, Array], fetched: Mapping[str, Column]) -> Batch:
    """Lays fetched columns, of which these rows were `asked` for (`wanted`), out by the node's rows."""
    columns = {}
    for name, rows, _ in reader.reads if asked else ():
        place = np.searchsorted(asked[name], numbers.above(share.rows, reader.rows, rows))
        columns[name] = fetched[name] if np.array_equal(place, np.arange(len(asked[name]))) else fetched[name].take(place)
    return Batch(share, share.rows, columns)


def split(where: Array) -> Iterable[tuple[int, Array]]:
    """(warehouse, the positions of its rows) for each warehouse that holds some."""
    for warehouse in np.unique(where):
        yield int(warehouse), np.flatnonzero(where == warehouse)
