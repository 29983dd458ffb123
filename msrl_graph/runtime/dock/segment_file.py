"""The file format of a segment: a header in MessagePack, then raw arrays.

A segment is a file with the rows that a process stored in one call (segments.py).

Invariant: a reader does not trust a file. A damaged file raises RunError, and nothing in the file is executed (no
pickle). Readers get views of the file, which is mapped read-only.
"""

from __future__ import annotations

import fcntl
import mmap
import struct
from functools import cached_property
from pathlib import Path

import msgspec

from ..data import encoding
from ..data.columns import Array, ColumnData, ColumnRows, Verdicts
from ..process.task_report import RunError

ALIGN = 64  # bytes to which each array is aligned
HEADER_SIZE = struct.Struct("<Q")  # a file begins with the size of its header in bytes


class ArrayPlace(msgspec.Struct, array_like=True):
    """The type and shape of an array, and its offset from the file's first array."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


class SegmentColumn(msgspec.Struct, array_like=True):
    """A column of a segment.

    `rows`, `values` and `offsets` say where the arrays of the column are in the file. `verdicts` says whether the
    values are the verdicts of a filter.
    """

    verdicts: bool
    rows: ArrayPlace
    values: ArrayPlace
    offsets: ArrayPlace | None


class SegmentHeader(msgspec.Struct, array_like=True):
    """The header of a segment: the node that wrote the segment, and its columns."""

    node: str
    fields: dict[str, SegmentColumn]


_header_decoder = msgspec.msgpack.Decoder(SegmentHeader)


class Segment:
    """A segment that is mapped into memory; its rows are views of the file.

    The constructor raises RunError for a file that is not a complete segment.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            # The lock lasts as long as the mapping or any view of it: until then nobody writes to this file.
            fcntl.flock(file, fcntl.LOCK_SH)
            if not path.samefile(f"/proc/self/fd/{file.fileno()}"):  # dropped meanwhile
                raise FileNotFoundError(path)
            try:
                self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                size = HEADER_SIZE.unpack_from(self._memory)[0]
                head = _header_decoder.decode(self._memory[HEADER_SIZE.size : HEADER_SIZE.size + size])
                self._begin = arrays_begin(size)
            except (ValueError, struct.error) as error:  # msgspec's errors are ValueErrors
                raise damaged_file(path, error) from None
        self.node = head.node
        self._fields = head.fields

    @cached_property
    def pieces(self) -> dict[str, ColumnRows]:
        """The rows of each column."""
        return {name: self._piece(name, field) for name, field in self._fields.items()}

    def _piece(self, name: str, field: SegmentColumn) -> ColumnRows:
        try:
            rows = self._array(field.rows)
            values = self._array(field.values)
            offsets = self._array(field.offsets) if field.offsets else None
        except encoding.DecodeError as error:
            raise damaged_file(self.path, error) from None
        if not _fit_together(rows, values, offsets):
            raise damaged_file(self.path, f"the arrays of its column `{name}` do not fit together")
        return (Verdicts if field.verdicts else ColumnRows)(rows, ColumnData(values, offsets))

    def _array(self, place: ArrayPlace) -> Array:
        return encoding.view(self._memory, place.dtype, place.shape, self._begin + place.offset)


def _fit_together(rows: Array, values: Array, offsets: Array | None) -> bool:
    """Return whether the types and lengths of a column's arrays fit together."""
    if rows.ndim != 1 or rows.dtype.kind != "i" or not values.ndim:
        return False
    if offsets is None:
        return len(values) == len(rows)
    right = offsets.shape == (len(rows) + 1,) and offsets.dtype.kind == "i"
    return right and (offsets[0], offsets[-1]) == (0, len(values))


def damaged_file(path: Path, why: object) -> RunError:
    """Return the error for a damaged file."""
    return RunError(f"the file {path} of the dock is damaged: {why}")


def arrays_begin(head: int) -> int:
    """Return the offset in the file where the arrays begin, in bytes.

    `head` is the size of the header in bytes.
    """
    return -(-(HEADER_SIZE.size + head) // ALIGN) * ALIGN
