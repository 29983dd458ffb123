"""A warehouse of the transfer dock: the rows of one host.

See arXiv:2507.19017, figure 4. A *task* is one iteration of training or of an evaluation. A *segment* is a file with
the rows of one write, in shared memory.

Invariant: writes are idempotent: a row that is written again replaces the earlier copy. Processes of the host write and
read the segments directly. The warehouse knows the segments and sends rows to other hosts. The folder with the segments
also contains a record of the open tasks, and the stored decisions of all controllers in the dock process. So a
replacement of the process can read everything. This module imports neither Ray nor torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from ..data.columns import Array, ColumnData, ColumnRows, Verdicts, concatenate_rows
from ..process.task import Task
from .messages import Round, RowLocation, RowsReady, WarehouseInventory
from .segments import Segments

_TASK = "task"  # the name of the note with a task
SPLIT = -1  # in place of a warehouse's index: the rows must be split over several warehouses


class Warehouse:
    """The rows of one host, by task key and segment.

    A new warehouse begins with the contents of `segments`. If `capacity` is not 0, a process must reserve space before
    it writes rows, and the reservations never exceed `capacity` bytes of values.
    """

    def __init__(self, index: int, segments: Segments, capacity: int = 0) -> None:
        self.index = index
        self.segments = segments
        self.capacity = capacity
        self._promised: dict[str, dict[str, int]] = {}  # by key and by segment without its writer
        self.tasks: dict[str, Task] = {}  # the open tasks
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

        The reservation is also valid for a replacement of the writing process, which writes the same segment again.
        """
        mine = self._promised.setdefault(key, {})
        if size - mine.get(_without_process(name), 0) > self.free:
            return False
        mine[_without_process(name)] = size
        return True

    def put(self, key: str, name: str) -> list[RowsReady]:
        """Note that the segment `name` was written; return the news of its rows."""
        self._names.setdefault(key, {})[name] = None
        return self._news(key, name)

    def _news(self, key: str, name: str) -> list[RowsReady]:
        place = RowLocation(self.index, name)
        return [RowsReady.from_piece(column, piece, place) for column, piece in self.segments.read(key, name).items()]

    def keep(self, key: str, node: str, rounds: Sequence[Round]) -> None:
        """Store decisions that the controller of `node` made in the task `key`."""
        stored_rounds = self._rounds.setdefault(key, {}).setdefault(node, [])
        self.segments.write_note(key, f"{node}.{len(stored_rounds):06}", (node, rounds))
        stored_rounds.extend(rounds)

    def known(self, task: Task) -> WarehouseInventory:
        """Return the news and stored decisions of a task, for rebuilding controllers."""
        news = [entry for name in self._names.get(task.key, ()) for entry in self._news(task.key, name)]
        return WarehouseInventory(task, news, self._rounds.get(task.key, {}))

    def get(self, key: str, wanted: Mapping[str, Mapping[str, Array]]) -> dict[str, dict[str, ColumnData]]:
        """Return the values of the rows that `wanted` lists, by segment and column.

        The values are in the order in which `wanted` lists the row numbers.
        """
        return {
            name: {column: select_rows(pieces[column], rows) for column, rows in columns.items()}
            for name, columns in wanted.items()
            for pieces in [self.segments.read(key, name)]
        }

    def written(self, key: str) -> dict[str, int]:
        """Return, for each node, the number of rows of a task that are in this warehouse."""
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
        """Return, for each column, all rows of a task that are in this warehouse.

        The rows of each column are in ascending order of their numbers. If `columns` is given, the result has only
        these columns.
        """
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
        """Remove a task and its rows."""
        self._names.pop(key, None)
        self._rounds.pop(key, None)
        self._promised.pop(key, None)
        self.tasks.pop(key, None)
        self.segments.drop(key)


def select_rows(piece: ColumnRows, rows: Array) -> ColumnData:
    """Return a column's values for the row numbers `rows`.

    `piece` contains these rows; the rows of the piece must be ascending. Returns a view if the selected rows are
    adjacent in the piece, else a copy.
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
    """Return the size of the rows' values in bytes.

    The lengths and numbers of the rows are not counted, nor are the verdicts of filters. The plan computes the size of
    rows in the same way.
    """
    return sum(piece.column.values.nbytes for piece in pieces.values() if not isinstance(piece, Verdicts))


def _without_process(name: str) -> str:
    """Return a segment's name without the id of the process that wrote the segment."""
    return name.rpartition(".")[0]
