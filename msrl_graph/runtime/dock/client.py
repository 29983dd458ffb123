"""The client through which ranks and function hosts use the dock.

The client also executes the instruction stream of its process: the ordered instructions that the compiler has planned
for the process's pool. A *task* is one iteration of training or of an evaluation, and its *key* is a text such as
"train/3" (process/task.py). A *share* consists of the rows that a controller assigns to one data-parallel group.

Invariant: all data that a client reads or writes belongs to the current task, and the client forgets the data at the
end of the task. A share is requested by its number, so the replacement of a dead process gets the same shares.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ...analysis.rowsets import Numbers
from ...ir.instruction import Instruction, Walk, Walker
from ..data.columns import Array, ColumnData, ColumnRows, concatenate, concatenate_rows
from ..process import fault_points, log, row_progress
from ..process.task import Task
from ..process.task_report import Event, Report
from .channel import Address
from .controller import ControllerRequest, RefillRequest, ShareRequest
from .messages import Batch, DockAddress, Share
from .methods import DOCK_METHODS
from .readers import NodeReads
from .rpc import RpcConnections
from .segments import Activity, Room, Segments
from .warehouse import SPLIT, payload_bytes, select_rows

T = TypeVar("T")
PROGRESS_INTERVAL = 1.0  # seconds between two messages about progress
DOCK = "dock"  # the trace track for a process's traffic with the dock, next to its work


class Client:
    """The dock client of the process with the name `process`.

    The client writes to the warehouse of its host, or to the first warehouse if its host has none.
    """

    def __init__(self, process: str, readers: list[NodeReads], dock_address: DockAddress, host: int) -> None:
        self.process = process
        self.host = host
        self.dock_address = dock_address
        self.readers = {reader.node: reader for reader in readers}
        self.lines = RpcConnections(look_up_address, host, dock_address.key, DOCK_METHODS)
        self.home = dock_address.hosts.index(host) if host in dock_address.hosts else 0
        self.segments: Segments | None = None  # of this host; None until they are first needed
        self.activity: Activity | None = None
        # By node: the task key, the number of shares that were returned, and shares that arrived in advance.
        self.shares_by_node: dict[str, tuple[str, int, list[Share]]] = {}
        self.known: dict[str, list[ColumnRows]] = {}  # by column: rows of the task from other hosts
        self.loads: dict[str, list[int]] = {}  # by node: the tokens of each share
        self.moved: dict[str, int] = {}  # by `node put`, `node get`, `node get away` and `node get here`: bytes
        self.pending: list[Any] = []
        self.written = 0  # segments so far
        self.events: list[Event] = []  # of the task: waits for answers and for rows from other hosts
        self.wait_seconds = 0.0  # seconds spent waiting for shares
        self.move_seconds = 0.0  # seconds spent fetching and writing rows
        self._activity = ""
        self._sent_at = 0.0  # when a process of a host without a warehouse last sent its progress
        row_progress.listen(self.report_computed_rows)

    def _reach(self, step: str, task: Task) -> None:
        fault_points.reach(self.process, f"{step} in {task.key}")

    def _connection(self, warehouse: int) -> Any:
        return self.lines.connection_to(self.dock_address.warehouses[warehouse])

    def _local_segments(self) -> Segments | None:
        """Return the segments (files of rows) of this host; None if it has no warehouse."""
        if self.segments is None and self.dock_address.hosts[self.home] == self.host:
            room = Room(Path(self._connection(self.home).send("folder").get()))
            room.join()
            self.segments = Segments(room)
            self.activity = Activity(room, self.process)
        return self.segments

    def report_activity(self, activity: str) -> None:
        """Report to the dock what this process begins to do; do not wait for an answer."""
        log.set_node(activity)
        self._activity = activity
        if self._local_segments() is None:
            self.pending.append(self._connection(self.home).send("at", self.process, activity, 0, 0, ""))
        elif self.activity is not None:
            self.activity.set_activity(activity)

    def report_computed_rows(self, rows: int, total: int, where: str = "") -> None:
        """Report to the dock that this process has computed `rows` of `total` rows.

        `total` is the number of rows of the share. `where` is a text with more detail, such as the turn of an episode.
        """
        if self.activity is not None:
            self.activity.set_computed_rows(rows, total, where)
        elif self._activity and time.monotonic() - self._sent_at >= PROGRESS_INTERVAL:
            self._sent_at = time.monotonic()
            self.pending.append(
                self._connection(self.home).send("at", self.process, self._activity, rows, total, where)
            )

    def _ask(self, question: ControllerRequest[T]) -> T:
        """Send a question to a node's controller; wait for the answer and return it."""
        home = self._connection(self.home)
        line = self.lines.connection_to(self.dock_address.controllers[question.node])
        if line is not home:
            home.flush()
        start = time.perf_counter()
        answer: T = line.send(type(question).__name__, question).get()
        details: dict[str, str | int] = {
            "asked": self.dock_address.controllers[question.node],
            "group": question.group_index,
        }
        self.events.append(Event.since(start, f"{question.node} waits", DOCK, **details))
        return answer

    def take_share(self, node: str, task: Task, group: int, at_once: bool = False) -> Batch:
        """Wait for a data-parallel group's next share of a node's rows; return it.

        The result contains the values of the rows. `at_once` means that this process starts to work on the share
        immediately, so the client reports the node as the activity of the process.
        """
        reader = self.readers[node]
        start = time.perf_counter()
        key, count, shares = self.shares_by_node.get(node, ("", 0, []))
        if key != task.key:
            count = 0
            shares = []
        shares = shares or self._ask(ShareRequest(node, task.key, group, count))
        share = shares[0]
        if at_once and len(share.units):
            self.report_activity(f"{node} in {task.key}")
        self._reach(f"share of {node}", task)
        self.shares_by_node[node] = (task.key, count + 1, shares[1:])
        share_arrived = time.perf_counter()
        self.wait_seconds += share_arrived - start
        numbers = reader.numbers(task)
        asked_for = list_wanted_rows(share, reader, numbers)
        batch = assemble_batch(share, reader, numbers, asked_for, self._fetch(node, task, share, asked_for))
        tokens = [
            times * int(batch.columns[column].lengths.sum())
            for column, times in reader.tokens.items()
            if column in batch.columns
        ]
        self.loads.setdefault(node, []).append(sum(tokens))
        self._reach(f"rows of {node}", task)
        self.move_seconds += time.perf_counter() - share_arrived
        return batch

    def _fetch(self, node: str, task: Task, share: Share, asked_for: Mapping[str, Array]) -> dict[str, ColumnData]:
        """Return, for each column, the values of the rows that a share needs.

        `asked_for` has the numbers of these rows for each column. Rows on this host are returned as views of segments
        (files of rows). Rows on other hosts are fetched from the warehouses of these hosts, with one request to each
        warehouse.
        """
        parts: dict[str, list[tuple[Array, ColumnData]]] = {}  # by column: positions and their values
        asked: dict[int, dict[str, dict[str, Array]]] = {}  # by warehouse, segment and column
        order: dict[tuple[int, str, str], Array] = {}
        away = set()
        for name, rows in asked_for.items():
            parts[name] = []
            if (known_column := _find_rows(rows, self.known.get(name, []))) is not None:
                parts[name].append((np.arange(len(rows)), known_column))
                self._count(f"{node} get here", known_column)
                continue
            for index, positions in split_by_place(share.where[name]):
                place = share.places[index]
                if place.warehouse == self.home and (local_segments := self._local_segments()) is not None:
                    column = select_rows(local_segments.read(task.key, place.segment)[name], rows[positions])
                    parts[name].append((positions, column))
                    self._count(f"{node} get", column)
                else:
                    away.add(name)
                    asked.setdefault(place.warehouse, {}).setdefault(place.segment, {})[name] = rows[positions]
                    order[place.warehouse, place.segment, name] = positions
        start = time.perf_counter()
        answers = {
            warehouse_index: self._connection(warehouse_index).send("get", task.key, segments)
            for warehouse_index, segments in asked.items()
        }
        for warehouse, answer in answers.items():
            size = 0
            for segment, columns in answer.get().items():
                for name, column in columns.items():
                    parts[name].append((order[warehouse, segment, name], column))
                    self._count(f"{node} get away", column)
                    size += column.nbytes
            host = self.dock_address.hosts[warehouse]
            # All requests were sent at once, so these events overlap.
            names = ", ".join(sorted({name for columns in asked[warehouse].values() for name in columns}))
            details: dict[str, str | int] = {"node": node, "host": host, "bytes": size, "columns": names}
            self.events.append(Event.since(start, f"rows from host {host}", f"{DOCK}, host {host}", **details))
        fetched = {name: _assemble_column(column_parts) for name, column_parts in parts.items()}
        for name in away:
            self.known.setdefault(name, []).append(ColumnRows(asked_for[name], fetched[name]))
        return fetched

    def _count(self, counter: str, column: ColumnData) -> None:
        self.moved[counter] = self.moved.get(counter, 0) + column.nbytes

    def again(self, node: str, task: Task, rounds: int) -> bool:
        """Return whether the filter `node` needs more prompts.

        `rounds` is the number of rounds of prompts that were already drawn.
        """
        start = time.perf_counter()
        needed = self._ask(RefillRequest(node, task.key, rounds))
        self.wait_seconds += time.perf_counter() - start
        return needed

    def walk(
        self,
        pool: str,
        instructions: Sequence[Instruction],
        task: Task,
        walker: Walker,
        around: Callable[[Instruction], AbstractContextManager[None]] = lambda step: nullcontext(),
        begin: int = 0,
    ) -> None:
        """Execute the instructions of a pool.

        For each instruction, the method calls `around` with the instruction, and executes the instruction inside the
        context manager that `around` returns. `walker` has one method for each kind of instruction; this method
        executes all instructions of the kind. The first `begin` instructions were already executed and are skipped.
        """
        walk = Walk({pool: instructions}, begin)
        while (step := walk.step(pool)) is not None:
            self._reach(f"{step.op} {step.node}", task)
            with around(step):
                walk.advance(pool, walker)

    def read_all_rows(self, task: Task, columns: Collection[str] | None = None) -> dict[str, ColumnRows]:
        """Return, for each column, all rows of a task.

        The rows of each column are in ascending order of their numbers. If `columns` is given, the result has only
        these columns.
        """
        asked = [
            self._connection(warehouse).send("whole", task.key, columns)
            for warehouse in range(len(self.dock_address.warehouses))
        ]
        parts: list[dict[str, ColumnRows]] = [answer.get() for answer in asked]
        rows_by_column = {}
        for name in {column for part in parts for column in part}:
            merged = concatenate_rows([part[name] for part in parts if name in part])
            rows_by_column[name] = merged.take(np.argsort(merged.rows))
        return rows_by_column

    def put_rows(self, node: str, task: Task, pieces: Mapping[str, ColumnRows], asks: bool = False) -> None:
        """Store the rows that a node made; `pieces` has the rows by column.

        The rows go to the shared memory of this host, or to other hosts if there is no space on this host. The client
        announces the rows to the warehouse without waiting for an answer. `asks` means that this thread sends another
        message right after this call, to request rows or to end the task. The announcement then travels with that
        message.
        """
        start = time.perf_counter()
        self._reach(f"before put of {node}", task)
        segments = self._local_segments()
        for warehouse, name, segment_pieces in self._place_segments(node, task, pieces):
            if warehouse == self.home and segments is not None:
                segments.write(task.key, name, node, segment_pieces)
                self.pending.append(self._connection(warehouse).send("put", task.key, node, name, None, wait=asks))
            else:
                self.pending.append(self._connection(warehouse).send("put", task.key, node, name, dict(segment_pieces)))
        for piece in pieces.values():
            self._count(f"{node} put", piece.column)
        self.move_seconds += time.perf_counter() - start
        self._reach(f"after put of {node}", task)

    def _place_segments(
        self, node: str, task: Task, pieces: Mapping[str, ColumnRows]
    ) -> Iterator[tuple[int, str, Mapping[str, ColumnRows]]]:
        """Choose warehouses for a node's rows; yield what to write into each warehouse.

        Each item has the index of a warehouse, the name of a segment (a file), and the rows of the segment by column.
        All rows go to one segment in the warehouse of this host if there is space. If not, the rows go to other
        warehouses, and are split if no warehouse has space for all of them. Waits until there is space.
        """
        self.written += 1
        name = f"{self.process.replace(' ', '-')}.{self.written:06}.{os.getpid()}"
        if not self.dock_address.capacity:
            yield self.home, name, pieces
            return
        single = len(pieces) == 1 and all(len(piece.rows) < 2 for piece in pieces.values())
        start = time.perf_counter()
        warehouse = self._connection(self.home).send("place", task.key, node, name, payload_bytes(pieces), single).get()
        self.events.append(Event.since(start, f"{node} waits for place", f"{DOCK}, place", bytes=payload_bytes(pieces)))
        if warehouse != SPLIT:
            yield warehouse, name, pieces
            return
        for part in _split_pieces(pieces):
            yield from self._place_segments(node, task, part)

    def report_rows_done(self, node: str, task: Task, rows: int) -> None:
        """Report that this process has processed `rows` rows for a node.

        Only for a node that reads rows but writes none, such as an update. For all other nodes, the dock counts the
        rows that the nodes write.
        """
        if self._local_segments() is not None and self.activity is not None:
            self.activity.add_done_rows(task.key, node, rows)

    def flush(self, task: Task, report: Report) -> None:
        """Wait until the dock has answered all messages of a task; forget the task's data.

        Raises the errors in the answers. `report` receives the number of bytes that were moved, the number of tokens of
        each share, and an event for each time that the process waited.
        """
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


