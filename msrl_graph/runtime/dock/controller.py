"""The transfer dock (arXiv:2507.19017, figure 4): controllers that know which rows are ready, and where they lie.

Invariant: which rows form a round of an update is a function of (seed, iteration, epoch, row) and of nothing else; a
controller only chooses which data-parallel group computes a unit. Every unit of an iteration is handed out once (an
update: once an epoch), and whoever asks for a group's n-th share gets the same one however often it asks. What a
controller decided and what it heard of are all that it is made of: `restore` builds it anew from the warehouses.
Nothing here knows Ray or torch; actors.py puts it on processes.

All that is decided for a node is decided here: what is handed out next and to whom, whether another round of prompts is
needed, when an iteration is closed, and what of it must be kept safe. What a rank or a function host may ask is a
`Question`, a class at the end of this file: a new one needs its class here and the line of client.py that asks it;
actors.py passes all of them on alike.

Rows are those of rowsets.py. A node's *units* are what it is handed at once: its rows, or with `per = prompt` whole
groups. Filters say how often each row goes on (their *verdict*); who comes after one is handed the rows that are left,
and is done when all verdicts are there. With a refill the nodes up to the filter work round by round of prompts, and
the first groups that survive it, in the source's order, go on.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from ... import noise
from ...ir.rowsets import Numbers, chain
from ..data.columns import Array
from ..process.report import RunError
from ..process.task import Task
from .readers import Reader
from .view import Table, View, enumerate_rows, view
from .wire import News, Part, Round, Share

T_co = TypeVar("T_co", covariant=True)


def deal(units: Array, home: Array, weight: Array | None, groups: int) -> list[Array]:
    """Shares units among groups: with weights, the heaviest first to the lightest group; else even stretches, rows of
    one home together."""
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


def first_prompts(rows: Array, known: Array, above: Array, prompts: int, count: int) -> tuple[Array, Array, int]:
    """Of the prompts 0 to `prompts` - 1, which are the first `count` that any row is left of, as far as that is
    known?

    `rows` are the rows that filters have not dropped, `above` the prompt of each, and `known` says of which it is
    sure that they stay. Gives for each prompt whether it is one of the first `count`, for each prompt whether that is
    decided, and how many are found so far. With count = 2, and rows left of the prompts 0, 2 and 3, the prompts 0 and
    2 are the first; if it is open whether any row of prompt 1 stays, that is decided of prompt 0 only.
    """
    alive, open_ = np.zeros(prompts, bool), np.zeros(prompts, bool)
    alive[above[known]] = True
    open_[above[~known]] = True
    open_ &= ~alive  # one row that stays is enough to know that the prompt does
    decided = np.logical_and.accumulate(~open_)
    rank = np.cumsum(alive & decided)
    inside = alive & decided & (rank <= count)
    full = int(rank[-1]) >= count if prompts else False
    return inside, decided | full, int(min(rank[-1], count)) if prompts else 0


@dataclass
class Book:
    """What a controller knows of one iteration.

    - `where` says of each row of a column which warehouse has it (-1: none yet); `heard` how long the row is, or of a
      filter's verdict how often the row goes on.
    - `dealt` marks the units that were handed out, `shares` are what each group got, in order.
    - `opened` counts the rounds of prompts of which some row was heard; `ended` those that were handed out to their
      end. Without a refill there is one round.
    - `seen` is the view of the rows, kept once it is complete, since it changes no more.
    - `rounds`, of an update whose rows are all known: its mini-batches that are still to come, each as (epoch, rows).
    """

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
    """The metadata of one node: which rows are ready, where they lie, who gets them.

    `open`, `heard` and `restore` give the rounds that they have decided. Whoever calls them has these kept in a
    warehouse where the controller `keeps` them, and then gives them to `hand`, in order, from which `take` has its
    shares."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.books: dict[str, Book] = {}

    @property
    def keeps(self) -> bool:
        """Whether what is decided depends on the order in which rows come, as where batches are cut from what is there:
        it must be kept before anybody hears of it. All else (all rows at once, or an update's mini-batches in their
        order) would be decided again alike: who writes a row again writes it to its warehouse."""
        return self.reader.chunk > 0 and not self.reader.update

    def open(self, task: Task) -> list[Round]:
        """Begins an iteration, unless it has begun. A node that reads no column, but states, waits for no row: it has
        its rounds now."""
        if task.key in self.books:
            return []
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

    def heard(self, key: str, news: Iterable[News]) -> list[Round]:
        """Rows have come to lie in a warehouse."""
        book = self.books.get(key)
        if book is None:
            return []
        return [round for n in news if n.column in book.where for round in self._heard(book, n)]

    def _heard(self, book: Book, news: News) -> list[Round]:
        self._note(book, news)
        return self._deal(book)

    def restore(self, task: Task, news: Iterable[News], rounds: Iterable[Round]) -> list[Round]:
        """Takes the place of a controller that had opened the iteration, heard the news and decided these rounds (those
        that were kept); the rounds that it decides beside them."""
        self._begin(task)
        key, book = task.key, self.books[task.key]
        for n in news:
            if n.column in book.where:
                self._note(book, n)
        for round in rounds:
            book.dealt.set(np.concatenate([p.units for p in round.parts]), 1)
            book.ended += round.last
            self.hand(key, round)
        return self._deal(book)

    def hand(self, key: str, round: Round) -> None:
        """Makes the shares of a round, for `take`; of an iteration that was closed meanwhile nobody asks for what its
        last rows led to."""
        if (book := self.books.get(key)) is None:
            return
        reader = self.reader
        columns = [(read.column, read.rows) for read in reader.reads]
        everyone = np.concatenate([p.rows for p in round.parts])
        most = max(len(p.rows) for p in round.parts)
        elements = {c: int(book.heard[c].get(self._above(book, everyone, rows)).sum()) for c, rows in columns}
        for shares, part in zip(book.shares, round.parts, strict=True):
            where = {c: book.where[c].get(np.unique(self._above(book, part.rows, rows))) for c, rows in columns}
            shares.append(
                Share(part.units, part.sizes, part.rows, where, most, len(everyone), elements, round.epoch, round.last)
            )

    def take(self, key: str, group: int, index: int) -> Share | None:
        """The group's share number `index`, None while there is none."""
        shares = self.books[key].shares[group]
        return shares[index] if index < len(shares) else None

    def again(self, key: str, rounds: int) -> bool | None:
        """Whether after so many rounds of prompts another one is needed, for the filter that refills; None while that
        is not known. RunError where there were as many rounds as there may be."""
        book, filter = self.books[key], self.reader.refilling
        assert filter is not None
        _, decided, count = self._surviving(book, rounds)
        if not decided.all():
            return None
        if count >= book.task.prompts:
            return False
        if rounds > filter.refill:
            drawn = rounds * book.task.prompts
            what = (
                f"of {drawn} prompts in {rounds} rounds {count} have rows that it lets pass, where "
                f"{book.task.prompts} are to go on"
            )
            raise RunError(
                f"`{filter.node}` in iteration {book.task.number}: {what}; raise `refill`, ask for fewer prompts, or "
                "look at the filter"
            )
        return True

    def missing(self, key: str) -> str:
        """What the node waits for, in words."""
        book, reader, parts = self.books[key], self.reader, []
        seen = self._view(book)
        for read in reader.reads:
            wanted = np.unique(self._above(book, seen.rows, read.rows))
            absent = wanted[book.where[read.column].get(wanted) < 0]
            if len(absent):
                first = ", ".join(map(str, absent[:5])) + (", ..." if len(absent) > 5 else "")
                parts.append(
                    f"`{read.column}` from `{read.writer}` ({len(absent)} of {len(wanted)} rows missing: {first})"
                )
        if not seen.complete:
            filters = ", ".join(f"`{s.node}`" for s in (reader.passed or (reader.refilling,)) if s)
            parts.append(
                f"the verdict of {filters} on {int((~seen.known).sum())} of {len(seen.rows)} rows"
                if filters
                else "more prompts"
            )
        return "; ".join(parts) or "nothing: all its rows are there"

    def _note(self, book: Book, news: News) -> None:
        book.heard[news.column].set(news.rows, news.lengths)
        book.where[news.column].set(news.rows, news.warehouse)
        if len(news.rows) and self.reader.refilling is not None and book.task.trains:
            prompt = int(book.numbers.above(news.rows, self.reader.hears[news.column], 0).max())
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
        for read in self.reader.reads:
            ready &= book.where[read.column].get(self._above(book, seen.rows, read.rows)) >= 0
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
                book.rounds.extend(
                    (epoch, np.sort(seen.rows[order[i : i + size]])) for i in range(0, max(len(order), 1), size)
                )
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
            # The deepest says where a unit is at home.
            for read in sorted(reader.reads, key=lambda r: len(chain(reader.sets, r.rows))):
                above = self._above(book, rows, read.rows)
                home = book.where[read.column].get(above[starts])
                weight += np.add.reduceat(book.heard[read.column].get(above), starts)
        parts = []
        for some in deal(units, home, weight if reader.balance else None, reader.groups):
            mine, each = seen.rows_of(some)
            parts.append(Part(some, each, mine))
        return Round(epoch, tuple(parts), last)


@dataclass(frozen=True)
class Question(ABC, Generic[T_co]):
    """What a process asks the controller of `node` in a task; it waits until there is an answer."""

    node: str
    key: str

    @abstractmethod
    def answer(self, controller: Controller) -> T_co | None:
        """The answer, None while there is none."""

    @property
    def of_group(self) -> int:
        """The group that asks; -1: it is all the same which."""
        return -1

    @property
    def who(self) -> str:
        """Who waits, in words."""
        return f"`{self.node}`" + (f" (group {self.of_group})" if self.of_group >= 0 else "")


@dataclass(frozen=True)
class Take(Question[Share]):
    """The group's share number `index`. `process` is who begins with the share as soon as it has it: were it to tell
    that itself, its word could die with it."""

    group: int
    index: int
    process: str = ""

    def answer(self, controller: Controller) -> Share | None:
        return controller.take(self.key, self.group, self.index)

    @property
    def of_group(self) -> int:
        return self.group


@dataclass(frozen=True)
class Again(Question[bool]):
    """Whether after so many rounds of prompts the filter `node` needs another one."""

    rounds: int

    def answer(self, controller: Controller) -> bool | None:
        return controller.again(self.key, self.rounds)
