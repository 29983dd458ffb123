"""The rows of one host in shared memory: one file per call that wrote rows.

Such a file is a *segment*. Segments are grouped by *task*, which is one iteration of training or of an evaluation.

Invariant: a segment file is complete or absent, and never changes. The file describes its own contents, so the
replacement of a dead process can read everything. Readers get read-only views of the file. The views stay valid when
the file is dropped: the memory of a large dropped file is reused only when no process reads the file any more. The room
(the folder of the files) is removed with all its files when the last process that called `Room.join` has ended, even if
the process was killed.

A room is a private folder (files/private.py) with a name that nobody can guess. Every process that joins the room
checks that the folder is private. A segment file has a header in MessagePack, followed by raw arrays, and no pickle. A
file of another user is never read, and a damaged file raises RunError.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
import numpy as np

from ...files import private
from ..data import encoding
from ..data.columns import Array, ColumnRows, Verdicts
from ..process.processes import NAME, NEW, ROWS, SHARED, remove_after
from ..process.task_report import RunError
from .messages import ProcessStatus
from .segment_file import (
    ALIGN,
    HEADER_SIZE,
    ArrayPlace,
    Segment,
    SegmentColumn,
    SegmentHeader,
    arrays_begin,
    damaged_file,
)

T = TypeVar("T")
LOCK = ".held"
SPARE = ".spare"
_LARGE = 1 << 20  # bytes; the memory of a file of this size or more is reused
# A status file of a process: the prefix of its name, the unit of the text's size (bytes), the offset of the text.
_STATUS_PREFIX = ".says-"
_UNIT = 16
_STATUS_BEGIN = 1
_STATUS_INTERVAL = 0.05  # seconds between two writes of the number of computed rows


class Room:
    """The folder with the files of rows of one run on one host."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, name: str, size: int) -> Room:
        """Make a folder for `size` bytes of rows, in shared memory if possible.

        If shared memory has too little space, the folder is made in the directory for temporary files. `name`, the
        folder's name, must be impossible to guess. If a dead process left a folder of this name, that folder is used
        again. The folder is removed when no process uses it any more. Raises RunError if other users can access the
        folder.
        """
        places = [SHARED] if SHARED.is_dir() and os.access(SHARED, os.W_OK) else []
        places += [Path(tempfile.gettempdir())]
        for place in places:
            _sweep(place)
        old = [folder for folder in places if os.path.lexists(folder / name)]
        roomy = [folder for folder in places if shutil.disk_usage(folder).free >= size]
        room = cls((old or roomy or places[-1:])[0] / name)
        try:
            private.make_folder(room.path)
        except OSError as error:
            _refuse(room.path, error)
        room.join()
        remove_after(room.path / LOCK, room.path)
        return room

    def read_statuses(self) -> dict[str, ProcessStatus]:
        """Return the last status of each process of this host, even of dead processes."""
        statuses = {}
        for path in self.path.glob(f"{_STATUS_PREFIX}*"):
            with suppress(OSError, ValueError):
                size = (data := path.read_bytes())[0]
                text = data[_STATUS_BEGIN:]
                if size:
                    process, *fields = json.loads(text[: size * _UNIT])
                    statuses[process] = ProcessStatus(*fields)
        return statuses

    def stored_bytes(self) -> int:
        """Return how many bytes the rows in this room use."""
        total_bytes = 0
        for path in self.path.glob("*/[!.]*"):
            with suppress(OSError):  # dropped meanwhile
                total_bytes += path.stat().st_size
        return total_bytes

    def join(self) -> None:
        """Prevent the removal of the room for as long as this process lives.

        Raises RunError if other users can access the folder.
        """
        try:
            private.check_folder(self.path)
        except OSError as error:
            _refuse(self.path, error)
        self._lock_fd = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock_fd, fcntl.LOCK_SH)


def _refuse(path: Path, error: OSError) -> NoReturn:
    reason = error.what if isinstance(error, private.NotPrivate) else f"cannot be used: {error.strerror}"
    raise RunError(f"the folder for the rows of this host, {path}, {reason}; start the run again") from None


