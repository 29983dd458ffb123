"""A warehouse of the transfer dock: the rows of one host (arXiv:2507.19017, figure 4).

Invariant: writes are idempotent: a row that is written again replaces itself. What controllers decided and what they were told is kept
here, so that one that dies can be built anew. Nothing here knows Ray or torch; actors.py puts it on a process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...ir.rowsets import VERDICT
from ..data.columns import Array, Column, concatenate


@dataclass(frozen=True)
class Part:
    """What a group gets of a round: its units, how many rows each has, and those rows, unit by unit."""

    units: Array
    sizes: Array
    rows: Array


@dataclass(frozen=True)
class Round:
    """What a controller decided: what each group gets next; `last` of the iteration, or of a round of its prompts."""

    epoch: int
    parts: tuple[Part, ...]
    last: bool


@dataclass(frozen=True)
class Segment:
    """Rows of a column that lie together: their numbers, ascending, and where each stands in the data."""

    rows: Array
    place: Array
    data: Column

    def take(self, rows: Array) -> Column:
        return self.data.take(self.place[np.searchsorted(self.rows, rows)])


class Warehouse:
    """The rows of one host, by key and column."""

    def __init__(self, index: int, host: int) -> None:
        self.index, self.host = index, host
        self._segments: dict[tuple[str, str], list[tuple[Array, Column]]] = {}
        self._merged: dict[tuple[str, str], Segment] = {}
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
        segments = [(n, rows, told(n, c), self.index) for (k, n), parts in self._segments.items() if k == key for rows, c in parts]
        return segments, self._rounds.get(key, {})

    def get(self, key: str, node: str, host: int, wanted: Mapping[str, Array]) -> dict[str, Column]:
        """The rows asked for, in the order asked for; `host` is the reader's."""
        out = {}
        for name, rows in wanted.items():
            out[name] = self._merge(key, name).take(rows)
            self._count(key, f"{node} get" if host == self.host else f"{node} get away", out[name].nbytes)
        return out

    def whole(self, key: str) -> dict[str, tuple[Array, Column]]:
        """All rows of an iteration: for each column the row numbers and the data."""
        found = {}
        for name in [n for k, n in self._segments if k == key]:
            segment = self._merge(key, name)
            found[name] = (segment.rows, segment.take(segment.rows))
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

    def _merge(self, key: str, name: str) -> Segment:
        """All rows of a column; segments are merged once, when they are first read."""
        pair = (key, name)
        if pair not in self._merged:
            segments = self._segments[pair]
            rows = np.concatenate([r for r, _ in segments])
            column = concatenate([c for _, c in segments])
            order = np.argsort(rows, kind="stable")
            newest = np.append(np.diff(rows[order]) != 0, True)[: len(rows)]  # a later write of the same row wins
            self._merged[pair] = Segment(rows[order][newest], order[newest], column)
            self._segments[pair] = [(rows, column)]
        return self._merged[pair]


def told(name: str, column: Column) -> Array:
    """What controllers hear of rows: the length of each, or of a filter's verdicts the verdict."""
    return column.values.astype(np.int64) if name.endswith(VERDICT) else column.lengths
