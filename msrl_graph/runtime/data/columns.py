"""Columns of rows in the sample flow: ragged arrays without padding.

Invariant: a `ColumnData` is a flat numpy array `values` and an array `offsets` of n + 1 entries, or no `offsets` if
every row is one scalar. Text is UTF-8 bytes. Ray passes numpy arrays without a copy. A process that only stores or
scores rows does not need torch, and a rank views the arrays as tensors without a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import msgspec
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
    """n rows of one column.

    `offsets` is None for scalars; otherwise row i is values[offsets[i]:offsets[i + 1]].
    """

    values: Array
    offsets: Array | None = None

    def __len__(self) -> int:
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.offsets is None else self.offsets.nbytes)

    @property
    def lengths(self) -> Array:
        """The number of elements of each row; 1 for a scalar."""
        return np.ones(len(self.values), np.int64) if self.offsets is None else np.diff(self.offsets)

    def __getitem__(self, row: int) -> Any:
        return self.values[row] if self.offsets is None else self.values[self.offsets[row] : self.offsets[row + 1]]

    def text(self, row: int) -> str:
        return bytes(self[row]).decode("utf-8")

    def stretch(self, start: int, stop: int) -> ColumnData:
        """Return the rows in the range [start, stop); their values are a view."""
        if self.offsets is None:
            return ColumnData(self.values[start:stop])
        offsets = self.offsets[start : stop + 1]
        return ColumnData(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])

    def take(self, rows: Array) -> ColumnData:
        """Return a copy of the rows at the positions `rows`, in the order of `rows`."""
        if self.offsets is None:
            return ColumnData(self.values[rows])
        lengths = self.lengths[rows]
        offsets = offsets_from_lengths(lengths)
        # One flat gather. Source index = output position - row start in the output + row start in the source.
        index = np.arange(offsets[-1]) + np.repeat(self.offsets[:-1][rows] - offsets[:-1], lengths)
        return ColumnData(self.values[index], offsets)


class ColumnRows(msgspec.Struct, frozen=True, tag=True, eq=False):
    """Rows of a column with their numbers, as processes exchange them.

    A node's output exists in this form until the end of the iteration.
    `rows` are the row numbers, and `column` has the values of these rows in the same order. In
    `ColumnRows(np.array([3, 5]), texts(["a", "bc"]))`, row 3 is "a" and row 5 is "bc".
    """

    rows: Array
    column: ColumnData

    def take(self, positions: Array) -> Self:
        """Return a copy of the rows at the given positions, in the order of `positions`."""
        return type(self)(self.rows[positions], self.column.take(positions))

    @property
    def reported_values(self) -> Array:
        """The number that the dock's controllers receive for each row: the row's length."""
        return self.column.lengths


class Verdicts(ColumnRows, frozen=True, tag=True, eq=False):
    """The verdicts of a filter: how often each row continues.

    0: the row is dropped. 1: the row continues. 2: the row and one repeat of the row continue.
    """

    @property
    def reported_values(self) -> Array:
        """The number that a controller of the dock receives for each row: the verdict."""
        times: Array = self.column.values.astype(np.int64)
        return times


def offsets_from_lengths(lengths: Array) -> Array:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def ragged(rows: Sequence[Array], dtype: Any) -> ColumnData:
    """Build a column from rows of different lengths."""
    lengths = np.fromiter((len(row) for row in rows), np.int64, len(rows))
    values = np.concatenate([np.asarray(row, dtype) for row in rows]) if len(rows) else np.zeros(0, dtype)
    return ColumnData(values.astype(dtype, copy=False), offsets_from_lengths(lengths))


def texts(rows: Iterable[str]) -> ColumnData:
    """Build a text column from strings."""
    encoded = [row.encode("utf-8") for row in rows]
    lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
    return ColumnData(np.frombuffer(bytearray().join(encoded), np.uint8), offsets_from_lengths(lengths))


def concatenate(parts: Sequence[ColumnData]) -> ColumnData:
    """Concatenate the rows of several fragments of one column."""
    if len(parts) == 1:
        return parts[0]
    values = np.concatenate([part.values for part in parts])
    if parts[0].offsets is None:
        return ColumnData(values)
    return ColumnData(values, offsets_from_lengths(np.concatenate([part.lengths for part in parts])))


P = TypeVar("P", bound=ColumnRows)


def concatenate_rows(pieces: Sequence[P]) -> P:
    """Concatenate pieces of one column; a row that is in two pieces appears twice."""
    if len(pieces) == 1:
        return pieces[0]
    return type(pieces[0])(
        np.concatenate([piece.rows for piece in pieces]), concatenate([piece.column for piece in pieces])
    )
