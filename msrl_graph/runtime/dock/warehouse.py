"""A warehouse of the transfer dock: the rows of one host (arXiv:2507.19017, figure 4).

Invariant: writes are idempotent: a row that is written again replaces itself. The rows lie in segments, which processes
of the host write and read without the warehouse; it knows of them, hands rows to other hosts, and keeps beside them
what its controllers decided and were told, so that who takes its place knows as much. Nothing here knows Ray or torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from ..data.columns import Array, ColumnData, ColumnRows, Verdicts, joined
from ..process.task import Task
from .messages import Round, RowLocation, RowsReady, WarehouseInventory
from .segments import Segments

_TASK = "task"  # the name of the note that holds a task
SPLIT = -1  # rows that fit into no warehouse at once, but in parts


class Warehouse:
    """The rows of one host, by key and segment; it begins with what the `segments` have. With a `capacity` it promises
    place before rows are written, and never for more bytes of values than that."""

    def __init__(self, index: int, segments: Segments, capacity: int = 0) -> None:
        self.index = index
        self.segments = segments
        self.capacity = capacity
        self._promised: dict[str, dict[str, int]] = {}  # by key and segment, whoever writes it
        self.tasks: dict[str, Task] = {}  # those open
        self._names: dict[str, dict[str, None]] = {}  # by key, in the order in which they were put
        self._rounds: dict[str, dict[str, list[Round]]] = {}  # by key, then by node
        for key in segments.tasks():
            notes = segments.notes(key)
            if _TASK in notes:
                self.tasks[key] = segments.noted(key, _TASK, Task)
                self._names[key] = dict.fromkeys(segments.names(key))
                for name in (n for n in notes if n != _TASK):
                    node, rounds = segments.noted(key, name, tuple[str, list[Round]])
                    self._rounds.setdefault(key, {}).setdefault(node, []).extend(rounds)
                for name in self._names[key] if capacity else ():
                    self._promised.setdefault(key, {})[_anyone(name)] = payload(segments.read(key, name))

    def open(self, task: Task) -> None:
        self.segments.note(task.key, _TASK, task)
        self.tasks[task.key] = task

    @property
    def free(self) -> int:
        return self.capacity - sum(map(sum, (of.values() for of in self._promised.values())))

    def promise(self, key: str, name: str, size: int) -> bool:
        """Whether there is place for a segment of so many bytes; it is kept for it, and for who writes it again in the
        place of a process that died."""
        mine = self._promised.setdefault(key, {})
        if size - mine.get(_anyone(name), 0) > self.free:
            return False
        mine[_anyone(name)] = size
        return True

    def put(self, key: str, name: str) -> list[RowsReady]:
        """A segment was written; what is new."""
        self._names.setdefault(key, {})[name] = None
        return self._news(key, name)

    def _news(self, key: str, name: str) -> list[RowsReady]:
        place = RowLocation(self.index, name)
        return [RowsReady.of(column, piece, place) for column, piece in self.segments.read(key, name).items()]

    def keep(self, key: str, node: str, rounds: Sequence[Round]) -> None:
        """Keeps what the controller of a node decided."""
        kept = self._rounds.setdefault(key, {}).setdefault(node, [])
        self.segments.note(key, f"{node}.{len(kept):06}", (node, rounds))
        kept.extend(rounds)

    def known(self, task: Task) -> WarehouseInventory:
        """All that a controller which begins anew must hear of a task."""
        news = [n for name in self._names.get(task.key, ()) for n in self._news(task.key, name)]
        return WarehouseInventory(task, news, self._rounds.get(task.key, {}))

    def get(self, key: str, wanted: Mapping[str, Mapping[str, Array]]) -> dict[str, dict[str, ColumnData]]:
        """By segment and column the rows asked for, in the order asked for."""
        return {
            name: {column: taken(pieces[column], rows) for column, rows in columns.items()}
            for name, columns in wanted.items()
            for pieces in [self.segments.read(key, name)]
        }

    def written(self, key: str) -> dict[str, int]:
        """By node how many rows of a task it has written here."""
        rows: dict[str, dict[str, list[Array]]] = {}
        for name in self._names.get(key, ()):
            by = rows.setdefault(self.segments.writer(key, name), {})
            for column, piece in self.segments.read(key, name).items():
                by.setdefault(column, []).append(piece.rows)
        return {node: max(len(np.unique(np.concatenate(r))) for r in by.values()) for node, by in rows.items() if by}

    def whole(self, key: str, columns: Collection[str] | None = None) -> dict[str, ColumnRows]:
        """All rows of a task by column, ascending; only some `columns`, or all."""
        pieces: dict[str, list[ColumnRows]] = {}
        for name in self._names.get(key, ()):
            for column, piece in self.segments.read(key, name).items():
                if columns is None or column in columns:
                    pieces.setdefault(column, []).append(piece)
        found = {}
        for column, some in pieces.items():
            piece = joined(some)
            order = np.argsort(piece.rows, kind="stable")
            rows = piece.rows[order]
            newest = np.append(np.diff(rows) != 0, True)[: len(rows)]  # a later write of the same row wins
            found[column] = piece.take(order[newest])
        return found

    def drop(self, key: str) -> None:
        """Forgets a task."""
        self._names.pop(key, None)
        self._rounds.pop(key, None)
        self._promised.pop(key, None)
        self.tasks.pop(key, None)
        self.segments.drop(key)


def taken(piece: ColumnRows, rows: Array) -> ColumnData:
    """Of a piece whose rows ascend some by their numbers: a view where they lie in a row, else a copy."""
    at = np.searchsorted(piece.rows, rows)
    if len(at) and at[-1] - at[0] == len(at) - 1 and bool((at[1:] > at[:-1]).all()):
        return piece.column.stretch(int(at[0]), int(at[-1]) + 1)
    return piece.column.take(at)


def payload(pieces: Mapping[str, ColumnRows]) -> int:
    """Bytes of the rows' values, which is what a plan counts. How long each row is and which it is takes some more, and
    filters' verdicts are the dock's own."""
    return sum(p.column.values.nbytes for p in pieces.values() if not isinstance(p, Verdicts))


def _anyone(name: str) -> str:
    """A segment's name without the process that wrote it."""
    return name.rpartition(".")[0]