def look_up_address(name: str) -> Address:
    """Look up in Ray the address of the process with this name.

    Waits if the process is restarting.
    """
    import ray

    address: Address = ray.get(ray.get_actor(name).address.remote())
    return address


def _split_pieces(pieces: Mapping[str, ColumnRows]) -> Iterator[Mapping[str, ColumnRows]]:
    """Split rows that are too large for one warehouse, and yield the parts.

    `pieces` has the rows by column. Each part is one column. If there is only one column, the two parts are the halves
    of its rows.
    """
    if len(pieces) > 1:
        yield from ({column: piece} for column, piece in pieces.items())
        return
    ((column, piece),) = pieces.items()
    for positions in np.array_split(np.arange(len(piece.rows)), 2):
        yield {column: piece.take(positions)}


def _assemble_column(parts: Sequence[tuple[Array, ColumnData]]) -> ColumnData:
    """Merge fragments of one column.

    Each item of `parts` is a pair: the positions in the result at which to put the rows of a fragment, and the
    fragment.
    """
    if len(parts) == 1:
        return parts[0][1]
    column = concatenate([part for _, part in parts])
    inverse = np.empty(len(column), np.int64)
    inverse[np.concatenate([positions for positions, _ in parts])] = np.arange(len(column))
    return column.take(inverse)