class Activity:
    """The status of a process in shared memory, where the dock of its host reads it.

    A status remains readable after the death of its process. A change of the status is one write to mapped memory,
    without a message.
    """

    def __init__(self, room: Room, process: str) -> None:
        self.process = process
        descriptor = os.open(room.path / f"{_STATUS_PREFIX}{process.replace(' ', '-')}", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # The file never shrinks: a process that has mapped it would get SIGBUS.
            os.ftruncate(descriptor, _STATUS_BEGIN + 255 * _UNIT)
            self._memory = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
        self._memory[0] = 0
        self._activity = ""
        self._since = time.monotonic()
        self._key = ""
        self._rows: tuple[int, int, float, str] = (0, 0, 0.0, "")  # the last fields of `ProcessStatus`
        self._written_at = 0.0
        self._done: dict[str, int] = {}  # by node, in the task of this key

    def set_activity(self, activity: str) -> None:
        self._activity = activity[:500]
        self._since = time.monotonic()
        self._rows = (0, 0, self._rows[2], "")
        self._write()

    def set_computed_rows(self, rows: int, total: int, where: str = "") -> None:
        """Record that `rows` of `total` rows are computed.

        `where` is a text with more detail, such as the turn of an episode. The numbers are written to shared memory at
        most once every _STATUS_INTERVAL seconds.
        """
        now = time.monotonic()
        before, _, moved, _ = self._rows
        self._rows = (rows, total, now if rows != before else moved, where[:200])
        if rows == 0 or now - self._written_at >= _STATUS_INTERVAL:
            self._write()

    def add_done_rows(self, key: str, node: str, rows: int) -> None:
        """Add `rows` to the number of rows that this process has processed for a node.

        Only for a node that reads rows but writes none. The count begins at 0 in each task `key`.
        """
        if key != self._key:
            self._key = key
            self._done = {}
        self._done[node] = self._done.get(node, 0) + rows
        self._write()

    def _write(self) -> None:
        status_fields = [self.process, self._activity, self._since, os.getpid()]
        self._written_at = time.monotonic()
        text = json.dumps([*status_fields, self._key, self._done, *self._rows]).encode()
        if len(text) > 255 * _UNIT:  # the activity is more important than the finished rows
            text = json.dumps([*status_fields, "", {}, *self._rows]).encode()
        size = -(-len(text) // _UNIT)
        self._memory[:1] = b"\0"  # a reader between these lines sees no status
        self._memory[_STATUS_BEGIN : _STATUS_BEGIN + size * _UNIT] = text.ljust(size * _UNIT)
        self._memory[0] = size


# The name of a room: the run's folder, the host's number, and a random part that nobody can guess.
_ROOM = re.compile(rf"{NAME.pattern}-{ROWS}-[0-9]+-[0-9a-f]{{32}}")


def room_name(run: str, host: int) -> str:
    """Return a new name for the room of a host.

    `run` is the name of the run's temporary folder.
    """
    return f"{run}-{ROWS}-{host}-{secrets.token_hex(16)}"


def _sweep(place: Path) -> None:
    """Remove the unused rooms of this user from the folder `place`.

    A room (a folder with files of rows) is unused if no process uses it any more. An unused room is left over if the
    process that should have removed the room was killed.
    """
    for path in place.iterdir():
        if not _ROOM.fullmatch(path.name):
            continue
        with suppress(OSError):
            private.check_folder(path)
            lock = path / LOCK
            if time.time() - lock.lstat().st_mtime < NEW:
                continue
            handle = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(handle)


class Segments:
    """The segments of a room (a folder with files of rows).

    A segment is identified by the key of its task and by its name.
    """

    def __init__(self, room: Room) -> None:
        self.room = room
        self._open: dict[str, dict[str, Segment]] = {}

    def write(self, key: str, name: str, node: str, pieces: Mapping[str, ColumnRows]) -> None:
        """Store a node's rows in one new segment; `pieces` has the rows by column.

        The rows of each column are stored in ascending order of their numbers.
        """
        fields: dict[str, SegmentColumn] = {}
        arrays: list[tuple[int, Array]] = []
        offset = 0

        def placed(array: Array) -> ArrayPlace:
            nonlocal offset
            offset = -(-offset // ALIGN) * ALIGN
            arrays.append((offset, array := np.ascontiguousarray(array)))
            offset += array.nbytes
            return ArrayPlace(array.dtype.str, array.shape, arrays[-1][0])

        for column, piece in pieces.items():
            if np.any(piece.rows[1:] <= piece.rows[:-1]):
                rows, first = np.unique(piece.rows[::-1], return_index=True)  # of a duplicate row, the later one
                piece = type(piece)(rows, piece.column.take(len(piece.rows) - 1 - first))
            offsets = piece.column.offsets
            fields[column] = SegmentColumn(
                isinstance(piece, Verdicts),
                placed(piece.rows),
                placed(piece.column.values),
                None if offsets is None else placed(offsets),
            )
        self._store(key, name, SegmentHeader(node, fields), arrays)

    def _store(self, key: str, name: str, head: SegmentHeader, arrays: list[tuple[int, Array]]) -> None:
        data = msgspec.msgpack.encode(head)
        begin = arrays_begin(len(data))
        folder = self._folder(key)
        folder.mkdir(exist_ok=True)
        part = folder / f"{name}.part"
        descriptor = self._open_for_writing(part, begin + sum(array.nbytes for _, array in arrays))
        try:
            os.pwrite(descriptor, HEADER_SIZE.pack(len(data)) + data, 0)
            end = begin
            for offset, array in arrays:
                _write(descriptor, array, begin + offset)
                end = begin + offset + array.nbytes
            os.ftruncate(descriptor, max(end, begin, 1))
        finally:
            os.close(descriptor)
        part.rename(folder / name)

    def _open_for_writing(self, path: Path, size: int) -> int:
        """Open a file to write to; reuse a large dropped file that no process reads.

        Reuse saves time: the memory of a dropped file is already allocated, and allocating memory takes as long as
        filling it.
        """
        for spare in self._spares() if size >= _LARGE else ():
            with suppress(OSError):
                descriptor = os.open(spare, os.O_RDWR)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    spare.rename(path)  # fails if another writer was faster
                    return descriptor
                except OSError:
                    os.close(descriptor)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)

    def _spares(self) -> list[Path]:
        try:
            return [*(self.room.path / SPARE).iterdir()]
        except FileNotFoundError:
            return []

    def read(self, key: str, name: str) -> dict[str, ColumnRows]:
        known = self._open.setdefault(key, {})
        if name not in known:
            known[name] = Segment(self._folder(key) / name)
        return known[name].pieces

    def writer(self, key: str, name: str) -> str:
        """Return the node that wrote the segment `name`.

        This process must have read the segment before.
        """
        node: str = self._open[key][name].node
        return node

    def write_note(self, key: str, name: str, value: Any) -> None:
        """Store a small value of a task, for the replacement of this process.

        The value is in a file of its own, called a note.
        """
        folder = self._folder(key)
        folder.mkdir(exist_ok=True)
        part = folder / f".{name}.part"
        part.write_bytes(encoding.encode(value))
        part.rename(folder / f".{name}")

    def list_notes(self, key: str) -> list[str]:
        """Return the sorted names of the notes (`write_note`) of the task `key`."""
        file_names = (path.name for path in self._folder(key).iterdir())
        return sorted(name[1:] for name in file_names if name.startswith(".") and not name.endswith(".part"))

    def read_note(self, key: str, name: str, type: type[T]) -> T:
        """Return the value of a note, which must have the type `type`.

        Raises RunError if the note is damaged.
        """
        path = self._folder(key) / f".{name}"
        try:
            return encoding.decode(path.read_bytes(), type)
        except encoding.DecodeError as error:
            raise damaged_file(path, error) from None

    def tasks(self) -> Iterator[str]:
        """Yield the keys of the tasks that have files in the room, the folder of segments."""
        yield from (
            path.name.replace(":", "/") for path in self.room.path.iterdir() if path.is_dir() and path.name != SPARE
        )

    def names(self, key: str) -> list[str]:
        """Return the names of a task's segments, in the order of writing."""
        paths = [
            path for path in self._folder(key).iterdir() if not path.name.startswith(".") and path.suffix != ".part"
        ]
        return [path.name for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns)]

    def forget(self, key: str) -> None:
        """Drop this process's references to the mapped segments of a task."""
        self._open.pop(key, None)

    def drop(self, key: str) -> None:
        """Remove the files of a task; large files become spare files that can be reused."""
        self.forget(key)
        for old in self._spares():  # spare files of the previous task that were not reused
            old.unlink(missing_ok=True)
        spare = self.room.path / SPARE
        spare.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):
            for path in self._folder(key).iterdir():
                if not path.name.startswith(".") and path.stat().st_size >= _LARGE:
                    path.rename(spare / f".{path.name}")
            shutil.rmtree(self._folder(key))

    def _folder(self, key: str) -> Path:
        return self.room.path / key.replace("/", ":")


def _write(descriptor: int, array: Array, offset: int) -> None:
    view = array.data.cast("B") if array.nbytes else memoryview(b"")
    while view:
        done = os.pwrite(descriptor, view, offset)
        view = view[done:]
        offset = offset + done
