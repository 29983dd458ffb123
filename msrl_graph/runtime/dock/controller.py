"""The transfer dock (arXiv:2507.19017, figure 4): controllers that know which rows are ready, and where they lie.

Invariant: which rows form a round of an update is a function of (seed, node, iteration, epoch, row) and of nothing
else; a controller only chooses which data-parallel group computes a unit. Every unit of an iteration is handed out once
(an update: once an epoch), and whoever asks for a group's n-th share gets the same one however often it asks. What a
controller decided and what it heard of are all that it is made of: `restore` builds it anew from the warehouses.
Nothing here knows Ray or torch; host.py puts it on processes.

All that is decided for a node is decided here: what is handed out next and to whom, whether another round of prompts is
needed, when an iteration is closed, and what of it must be kept safe. What a rank or a function host may ask is a
`Question`, a class at the end of this file: a new one needs its class here and the line of client.py that asks it;
host.py passes all of them on alike.

Rows are those of rowsets.py. A node's *units* are what it is handed at once: its rows, or with `per = prompt` whole
groups. Filters say how often each row goes on (their *verdict*); who comes after one is handed the rows that are left,
and is done when all verdicts are there. With a refill the nodes up to the filter work round by round of prompts, and
the first groups that survive it, in the source's order, go on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from ... import noise
from ...ir.row_assignment import Units, deal
from ..data.columns import Array
from ..process.task import Task
from ..process.task_report import RunError
from .messages import Round, RowsReady, Share, WorkShare
from .progress import Progress
from .readers import NodeReads

T_co = TypeVar("T_co", covariant=True)
ALL = "nothing: all its rows are there"


@dataclass
class MiniBatches:
    """Those of an update: `todo` are the ones to come, as (epoch, rows), and so many are `done`. `lacking` counts, of
    each one of the first epoch, the rows that are not ready; `of` says in which of these each of the `rows` is."""

    todo: deque[tuple[int, Array]]
    rows: Array
    of: Array
    lacking: Array
    done: int = 0

    @classmethod
    def cut(cls, reader: NodeReads, number: int, rows: Array) -> MiniBatches:
        """Of all rows of an iteration, ascending: a function of (seed, node, iteration, epoch, row)."""
        size = reader.mini_batch or max(len(rows), 1)
        stream = noise.RandomStream(reader.seed, "mini_batch", reader.node)
        todo: deque[tuple[int, Array]] = deque()
        of = np.zeros(len(rows), np.int64)
        for epoch in range(reader.epochs):
            order = np.argsort(stream.keys(number, epoch, rows), kind="stable")
            if epoch == 0:
                of[order] = np.arange(len(rows)) // size
            todo.extend((epoch, np.sort(rows[order[i : i + size]])) for i in range(0, max(len(rows), 1), size))
        return cls(todo, rows, of, np.bincount(of, minlength=1))

    def ready(self, rows: Array) -> list[tuple[int, Array]]:
        """More rows are ready: the mini-batches whose turn has come."""
        self.lacking -= np.bincount(self.of[np.searchsorted(self.rows, rows)], minlength=len(self.lacking))
        found: list[tuple[int, Array]] = []
        # Of a later epoch all rows were dealt before.
        while self.todo and (self.todo[0][0] or not self.lacking[self.done]):
            found.append(self.todo.popleft())
            self.done += 1
        return found


@dataclass
class IterationState:
    """What a controller knows of one iteration, and the shares that it has handed out of it, by group. `had` is what
    each group has got so far, by weight; `tokens` are those of the units that are ready, where batches are cut by them.
    """

    task: Task
    progress: Progress
    shares: list[list[Share]]
    had: list[float]
    tokens: float = 0.0
    mini_batches: MiniBatches | None = None  # of an update whose rows are all known


class Controller:
    """The metadata of one node: which rows are ready, where they lie, who gets them.

    `open`, `heard` and `restore` give the rounds that they have decided. Whoever calls them has these kept in a
    warehouse where the controller `keeps` them, and then gives them to `hand`, in order, from which `take` has its
    shares."""

    def __init__(self, reader: NodeReads) -> None:
        self.reader = reader
        self.books: dict[str, IterationState] = {}

    @property
    def keeps(self) -> bool:
        """Whether what is decided depends on the order in which rows come, as where batches are cut from what is there:
        it must be kept before anybody hears of it. All else (all rows at once, or an update's mini-batches in their
        order) would be decided again alike: who writes a row again writes it to its warehouse."""
        return (self.reader.chunk > 0 or self.reader.chunk_tokens > 0) and not self.reader.update

    def open(self, task: Task) -> list[Round]:
        """Begins an iteration, unless it has begun. A node that reads no column, but states, waits for no row: it has
        its rounds now."""
        if task.key in self.books:
            return []
        self._begin(task)
        return self._deal(self.books[task.key])

    def _begin(self, task: Task) -> None:
        groups = len(self.reader.at)
        self.books[task.key] = IterationState(
            task, Progress(self.reader, task), [[] for _ in range(groups)], [0.0] * groups
        )

    def close(self, key: str) -> None:
        self.books.pop(key, None)

    def heard(self, key: str, news: Iterable[RowsReady]) -> list[Round]:
        """Rows have come to lie in a warehouse."""
        if (book := self.books.get(key)) is None or not self._note(book, news):
            return []
        return self._deal(book)

    def _note(self, book: IterationState, news: Iterable[RowsReady]) -> bool:
        """Whether any of the news concern the node."""
        heard = [n for n in news if n.column in self.reader.hears]
        for n in heard:
            book.progress.note(n)
        return bool(heard)

    def restore(self, task: Task, news: Iterable[RowsReady], rounds: Iterable[Round]) -> list[Round]:
        """Takes the place of a controller that had opened the iteration, heard the news and decided these rounds (those
        that were kept); the rounds that it decides beside them."""
        self._begin(task)
        book = self.books[task.key]
        self._note(book, news)
        for round in rounds:
            for group, part in enumerate(round.parts):
                book.progress.deal(part.units)
                book.had[group] += self._weighed(book, part.rows, part.sizes).load(range(len(part.units)))
            if round.last:
                book.progress.end()
            self.hand(task.key, round)
        return self._deal(book)

    def hand(self, key: str, round: Round) -> None:
        """Makes the shares of a round, for `take`; of an iteration that was closed meanwhile nobody asks for what its
        last rows led to."""
        if (book := self.books.get(key)) is None:
            return
        progress = book.progress
        columns = [(read.column, read.rows) for read in self.reader.reads]
        everyone = np.concatenate([p.rows for p in round.parts])
        most = max(len(p.rows) for p in round.parts)
        elements = {c: int(progress.heard[c].get(progress.above(everyone, rows)).sum()) for c, rows in columns}
        for shares, part in zip(book.shares, round.parts, strict=True):
            above = {rows: np.unique(progress.above(part.rows, rows)) for rows in {rows for _, rows in columns}}
            lie = {c: progress.where[c].get(above[rows]) for c, rows in columns}
            met = np.unique(np.concatenate([*lie.values(), part.rows[:0]]))
            where = {c: np.searchsorted(met, at) for c, at in lie.items()}
            of = tuple(progress.places[i] for i in met)
            all_ = len(everyone)
            shares.append(
                Share(part.units, part.sizes, part.rows, where, of, most, all_, elements, round.epoch, round.last)
            )

    def decided(self, key: str, group: int) -> list[Share]:
        """The group's shares so far."""
        return self.books[key].shares[group]

    def again(self, key: str, rounds: int) -> bool | None:
        """Whether after so many rounds of prompts another one is needed, for the filter that refills; None while that
        is not known. RunError where there were as many rounds as there may be."""
        book = self.books[key]
        filter = self.reader.refilling
        assert filter is not None
        _, decided, count = book.progress.surviving(rounds)
        if not decided.all():
            return None
        if count >= book.task.target:
            return False
        if rounds >= book.task.rounds(filter.refill):
            drawn = rounds * book.task.prompts
            what = (
                f"of {drawn} prompts in {rounds} rounds {count} have rows that it lets pass, where "
                f"{book.task.target} are to go on"
            )
            raise RunError(
                f"`{filter.node}` in iteration {book.task.number}: {what}; raise `refill`, ask for fewer prompts, or "
                "look at the filter"
            )
        return True

    def counts(self, key: str) -> tuple[int, int]:
        """Rows of a task that were handed out, and that there are as far as is known, each once an epoch."""
        book = self.books[key]
        handed = sum(len(share.rows) for shares in book.shares for share in shares)
        return handed, max(handed, len(book.progress.every[0]) * self.reader.epochs)

    def missing(self, key: str) -> str:
        """What the node waits for, in words."""
        progress = self.books[key].progress
        reader = self.reader
        parts = list[str]()
        if progress.ended and not reader.loops:  # what is heard since is no matter to it
            return ALL
        rows, known = progress.every
        for read in reader.reads:
            wanted = np.unique(progress.above(rows, read.rows))
            absent = wanted[progress.where[read.column].get(wanted) < 0]
            if len(absent):
                first = ", ".join(map(str, absent[:5])) + (", ..." if len(absent) > 5 else "")
                parts.append(
                    f"`{read.column}` from `{read.writer}` ({len(absent)} of {len(wanted)} rows missing: {first})"
                )
        if not progress.complete:
            filters = ", ".join(f"`{s.node}`" for s in (reader.passed or (reader.refilling,)) if s)
            parts.append(
                f"the verdict of {filters} on {int((~known).sum())} of {len(rows)} rows" if filters else "more prompts"
            )
        return "; ".join(parts) or ALL

    def _deal(self, book: IterationState) -> list[Round]:
        if self.reader.update:
            return self._deal_update(book)
        found: list[Round] = []
        progress = book.progress
        while progress.ended < (progress.opened if self.reader.loops else 1):
            self._count(book, progress.look(), 1)
            some = self._deal_units(book)
            found += some
            if not some or not some[-1].last:
                break
            progress.end()
        return found

    def _deal_units(self, book: IterationState) -> list[Round]:
        """Batches of what is ready, to the end of what is under way."""
        progress = book.progress
        found = list[Round]()
        while progress.left or not progress.complete:
            if not (count := self._enough(book)):
                return found
            last = progress.complete and progress.left == count
            units = progress.next(count)
            self._count(book, units, -1)
            found.append(self._round(book, 0, units, last))
        # What was handed out before may have been all.
        return found or [self._round(book, 0, progress.next(0), True)]

    def _enough(self, book: IterationState) -> int:
        """How many units make a batch, of those that are ready; 0: they do not make one yet."""
        progress = book.progress
        reader = self.reader
        counts = list[int]()
        if 0 < reader.chunk <= progress.fresh:
            counts.append(reader.chunk)
        if 0 < reader.chunk_tokens <= book.tokens:
            held = np.cumsum(self._tokens(book, *progress.rows_of(progress.first)))
            counts.append(int(np.searchsorted(held, reader.chunk_tokens)) + 1)
        rest = progress.fresh if progress.complete and progress.left == progress.fresh else 0
        return min(counts, default=rest)

    def _count(self, book: IterationState, units: Array, sign: int) -> None:
        """These units have become ready, or are dealt."""
        if self.reader.chunk_tokens and len(units):
            book.tokens += sign * float(self._tokens(book, *book.progress.rows_of(units)).sum())

    def _deal_update(self, book: IterationState) -> list[Round]:
        progress = book.progress
        rows = progress.look()
        if book.mini_batches is None:
            if not progress.complete:
                return []
            book.mini_batches = MiniBatches.cut(self.reader, book.task.number, np.sort(progress.every[0]))
            rows = np.concatenate([*progress.ready, rows[:0]])
        ready = book.mini_batches.ready(rows)
        last = 0 if book.mini_batches.todo else len(ready)
        return [self._round(book, epoch, some, i == last) for i, (epoch, some) in enumerate(ready, 1)]

    def _round(self, book: IterationState, epoch: int, units: Array, last: bool) -> Round:
        """Shares units among the groups."""
        reader = self.reader
        rows, sizes = book.progress.rows_of(units)
        starts = np.cumsum(sizes) - sizes
        parts = []
        some = self._weighed(book, rows, sizes)
        for group, positions in enumerate(deal(some, reader.at, reader.imbalance, book.had)):
            mine = [rows[starts[i] : starts[i] + sizes[i]] for i in positions]
            at = np.array(positions, np.int64)
            parts.append(WorkShare(units[at], sizes[at], np.concatenate([*mine, rows[:0]])))
            book.had[group] += some.load(positions)
        return Round(epoch, tuple(parts), last)

    def _weighed(self, book: IterationState, rows: Array, sizes: Array) -> Units:
        """Of units that have so many rows each, these unit by unit, what decides who gets them."""
        progress = book.progress
        warehouses = book.progress.warehouses
        unit = np.repeat(np.arange(len(sizes)), sizes)
        lies = np.zeros((len(sizes), int(warehouses.max()) + 1))
        for read in self.reader.reads:
            above = progress.above(rows, read.rows)
            length = progress.heard[read.column].get(above)
            cell = unit * lies.shape[1] + warehouses[progress.where[read.column].get(above)]
            lies += np.bincount(cell, length, lies.size).reshape(lies.shape)
        first = np.cumsum(sizes) - sizes
        return Units(
            progress.above(rows, 0)[first[first < len(rows)]].tolist(),
            lies.argmax(1).tolist(),
            self._tokens(book, rows, sizes).tolist() if self.reader.balance else None,
            lies.sum(1).tolist(),
        )

    def _tokens(self, book: IterationState, rows: Array, sizes: Array) -> Array:
        """How many tokens each of these units has."""
        progress = book.progress
        unit = np.repeat(np.arange(len(sizes)), sizes)
        found = np.zeros(len(sizes))
        for read in self.reader.reads:
            if times := self.reader.tokens.get(read.column):
                length = progress.heard[read.column].get(progress.above(rows, read.rows))
                found += times * np.bincount(unit, length, len(sizes))
        return found


@dataclass(frozen=True)
class ControllerRequest(ABC, Generic[T_co]):
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
class ShareRequest(ControllerRequest[list[Share]]):
    """The group's shares from number `index` on, as far as they are decided, once there is one."""

    group: int
    index: int

    def answer(self, controller: Controller) -> list[Share] | None:
        return controller.decided(self.key, self.group)[self.index :] or None

    @property
    def of_group(self) -> int:
        return self.group


@dataclass(frozen=True)
class RefillRequest(ControllerRequest[bool]):
    """Whether after so many rounds of prompts the filter `node` needs another one."""

    rounds: int

    def answer(self, controller: Controller) -> bool | None:
        return controller.again(self.key, self.rounds)