def _find_rows(rows: Array, pieces: Sequence[ColumnRows]) -> ColumnData | None:
    """Return the values of `rows`, in order, from the first piece with all these rows.

    Returns None if no piece has all these rows.
    """
    for piece in pieces:
        order = np.argsort(piece.rows)
        positions = np.searchsorted(piece.rows[order], rows)
        if len(rows) and positions.max() < len(order) and (piece.rows[order[positions]] == rows).all():
            return piece.column.take(order[positions])
    return None


def list_wanted_rows(share: Share, reader: NodeReads, numbers: Numbers) -> dict[str, Array]:
    """Return, for each column that a node reads, the rows that a share needs.

    The row numbers of each column are ascending and unique.
    """
    return (
        {read.column: np.unique(numbers.above(share.rows, reader.rows, read.rows)) for read in reader.reads}
        if len(share.rows)
        else {}
    )


def assemble_batch(
    share: Share, reader: NodeReads, numbers: Numbers, asked: Mapping[str, Array], fetched: Mapping[str, ColumnData]
) -> Batch:
    """Arrange fetched columns so that each column has one entry per row of the share.

    `fetched` has the values of the fetched rows by column, and `asked` has the numbers of these rows (the result of
    `list_wanted_rows`). Example: if the rows are two responses to each of two prompts, a column of prompts has four
    entries, and each prompt appears twice.
    """
    columns = {}
    for read in reader.reads if asked else ():
        positions = np.searchsorted(asked[read.column], numbers.above(share.rows, reader.rows, read.rows))
        unchanged = np.array_equal(positions, np.arange(len(asked[read.column])))
        columns[read.column] = fetched[read.column] if unchanged else fetched[read.column].take(positions)
    return Batch(share, share.rows, columns)


def split_by_place(where: Array) -> Iterable[tuple[int, Array]]:
    """Yield each location index in `where`, and the positions where the index occurs."""
    for place in np.unique(where):
        yield int(place), np.flatnonzero(where == place)
