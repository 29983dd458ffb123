"""The way of ranks and function hosts into the dock, and through their streams.

Invariant: what is read or written is of the task at hand, and is forgotten with it. A share is asked for by its number,
so that who takes a dead process's place is given the same ones.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ...ir.instruction import Instruction, Walk, Walker
from ...ir.rowsets import Numbers
from ..data.columns import Array, ColumnData, ColumnRows, concatenate, joined
from ..process import fault_points, log, row_progress
from ..process.task import Task
from ..process.task_report import Event, Report
from .channel import Address
from .controller import ControllerRequest, RefillRequest, ShareRequest
from .messages import Batch, DockAddress, Share
from .readers import NodeReads
from .rpc import RpcConnections
from .segments import Activity, Room, Segments
from .warehouse import SPLIT, payload, taken

T = TypeVar("T")
OFTEN = 1.0  # seconds between two messages about progress
DOCK = "dock"  # what a process has with the dock beside its work, in the trace


class Client:
    """A process's way into the dock: `process` is its name. What it writes goes to its host's warehouse, or where there
    is none, to the first one."""

    def __init__(self, process: str, readers: list[NodeReads], way: DockAddress, host: int) -> None:
        self.process = process
        self.host = host
        self.way = way
        self.readers = {r.node: r for r in readers}
        self.lines = RpcConnections(found, host, way.key)
        self.home = way.hosts.index(host) if host in way.hosts else 0
        self.segments: Segments | None = None  # of this host, once it is asked for
        self.activity: Activity | None = None
        # By node: the task, how many of its shares were handed on, and those that have come beside them.
        self.taken: dict[str, tuple[str, int, list[Share]]] = {}
        self.known: dict[str, list[ColumnRows]] = {}  # by column: the rows of the task that came from other hosts
        self.loads: dict[str, list[int]] = {}  # by node: the tokens of each share
        self.moved: dict[str, int] = {}  # by `node put`, `node get`, `node get away` and `node get here`: bytes
        self.pending: list[Any] = []
        self.written = 0  # segments so far
        self.events: list[Event] = []  # of the task: waits for answers and for rows of other hosts
        self.waited = 0.0  # seconds spent waiting for shares
        self.moving = 0.0  # seconds spent fetching and writing rows
        self._what, self._sent = "", 0.0  # what it does, and when a host without a warehouse last sent how far it is
        row_progress.listen(self.computed)

    def _reach(self, what: str, task: Task) -> None:
        fault_points.reach(self.process, f"{what} in {task.key}")

    def _line(self, warehouse: int) -> Any:
        return self.lines.to(self.way.warehouses[warehouse])

    def _here(self) -> Segments | None:
        """The segments of this host, None where it has no warehouse."""
        if self.segments is None and self.way.hosts[self.home] == self.host:
            room = Room(Path(self._line(self.home).send("folder").get()))
            room.join()
            self.segments, self.activity = Segments(room), Activity(room, self.process)
        return self.segments

    def at(self, what: str) -> None:
        """Tells what this process begins to do; nobody waits for it."""
        log.at(what)
        self._what = what
        if self._here() is None:
            self.pending.append(self._line(self.home).send("at", self.process, what))
        elif self.activity is not None:
            self.activity.say(what)

    def computed(self, rows: int, of: int, where: str = "") -> None:
        """Reports how many rows of its share this process has computed."""
        if self.activity is not None:
            self.activity.computed(rows, of, where)
        elif self._what and time.monotonic() - self._sent >= OFTEN:
            self._sent = time.monotonic()
            self.pending.append(self._line(self.home).send("at", self.process, self._what, rows, of, where))

    def _ask(self, question: ControllerRequest[T]) -> T:
        """The answer of a node's controller, as soon as it has one."""
        home = self._line(self.home)
        line = self.lines.to(self.way.controllers[question.node])
        if line is not home:
            home.flush()
        start = time.perf_counter()
        answer: T = line.send("ask", question).get()
        of: dict[str, str | int] = {"asked": self.way.controllers[question.node], "group": question.of_group}
        self.events.append(Event.since(start, f"{question.node} waits", DOCK, **of))
        return answer

    def take(self, node: str, task: Task, group: int, at_once: bool = False) -> Batch:
        """The group's next share with its rows; `at_once`: this process begins with it now."""
        reader = self.readers[node]
        start = time.perf_counter()
        key, count, shares = self.taken.get(node, ("", 0, []))
        if key != task.key:
            count = 0
            shares = []
        shares = shares or self._ask(ShareRequest(node, task.key, group, count))
        share = shares[0]
        if at_once and len(share.units):
            self.at(f"{node} in {task.key}")
        self._reach(f"share of {node}", task)
        self.taken[node] = (task.key, count + 1, shares[1:])
        told = time.perf_counter()
        self.waited += told - start
        numbers = reader.numbers(task)
        asked_for = wanted(share, reader, numbers)
        batch = assemble(share, reader, numbers, asked_for, self._fetched(node, task, share, asked_for))
        tokens = [
            times * int(batch.columns[c].lengths.sum()) for c, times in reader.tokens.items() if c in batch.columns
        ]
        self.loads.setdefault(node, []).append(sum(tokens))
        self._reach(f"rows of {node}", task)
        self.moving += time.perf_counter() - told
        return batch

    def _fetched(self, node: str, task: Task, share: Share, asked_for: Mapping[str, Array]) -> dict[str, ColumnData]:
        """The rows of a share, by column: those of this host are views of its segments, others come from theirs, with
        one request to each."""
        parts: dict[str, list[tuple[Array, ColumnData]]] = {}  # by column: positions, and what belongs there
        asked: dict[int, dict[str, dict[str, Array]]] = {}  # by warehouse, segment and column
        order: dict[tuple[int, str, str], Array] = {}
        away = set()
        for name, rows in asked_for.items():
            parts[name] = []
            if (mine := _found(rows, self.known.get(name, []))) is not None:
                parts[name].append((np.arange(len(rows)), mine))
                self._count(f"{node} get here", mine)
                continue
            for index, positions in split(share.where[name]):
                place = share.places[index]
                if place.warehouse == self.home and (here := self._here()) is not None:
                    column = taken(here.read(task.key, place.segment)[name], rows[positions])
                    parts[name].append((positions, column))
                    self._count(f"{node} get", column)
                else:
                    away.add(name)
                    asked.setdefault(place.warehouse, {}).setdefault(place.segment, {})[name] = rows[positions]
                    order[place.warehouse, place.segment, name] = positions
        start = time.perf_counter()
        answers = {w: self._line(w).send("get", task.key, segments) for w, segments in asked.items()}
        for warehouse, answer in answers.items():
            size = 0
            for segment, columns in answer.get().items():
                for name, column in columns.items():
                    parts[name].append((order[warehouse, segment, name], column))
                    self._count(f"{node} get away", column)
                    size += column.nbytes
            host = self.way.hosts[warehouse]
            # Beside each other: all are asked at once.
            names = ", ".join(sorted({name for columns in asked[warehouse].values() for name in columns}))
            of: dict[str, str | int] = {"node": node, "host": host, "bytes": size, "columns": names}
            self.events.append(Event.since(start, f"rows from host {host}", f"{DOCK}, host {host}", **of))
        fetched = {name: _laid(some) for name, some in parts.items()}
        for name in away:
            self.known.setdefault(name, []).append(ColumnRows(asked_for[name], fetched[name]))
        return fetched

    def _count(self, what: str, column: ColumnData) -> None:
        self.moved[what] = self.moved.get(what, 0) + column.nbytes

    def again(self, node: str, task: Task, rounds: int) -> bool:
        """Whether after so many rounds of prompts the filter `node` needs another one."""
        start = time.perf_counter()
        found = self._ask(RefillRequest(node, task.key, rounds))
        self.waited += time.perf_counter() - start
        return found

    def walk(
        self,
        pool: str,
        instructions: Sequence[Instruction],
        task: Task,
        walker: Walker,
        around: Callable[[Instruction], AbstractContextManager[None]] = lambda step: nullcontext(),
        begin: int = 0,
    ) -> None:
        """Goes through a pool's stream, each instruction within `around`; `begin`: how many were done before."""
        walk = Walk({pool: instructions}, begin)
        while (step := walk.step(pool)) is not None:
            self._reach(f"{step.op} {step.node}", task)
            with around(step):
                walk.advance(pool, walker)

    def whole(self, task: Task, columns: Collection[str] | None = None) -> dict[str, ColumnRows]:
        """All rows of a task by column, ascending; only some `columns`, or all."""
        asked = [self._line(w).send("whole", task.key, columns) for w in range(len(self.way.warehouses))]
        parts: list[dict[str, ColumnRows]] = [answer.get() for answer in asked]
        found = {}
        for name in {n for part in parts for n in part}:
            piece = joined([part[name] for part in parts if name in part])
            found[name] = piece.take(np.argsort(piece.rows))
        return found

    def put(self, node: str, task: Task, pieces: Mapping[str, ColumnRows], asks: bool = False) -> None:
        """Writes the rows that a node made, by column, into the memory of this host, and tells the warehouse; does not
        wait for it. `asks`: this thread asks for rows now, or ends the task, and tells it with that."""
        start = time.perf_counter()
        self._reach(f"before put of {node}", task)
        here = self._here()
        for warehouse, name, some in self._placed(node, task, pieces):
            if warehouse == self.home and here is not None:
                here.write(task.key, name, node, some)
                self.pending.append(self._line(warehouse).send("put", task.key, node, name, wait=asks))
            else:
                self.pending.append(self._line(warehouse).send("put", task.key, node, name, dict(some)))
        for piece in pieces.values():
            self._count(f"{node} put", piece.column)
        self.moving += time.perf_counter() - start
        self._reach(f"after put of {node}", task)

    def _placed(
        self, node: str, task: Task, pieces: Mapping[str, ColumnRows]
    ) -> Iterator[tuple[int, str, Mapping[str, ColumnRows]]]:
        """Where rows are to be written, and the name of the segment: at home, or where that is full with others who
        have place, in parts if need be. Waits for place."""
        self.written += 1
        name = f"{self.process.replace(' ', '-')}.{self.written:06}.{os.getpid()}"
        if not self.way.capacity:
            yield self.home, name, pieces
            return
        single = len(pieces) == 1 and all(len(p.rows) < 2 for p in pieces.values())
        start = time.perf_counter()
        found = self._line(self.home).send("place", task.key, node, name, payload(pieces), single).get()
        self.events.append(Event.since(start, f"{node} waits for place", f"{DOCK}, place", bytes=payload(pieces)))
        if found != SPLIT:
            yield found, name, pieces
            return
        for part in _halves(pieces):
            yield from self._placed(node, task, part)

    def did(self, node: str, task: Task, rows: int) -> None:
        """Tells that this process is done with so many more rows of a node that writes none."""
        if self._here() is not None and self.activity is not None:
            self.activity.did(task.key, node, rows)

    def flush(self, task: Task, report: Report) -> None:
        """Ends a task: raises what went wrong in its writes. Reports the bytes that it moved, the tokens of its
        shares, and what it waited for."""
        self._reach("flush", task)
        for answer in self.pending:
            answer.get()
        self._reach("end", task)
        report.moved = self.moved
        self.moved = {}
        report.loads = self.loads
        self.loads = {}
        report.events += self.events
        self.pending = []
        self.known = {}
        self.events = []
        if self.segments is not None:
            self.segments.forget(task.key)


