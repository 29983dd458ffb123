"""Columns of many rows: files in this user's cache, mapped into memory.

Invariant: a stored column is complete or absent: it is written into a temporary folder, which is renamed at the end.
The name of a folder is a digest of all that decides its content (`key`), so a folder never changes. If several
processes of a host need the same columns, one writes them and the others wait. The files hold only numbers; nothing in
them is executed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self

import msgspec
import numpy as np

from ...diagnostics import Diagnostic, Fault, Span
from ...files import private
from .columns import Array, ColumnData

CACHE = "rows"  # the folder of the stored columns in this user's cache
KEPT = 30 * 86400.0  # seconds until a folder that no run used is removed
VERSION = 1  # of the files' format, and of how rows become columns
_INDEX = "index.json"


@dataclass
class StoredRows:
    """The columns of rows, with what is known of all rows.

    - `lines`: the number of each row in its file.
    - `usable`: the indices of the rows that can be used.
    - `left_out`: the number of rows that are left out, by column.
    - `dropped`: the number of rows without a value that were dropped, by column; they are in no column.
    - `late`: the columns with texts that are tokenized when a row is used.
    """

    columns: dict[str, ColumnData]
    lines: Array
    usable: Array
    left_out: dict[str, int]
    dropped: dict[str, int]
    late: frozenset[str] = frozenset()


@dataclass
class _Index:
    """The file that describes a folder: the dtype and shape of each array."""

    columns: list[str]
    arrays: dict[str, tuple[str, tuple[int, ...]]]
    left_out: dict[str, int]
    dropped: dict[str, int]
    late: list[str]


@dataclass
class RowWriter:
    """Writes columns batch by batch into the files of a folder."""

    folder: Path
    names: list[str]
    files: dict[str, BinaryIO] = field(default_factory=dict)
    arrays: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    rows: int = 0

    def add(self, columns: dict[str, ColumnData], lines: Array, keep: Array) -> None:
        for i, name in enumerate(self.names):
            column = columns[name]
            self._append(f"{i}.values", column.values)
            if column.offsets is not None:
                first = 0 if name in self.ends else 1
                end = self.ends.get(name, 0)
                self._append(f"{i}.offsets", column.offsets[1 - first :] + end)
                self.ends[name] = end + int(column.offsets[-1])
        self._append("lines", lines)
        self._append("usable", np.flatnonzero(keep) + self.rows)
        self.rows += len(lines)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self.files.values():
            file.close()

    def finish(self, left_out: dict[str, int], dropped: dict[str, int], late: frozenset[str]) -> None:
        """Write the index, after which the folder is complete."""
        index = _Index(self.names, self.arrays, left_out, dropped, sorted(late))
        (self.folder / _INDEX).write_bytes(msgspec.json.encode(index))

    def _append(self, name: str, array: Array) -> None:
        if name not in self.files:
            self.files[name] = (self.folder / name).open("wb")
            self.arrays[name] = (array.dtype.str, (0, *array.shape[1:]))
        dtype, (length, *rest) = self.arrays[name]
        np.ascontiguousarray(array, dtype).tofile(self.files[name])
        self.arrays[name] = (dtype, (length + len(array), *rest))


def key(*parts: Any) -> str:
    """Return a digest of all that decides the content of a folder."""
    return hashlib.sha256(msgspec.json.encode([VERSION, *map(repr, parts)])).hexdigest()[:32]


def load(name: str, write: Callable[[Path], None], span: Span) -> StoredRows:
    """Return the stored rows with the key `name`; write them if they do not exist.

    `write` writes them into a folder.

    Raises Fault if they cannot be stored, and what `write` raises.
    """
    try:
        place = private.cache(CACHE) / name
        with _lock(place):
            if not (place / _INDEX).is_file():
                _remove_old(place.parent)
                _write(place, write)
            os.utime(place)
            return _map(place)
    except (OSError, msgspec.MsgspecError) as error:
        folder = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        message = f"the rows cannot be stored in {folder}: {error}"
        help = "set XDG_CACHE_HOME to a folder of your own on a disk with more space"
        raise Fault(Diagnostic("missing-file", message, span, help)) from None


def _write(place: Path, write: Callable[[Path], None]) -> None:
    partial = Path(tempfile.mkdtemp(prefix=f"{place.name}.", dir=place.parent))
    try:
        write(partial)
        shutil.rmtree(place, ignore_errors=True)  # what a process without the lock left
        partial.rename(place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _map(place: Path) -> StoredRows:
    private.check_folder(place)
    index = msgspec.json.decode((place / _INDEX).read_bytes(), type=_Index)

    def array(name: str) -> Array:
        dtype, shape = index.arrays[name]
        if not shape[0]:
            return np.zeros(shape, dtype)
        # A plain array whose memory is the mapped file.
        return np.asarray(np.memmap(place / name, dtype, "r", shape=tuple(shape)))

    columns = {
        name: ColumnData(array(f"{i}.values"), array(f"{i}.offsets") if f"{i}.offsets" in index.arrays else None)
        for i, name in enumerate(index.columns)
    }
    return StoredRows(columns, array("lines"), array("usable"), index.left_out, index.dropped, frozenset(index.late))


@contextmanager
def _lock(place: Path) -> Iterator[None]:
    """Hold a lock in the `with` block, so that one process of the host writes."""
    handle = os.open(place.with_name(f"{place.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        with suppress(OSError):  # a file system without locks: each process writes its own folder
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _remove_old(folder: Path) -> None:
    """Remove what was not used for `KEPT` seconds."""
    for path in folder.iterdir():
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > KEPT:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
