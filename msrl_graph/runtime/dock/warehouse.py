"""A warehouse of the transfer dock: the rows of one host.

See arXiv:2507.19017, figure 4.

Invariant: writes are idempotent: a row that is written again replaces itself. The rows are in segments, which processes
of the host write and read without the warehouse. The warehouse knows the segments, sends rows to other hosts, and
stores the decisions and the news of its controllers, so that its replacement knows the same. Nothing here knows Ray or
torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from ..data.columns import Array, ColumnData, ColumnRows, Verdicts, concatenate_rows
from ..process.task import Task
from .messages import Round, RowLocation, RowsReady, WarehouseInventory
from .segments import Segments

_TASK = "task"  # the name of the note with a task
SPLIT = -1  # rows that fit into the warehouses only in parts


class Warehouse:
    """The rows of one host, by key and segment.

    It begins with the contents of the `segments`. With a `capacity`, it reserves space before rows are written, and
    never for more bytes of values than that.
    """

    def __init__(self, index: int, segments: Segments, capacity: int = 0) -> None:
        self.index = index
        self.segments = segments
        self.capacity = capacity
        self._promised: dict[str, dict[str, int]] = {}  # by key and by segment without its writer
        self.tasks: dict[str, Task] = {}  # those open
        self._names: dict[str, dict[str, None]] = {}  # by key, in the order of the puts
        self._rounds: dict[str, dict[str, list[Round]]] = {}  # by key, then by node
        for key in segments.tasks():
            notes = segments.list_notes(key)
            if _TASK in notes:
                self.tasks[key] = segments.read_note(key, _TASK, Task)
                self._names[key] = dict.fromkeys(segments.names(key))
                for name in (note for note in notes if note != _TASK):
                    node, rounds = segments.read_note(key, name, tuple[str, list[Round]])
                    self._rounds.setdefault(key, {}).setdefault(node, []).extend(rounds)
                for name in self._names[key] if capacity else ():
                    self._promised.setdefault(key, {})[_without_process(name)] = payload_bytes(segments.read(key, name))

    def open(self, task: Task) -> None:
        self.segments.write_note(task.key, _TASK, task)
        self.tasks[task.key] = task

    @property
    def free(self) -> int:
        return self.capacity - sum(map(sum, (sizes.values() for sizes in self._promised.values())))

    def promise(self, key: str, name: str, size: int) -> bool:
        """Reserve space for a segment of `size` bytes; return whether there is enough.

        The reservation also covers a replacement process that writes the segment again.
        """
        mine = self._promised.setdefault(key, {})
        if size - mine.get(_without_process(name), 0) > self.free:
            return False
        mine[_without_process(name)] = size
        return True

    def put(self, key: str, name: str) -> list[RowsReady]:
        """Note that a segment was written; return the news."""
        self._names.setdefault(key, {})[name] = None
        return self._news(key, name)

    def _news(self, key: str, name: str) -> list[RowsReady]:
        place = RowLocation(self.index, name)
        return [RowsReady.from_piece(column, piece, place) for column, piece in self.segments.read(key, name).items()]

    def keep(self, key: str, node: str, rounds: Sequence[Round]) -> None:
        """Store decisions of a node's controller."""
        stored_rounds = self._rounds.setdefault(key, {}).setdefault(node, [])
        self.segments.write_note(key, f"{node}.{len(stored_rounds):06}", (node, rounds))
        stored_rounds.extend(rounds)

    def known(self, task: Task) -> WarehouseInventory:
        """Return all that a rebuilt controller needs to know of a task."""
        news = [entry for name in self._names.get(task.key, ()) for entry in self._news(task.key, name)]
        return WarehouseInventory(task, news, self._rounds.get(task.key, {}))

    def get(self, key: str, wanted: Mapping[str, Mapping[str, Array]]) -> dict[str, dict[str, ColumnData]]:
        """Return the requested rows by segment and column, in the requested order."""
        return {
            name: {column: select_rows(pieces[column], rows) for column, rows in columns.items()}
            for name, columns in wanted.items()
            for pieces in [self.segments.read(key, name)]
        }

    def written(self, key: str) -> dict[str, int]:
        """Return the number of rows of a task that each node has written here."""
        rows: dict[str, dict[str, list[Array]]] = {}
        for name in self._names.get(key, ()):
            arrays_by_column = rows.setdefault(self.segments.writer(key, name), {})
            for column, piece in self.segments.read(key, name).items():
                arrays_by_column.setdefault(column, []).append(piece.rows)
        return {
            node: max(len(np.unique(np.concatenate(arrays))) for arrays in arrays_by_column.values())
            for node, arrays_by_column in rows.items()
            if arrays_by_column
        }

    def whole(self, key: str, columns: Collection[str] | None = None) -> dict[str, ColumnRows]:
        """Return all rows of a task by column, ascending; `columns` limits the columns."""
        pieces: dict[str, list[ColumnRows]] = {}
        for name in self._names.get(key, ()):
            for column, piece in self.segments.read(key, name).items():
                if columns is None or column in columns:
                    pieces.setdefault(column, []).append(piece)
        rows_by_column = {}
        for column, column_pieces in pieces.items():
            piece = concatenate_rows(column_pieces)
            order = np.argsort(piece.rows, kind="stable")
            rows = piece.rows[order]
            newest = np.append(np.diff(rows) != 0, True)[: len(rows)]  # a later write of the same row wins
            rows_by_column[column] = piece.take(order[newest])
        return rows_by_column

    def drop(self, key: str) -> None:
        """Forget a task."""
        self._names.pop(key, None)
        self._rounds.pop(key, None)
        self._promised.pop(key, None)
        self.tasks.pop(key, None)
        self.segments.drop(key)


def select_rows(piece: ColumnRows, rows: Array) -> ColumnData:
    """Select rows of a piece by their numbers; the piece's rows are ascending.

    Returns a view if the rows are adjacent, else a copy.
    """
    positions = np.searchsorted(piece.rows, rows)
    if (
        len(positions)
        and positions[-1] - positions[0] == len(positions) - 1
        and bool((positions[1:] > positions[:-1]).all())
    ):
        return piece.column.stretch(int(positions[0]), int(positions[-1]) + 1)
    return piece.column.take(positions)


def payload_bytes(pieces: Mapping[str, ColumnRows]) -> int:
    """Return the bytes of the rows' values, which is what a plan counts.

    Row lengths and row numbers take some more. Filters' verdicts belong to the dock and are not counted.
    """
    return sum(piece.column.values.nbytes for piece in pieces.values() if not isinstance(piece, Verdicts))


def _without_process(name: str) -> str:
    """Return a segment's name without the process that wrote it."""
    return name.rpartition(".")[0]
