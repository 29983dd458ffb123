"""A warehouse of the transfer dock: the rows of one host (arXiv:2507.19017, figure 4).

Invariant: writes are idempotent: a row that is written again replaces itself. What controllers decided and what they
were told is kept here, so that one that dies can be built anew. Nothing here knows Ray or torch; actors.py puts it on a
process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..data.columns import Array, Column, Piece, joined
from ..process.task import Task
from .wire import Known, News, Round


@dataclass(frozen=True)
class Segment:
    """All rows of a column that a warehouse has, in one piece: their numbers, ascending, and at which position of the
    piece each is. Of a row that was written twice that is the later one."""

    rows: Array
    place: Array
    piece: Piece

    def take(self, rows: Array) -> Column:
        """The data of rows by their numbers."""
        return self.piece.column.take(self.place[np.searchsorted(self.rows, rows)])


class Warehouse:
    """The rows of one host, by key and column."""

    def __init__(self, index: int, host: int) -> None:
        self.index, self.host = index, host
        self._pieces: dict[tuple[str, str], list[Piece]] = {}
        self._merged: dict[tuple[str, str], Segment] = {}
        self._rounds: dict[str, dict[str, list[Round]]] = {}  # by key, then by node
        self.traffic: dict[
            str, dict[str, int]
        ] = {}  # by key, then by `node put`, `node get` and `node get away`: bytes

    def put(self, key: str, node: str, pieces: Mapping[str, Piece]) -> None:
        """Keeps the rows that `node` wrote, by column."""
        for name, piece in pieces.items():
            self._pieces.setdefault((key, name), []).append(piece)
            self._merged.pop((key, name), None)
            self._count(key, f"{node} put", piece.column.nbytes)

    def keep(self, key: str, node: str, rounds: Sequence[Round]) -> None:
        """Keeps what the controller of a node decided."""
        self._rounds.setdefault(key, {}).setdefault(node, []).extend(rounds)

    def known(self, task: Task) -> Known:
        """All that a controller which begins anew must hear of a task."""
        news = [
            News.of(name, p, self.index)
            for (key, name), pieces in self._pieces.items()
            if key == task.key
            for p in pieces
        ]
        return Known(task, news, self._rounds.get(task.key, {}))

    def get(self, key: str, node: str, host: int, wanted: Mapping[str, Array]) -> dict[str, Column]:
        """The rows asked for, in the order asked for; `host` is the reader's."""
        out = {}
        for name, rows in wanted.items():
            out[name] = self._merge(key, name).take(rows)
            self._count(key, f"{node} get" if host == self.host else f"{node} get away", out[name].nbytes)
        return out

    def whole(self, key: str) -> dict[str, Piece]:
        """All rows of an iteration by column, ascending."""
        found = {}
        for name in [n for k, n in self._pieces if k == key]:
            segment = self._merge(key, name)
            found[name] = segment.piece.take(segment.place)
        return found

    def drop(self, key: str) -> dict[str, int]:
        """Forgets an iteration; what it moved, in bytes."""
        for pair in [p for p in self._pieces if p[0] == key]:
            del self._pieces[pair]
            self._merged.pop(pair, None)
        self._rounds.pop(key, None)
        return self.traffic.pop(key, {})

    def _count(self, key: str, what: str, size: int) -> None:
        counts = self.traffic.setdefault(key, {})
        counts[what] = counts.get(what, 0) + size

    def _merge(self, key: str, name: str) -> Segment:
        """All rows of a column; pieces are joined once, when they are first read."""
        pair = (key, name)
        if pair not in self._merged:
            piece = joined(self._pieces[pair])
            order = np.argsort(piece.rows, kind="stable")
            rows = piece.rows[order]
            newest = np.append(np.diff(rows) != 0, True)[: len(rows)]  # a later write of the same row wins
            self._merged[pair] = Segment(rows[newest], order[newest], piece)
            self._pieces[pair] = [piece]
        return self._merged[pair]
