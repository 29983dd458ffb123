"""The transfer dock (arXiv:2507.19017, figure 4): controllers that know which rows are ready, warehouses that hold them.

Invariant: which units form a round of an update is a function of (seed, iteration, epoch, unit) and of nothing else; a controller only
chooses which data-parallel group computes a unit. Every unit of an iteration is handed out once (an update: once an epoch), and whoever
asks for a group's n-th share gets the same one however often it asks. Writes are idempotent: a row written again replaces itself. What a
controller decided and what it heard of are all that it is made of: `restore` builds it anew from the warehouses. Nothing here knows Ray
or torch; actors.py puts it on processes.

Levels: a row of level 0 is a prompt, one of level 1 a response; response r belongs to prompt r // fan. A node's *units* are what it is
handed at once: its rows, or with `per = prompt` whole groups.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from .. import noise
from ..plan import Plan
from .columns import Array, Column, concatenate
from .wrong import comparison


@dataclass(frozen=True)
class Share:
    """What one group gets of a round: its units, and for each column the warehouse of each of its rows. `most` is the largest share
    of any group (so that all make the same number of micro-batches), `elements` the length of each column over the whole round."""

    units: Array
    where: dict[str, Array]
    most: int
    round_units: int
    elements: dict[str, int]
    epoch: int
    last: bool


@dataclass(frozen=True)
class Round:
    """What a controller decided: the units that each group gets next."""

    epoch: int
    parts: tuple[Array, ...]
    last: bool


@dataclass(frozen=True)
class Reader:
    """What a controller needs to know of its node-state. `reads` are (column, level, writer)."""

    node: str
    reads: tuple[tuple[str, int, str], ...]
    unit_level: int
    row_level: int
    whole: bool  # per = batch: one unit holds all rows
    groups: int
    chunk: int
    balance: bool
    update: bool = False
    epochs: int = 1
    mini_batch: int = 0  # rows; 0: all
    seed: int = 0

    @property
    def by_arrival(self) -> bool:
        """Whether what is decided depends on the order in which rows come: batches are cut from what is there. All else (all rows at once,
        or an update's mini-batches in their order) would be decided again alike: who writes a row again writes it to its warehouse."""
        return self.chunk > 0 and not self.update


def readers(plan: Plan) -> list[Reader]:
    """One for each controller of the plan. Who compares log-probabilities reads those as drawn too, declared or not."""
    graph, found, compared = plan.graph, [], comparison(plan)
    balanced = {e.dst for e in graph.samples() if str(e.attributes.get("balance", "")) == "tokens"}
    for controller in plan.docks.controllers:
        node = graph.node(controller.node)
        update = node.verb == "update"
        reads = [(c, graph.column(c).level, graph.writer(c).name) for c in node.reads]
        if compared and compared.node == node.name and compared.column not in node.reads:
            reads.append((compared.column, graph.column(compared.response).level, graph.writer(compared.response).name))
        found.append(
            Reader(
                node=node.name,
                reads=tuple(reads),
                unit_level=graph.unit_level(node),
                row_level=graph.level(node),
                whole=node.per == "batch",
                groups=controller.groups,
                chunk=controller.chunk,
                balance=node.name in balanced,
                update=update,
                epochs=int(node.number("epochs", 1)),
                mini_batch=int(node.number("mini_batch", 0)),
                seed=plan.deploy.run.seed,
            )
        )
    return found


def home(plan: Plan, host: int, index: int) -> int:
    """The warehouse that a process of a host writes to, the `index`-th of its kind: its host's take turns."""
    near = [w for w, at in enumerate(plan.docks.warehouses) if at == host]
    return near[index % len(near)] if near else 0


def expand(units: Array, unit_level: int, level: int, fan: int) -> Array:
    """The rows of `level` that belong to `units`, in order: descendants, or the ancestor of each unit."""
    if level == unit_level:
        return units
    if level > unit_level:
        return np.asarray((units[:, None] * fan + np.arange(fan)).reshape(-1))
    return units // fan


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
    """What a controller knows of one iteration. Arrays are by row of the column's level; `where` is -1 until the row is there."""

    prompts: int
    fan: int
    units: int
    where: dict[str, Array]
    lengths: dict[str, Array]
    dealt: Array
    shares: list[list[Share]]  # by group
    rounds: deque[tuple[int, Array]] = field(default_factory=deque)  # of an update: (epoch, units), in order


class Controller:
    """The metadata of one node-state: which rows are ready, where they lie, who gets them."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.books: dict[str, Book] = {}

    def open(self, key: str, iteration: int, prompts: int, fan: int) -> None:
        """Begins an iteration of `prompts` prompts with `fan` responses each."""
        reader = self.reader
        counts = (prompts, prompts * fan)
        units = 1 if reader.whole else counts[reader.unit_level]
        book = Book(
            prompts=prompts,
            fan=fan,
            units=units,
            where={c: np.full(counts[level], -1, np.int32) for c, level, _ in reader.reads},
            lengths={c: np.zeros(counts[level], np.int64) for c, level, _ in reader.reads},
            dealt=np.zeros(units, bool),
            shares=[[] for _ in range(reader.groups)],
        )
        if reader.update:
            size = reader.mini_batch or units
            for epoch in range(reader.epochs):
                order = np.argsort(noise.keys(reader.seed, iteration, epoch, np.arange(units)), kind="stable")
                book.rounds.extend((epoch, np.sort(order[i : i + size])) for i in range(0, units, size))
        self.books[key] = book

    def close(self, key: str) -> None:
        self.books.pop(key, None)

    def heard(self, key: str, column: str, rows: Array, lengths: Array, warehouse: int) -> list[Round]:
        """Rows of a column have come to lie in a warehouse. What that decides: to be given to `hand`, in order, after it was kept safe
        where it depends on what came first (Reader.by_arrival)."""
        book = self.books.get(key)
        if book is None or column not in book.where:
            return []
        book.lengths[column][rows] = lengths
        book.where[column][rows] = warehouse
        return self._deal(book)

    def restore(self, key: str, found: Iterable[tuple[str, Array, Array, int]], rounds: Iterable[Round]) -> list[Round]:
        """Takes the place of a controller that had heard of `found` (column, rows, lengths, warehouse) and decided `rounds` (those that
        were kept), in an iteration just opened. What else is decided now, as `heard` tells it."""
        book = self.books[key]
        for column, rows, lengths, warehouse in found:
            if column in book.where:
                book.lengths[column][rows] = lengths
                book.where[column][rows] = warehouse
        for round in rounds:
            if self.reader.update:
                book.rounds.popleft()
            book.dealt[np.concatenate(round.parts)] = True
            self.hand(key, round)
        return self._deal(book)

    def hand(self, key: str, round: Round) -> None:
        """Makes the shares of a round, for `take`."""
        book, reader = self.books[key], self.reader
        units = np.concatenate(round.parts)
        most = max(map(len, round.parts))
        elements = {c: int(book.lengths[c][self._rows(book, units, level)].sum()) for c, level, _ in reader.reads}
        for shares, part in zip(book.shares, round.parts, strict=True):
            where = {c: book.where[c][self._rows(book, part, level)] for c, level, _ in reader.reads}
            shares.append(Share(part, where, most, len(units), elements, round.epoch, round.last))

    def take(self, key: str, group: int, index: int) -> Share | None:
        """The group's share number `index`, None while there is none."""
        shares = self.books[key].shares[group]
        return shares[index] if index < len(shares) else None

    def missing(self, key: str) -> str:
        """What the node waits for, in words."""
        parts = []
        for column, _, writer in self.reader.reads:
            rows = np.flatnonzero(self.books[key].where[column] < 0)
            if len(rows):
                first = ", ".join(map(str, rows[:5])) + (", ..." if len(rows) > 5 else "")
                total = len(self.books[key].where[column])
                parts.append(f"`{column}` from `{writer}` ({len(rows)} of {total} rows missing: {first})")
        return "; ".join(parts) or "nothing: all its rows are there"

    def _rows(self, book: Book, units: Array, level: int) -> Array:
        return rows_of(units, self.reader, level, book.fan, book.prompts)

    def _ready(self, book: Book) -> Array:
        ready = np.ones(book.units, bool)
        for column, level, _ in self.reader.reads:
            there = book.where[column] >= 0
            if self.reader.whole:
                ready &= there.all()
            else:
                ready &= there[expand(np.arange(book.units), self.reader.unit_level, level, book.fan)].reshape(book.units, -1).all(axis=1)
        return ready

    def _deal(self, book: Book) -> list[Round]:
        ready, found = self._ready(book), []
        if self.reader.update:
            while book.rounds and ready[book.rounds[0][1]].all():
                epoch, units = book.rounds.popleft()
                found.append(Round(epoch, self._parts(book, units), not book.rounds))
            return found
        fresh = np.flatnonzero(ready & ~book.dealt)
        left = book.units - int(book.dealt.sum())
        chunk = self.reader.chunk or book.units
        while len(fresh) and len(fresh) >= min(chunk, left):
            units, fresh = fresh[:chunk], fresh[chunk:]
            book.dealt[units] = True
            left -= len(units)
            found.append(Round(0, self._parts(book, units), left == 0))
        return found

    def _parts(self, book: Book, units: Array) -> tuple[Array, ...]:
        """Which group gets which of the units."""
        reader = self.reader
        home = np.zeros(len(units), np.int32)
        weight = np.zeros(len(units), np.int64)
        if not reader.whole:
            for column, level, _ in sorted(reader.reads, key=lambda r: r[1]):  # the deepest column says where a unit is at home
                rows = expand(units, reader.unit_level, level, book.fan)
                home = book.where[column][rows].reshape(len(units), -1)[:, 0]
                weight += book.lengths[column][rows].reshape(len(units), -1).sum(axis=1)
        return tuple(deal(units, home, weight if reader.balance else None, reader.groups))


class Warehouse:
    """The rows of one host, by key and column."""

    def __init__(self, index: int, host: int) -> None:
        self.index, self.host = index, host
        self._segments: dict[tuple[str, str], list[tuple[Array, Column]]] = {}
        self._merged: dict[tuple[str, str], tuple[Array, Column]] = {}
        self._rounds: dict[str, dict[str, list[Round]]] = {}  # by key, then by node
        self.traffic: dict[str, dict[str, int]] = {}  # by key, then by `node put`, `node get` and `node get away`: bytes

    def put(self, key: str, node: str, columns: Mapping[str, tuple[Array, Column]]) -> None:
        """Keeps the rows that `node` wrote: for each column the row numbers and the data."""
        for name, (rows, column) in columns.items():
            self._segments.setdefault((key, name), []).append((rows, column))
            self._merged.pop((key, name), None)
            self._count(key, f"{node} put", column.nbytes)

    def keep(self, key: str, node: str, rounds: Sequence[Round]) -> None:
        """Keeps what the controller of a node-state decided."""
        self._rounds.setdefault(key, {}).setdefault(node, []).extend(rounds)

    def known(self, key: str) -> tuple[list[tuple[str, Array, Array, int]], dict[str, list[Round]]]:
        """All that a controller was told and decided, as `Controller.restore` takes it: the rounds by node."""
        segments = [(n, rows, column.lengths, self.index) for (k, n), parts in self._segments.items() if k == key for rows, column in parts]
        return segments, self._rounds.get(key, {})

    def get(self, key: str, node: str, host: int, wanted: Mapping[str, Array]) -> dict[str, Column]:
        """The rows asked for, in the order asked for; `host` is the reader's."""
        out = {}
        for name, rows in wanted.items():
            position, column = self._merge(key, name)
            out[name] = column.take(position[rows])
            self._count(key, f"{node} get" if host == self.host else f"{node} get away", out[name].nbytes)
        return out

    def whole(self, key: str) -> dict[str, tuple[Array, Column]]:
        """All rows of an iteration: for each column the row numbers and the data."""
        found = {}
        for name in [n for k, n in self._segments if k == key]:
            position, column = self._merge(key, name)
            rows = np.flatnonzero(position >= 0)
            found[name] = (rows, column.take(position[rows]))
        return found

    def drop(self, key: str) -> dict[str, int]:
        """Forgets an iteration; what it moved, in bytes."""
        for pair in [p for p in self._segments if p[0] == key]:
            del self._segments[pair]
            self._merged.pop(pair, None)
        self._rounds.pop(key, None)
        return self.traffic.pop(key, {})

    def _count(self, key: str, what: str, size: int) -> None:
        counts = self.traffic.setdefault(key, {})
        counts[what] = counts.get(what, 0) + size

    def _merge(self, key: str, name: str) -> tuple[Array, Column]:
        """(position of each row in the merged column, the column); segments are merged once, when they are first read."""
        pair = (key, name)
        if pair not in self._merged:
            segments = self._segments[pair]
            rows = np.concatenate([r for r, _ in segments])
            column = concatenate([c for _, c in segments])
            position = np.full(int(rows.max()) + 1, -1, np.int64)
            position[rows] = np.arange(len(rows))  # a later write of the same row wins
            self._merged[pair] = (position, column)
            self._segments[pair] = [(rows, column)]
        return self._merged[pair]


@dataclass(frozen=True)
class Batch:
    """The rows of a share, at the node's row level: row numbers, and each column with one entry a row."""

    share: Share
    rows: Array
    columns: dict[str, Column]


def rows_of(units: Array, reader: Reader, level: int, fan: int, prompts: int) -> Array:
    """The rows of `level` that belong to a reader's units, ascending, none twice."""
    if reader.whole:
        return np.arange((prompts, prompts * fan)[level]) if len(units) else units
    rows = expand(units, reader.unit_level, level, fan)
    return np.unique(rows) if level < reader.unit_level else rows


def assemble(share: Share, reader: Reader, fan: int, prompts: int, fetched: Mapping[str, Column]) -> Batch:
    """Lays fetched columns (one entry a row of their own level) out by the node's rows."""
    rows = rows_of(share.units, reader, reader.row_level, fan, prompts)
    columns = {}
    for name, level, _ in reader.reads:
        column = fetched[name]
        if level < reader.row_level:
            column = column.take(np.searchsorted(rows_of(share.units, reader, level, fan, prompts), rows // fan))
        columns[name] = column
    return Batch(share, rows, columns)


def split(where: Array) -> Iterable[tuple[int, Array]]:
    """(warehouse, the positions of its rows) for each warehouse that holds some."""
    for warehouse in np.unique(where):
        yield int(warehouse), np.flatnonzero(where == warehouse)
