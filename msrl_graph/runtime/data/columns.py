"""The currency of the sample flow: columns of rows, ragged, without padding.

Invariant: a `Column` is flat numpy `values` and, unless every row is one scalar, `offsets` of n + 1 entries; text is
UTF-8 bytes. numpy arrays travel through Ray zero-copy and need no torch where rows are only kept or scored; a rank sees
them as tensors without a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...data.fields import NUMBERS

Array = NDArray[Any]
DTYPES = {
    **{element: np.dtype(kind.dtype).type for element, kind in NUMBERS.items()},
    "text": np.uint8,
    "json": np.uint8,
}


@dataclass(frozen=True)
class ColumnData:
    """n rows; `offsets` is None for scalars, else row i is values[offsets[i]:offsets[i + 1]]."""

    values: Array
    offsets: Array | None = None

    def __len__(self) -> int:
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.offsets is None else self.offsets.nbytes)

    @property
    def lengths(self) -> Array:
        """Elements of each row; 1 for a scalar."""
        return np.ones(len(self.values), np.int64) if self.offsets is None else np.diff(self.offsets)

    def __getitem__(self, row: int) -> Any:
        return self.values[row] if self.offsets is None else self.values[self.offsets[row] : self.offsets[row + 1]]

    def text(self, row: int) -> str:
        return bytes(self[row]).decode("utf-8")

    def stretch(self, start: int, stop: int) -> ColumnData:
        """The rows from position `start` to before `stop`, whose values are a view."""
        if self.offsets is None:
            return ColumnData(self.values[start:stop])
        offsets = self.offsets[start : stop + 1]
        return ColumnData(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])

    def take(self, rows: Array) -> ColumnData:
        """The rows at these positions, in this order (a copy)."""
        if self.offsets is None:
            return ColumnData(self.values[rows])
        lengths = self.lengths[rows]
        offsets = offsets_of(lengths)
        # One flat gather: position in the output, minus its row's start there, plus its row's start here.
        index = np.arange(offsets[-1]) + np.repeat(self.offsets[:-1][rows] - offsets[:-1], lengths)
        return ColumnData(self.values[index], offsets)


@dataclass(frozen=True)
class ColumnRows:
    """Rows of a column as processes pass them on: the numbers of the rows, and the data of each, in the same order.

    `Piece(np.array([3, 5]), texts(["a", "bc"]))` says that row 3 holds "a" and row 5 "bc"."""

    rows: Array
    column: ColumnData

    def take(self, positions: Array) -> Self:
        """The rows at these positions, in this order (a copy)."""
        return type(self)(self.rows[positions], self.column.take(positions))

    @property
    def told(self) -> Array:
        """What controllers hear of each row: its length."""
        return self.column.lengths


@dataclass(frozen=True)
class Verdicts(ColumnRows):
    """What a filter says of rows: how often each goes on. 0: it is dropped; 2: it goes on, and a repeat of it too."""

    @property
    def told(self) -> Array:
        """Of verdicts controllers hear the verdict itself."""
        told: Array = self.column.values.astype(np.int64)
        return told


def offsets_of(lengths: Array) -> Array:
    out = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=out[1:])
    return out


def ragged(rows: Sequence[Array], dtype: Any) -> ColumnData:
    """A ragged column of these rows."""
    lengths = np.fromiter((len(r) for r in rows), np.int64, len(rows))
    values = np.concatenate([np.asarray(r, dtype) for r in rows]) if len(rows) else np.zeros(0, dtype)
    return ColumnData(values.astype(dtype, copy=False), offsets_of(lengths))


def texts(rows: Iterable[str]) -> ColumnData:
    """A text column."""
    return ragged([np.frombuffer(r.encode("utf-8"), np.uint8) for r in rows], np.uint8)


def concatenate(parts: Sequence[ColumnData]) -> ColumnData:
    """The rows of all parts, one after another."""
    if len(parts) == 1:
        return parts[0]
    values = np.concatenate([p.values for p in parts])
    if parts[0].offsets is None:
        return ColumnData(values)
    return ColumnData(values, offsets_of(np.concatenate([p.lengths for p in parts])))


P = TypeVar("P", bound=ColumnRows)


def joined(pieces: Sequence[P]) -> P:
    """The rows of all pieces of one column, one after another; a row that is in two of them is there twice."""
    if len(pieces) == 1:
        return pieces[0]
    return type(pieces[0])(np.concatenate([p.rows for p in pieces]), concatenate([p.column for p in pieces]))