def found(name: str) -> Address:
    """Where the process of a name listens, as Ray knows it; waits for one that is started again."""
    import ray

    address: Address = ray.get(ray.get_actor(name).address.remote())
    return address


def _halves(pieces: Mapping[str, ColumnRows]) -> Iterator[Mapping[str, ColumnRows]]:
    """Columns by themselves, or the halves of one."""
    if len(pieces) > 1:
        yield from ({column: piece} for column, piece in pieces.items())
        return
    ((column, piece),) = pieces.items()
    for some in np.array_split(np.arange(len(piece.rows)), 2):
        yield {column: piece.take(some)}


def _laid(parts: Sequence[tuple[Array, ColumnData]]) -> ColumnData:
    """Columns by their positions in one."""
    if len(parts) == 1:
        return parts[0][1]
    column = concatenate([part for _, part in parts])
    back = np.empty(len(column), np.int64)
    back[np.concatenate([positions for positions, _ in parts])] = np.arange(len(column))
    return column.take(back)


def _found(rows: Array, pieces: Sequence[ColumnRows]) -> ColumnData | None:
    """Those rows, in this order, where one of these pieces has them all."""
    for piece in pieces:
        order = np.argsort(piece.rows)
        at = np.searchsorted(piece.rows[order], rows)
        if len(rows) and at.max() < len(order) and (piece.rows[order[at]] == rows).all():
            return piece.column.take(order[at])
    return None


def wanted(share: Share, reader: NodeReads, numbers: Numbers) -> dict[str, Array]:
    """The rows of each column that a share needs, ascending, each once."""
    return (
        {r.column: np.unique(numbers.above(share.rows, reader.rows, r.rows)) for r in reader.reads}
        if len(share.rows)
        else {}
    )


def assemble(
    share: Share, reader: NodeReads, numbers: Numbers, asked: Mapping[str, Array], fetched: Mapping[str, ColumnData]
) -> Batch:
    """Lays fetched columns, of which these rows were `asked` for (`wanted`), out by the node's rows: of four responses
    to two prompts each prompt is there twice."""
    columns = {}
    for r in reader.reads if asked else ():
        place = np.searchsorted(asked[r.column], numbers.above(share.rows, reader.rows, r.rows))
        whole = np.array_equal(place, np.arange(len(asked[r.column])))
        columns[r.column] = fetched[r.column] if whole else fetched[r.column].take(place)
    return Batch(share, share.rows, columns)


def split(where: Array) -> Iterable[tuple[int, Array]]:
    """(place, the positions of its rows) for each place that holds some."""
    for place in np.unique(where):
        yield int(place), np.flatnonzero(where == place)
