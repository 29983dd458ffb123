"""The rows of one host in memory that its processes share: a file for what one call wrote, mapped by whoever reads it.

Invariant: a file is there whole or not at all, and never changes. It says by itself what is in it, so that a process
that takes a dead one's place finds all that there was. What is read are views of the file, which nobody may write to;
they stay as they are when it is dropped: the memory of a large file is used again, but only once nobody reads it.
Where the last process that `Room.join`ed is gone, however it went, so is the room with all its files.

A room is a private folder (files/private.py) under a name that nobody can guess, checked by every process that joins
it. Its files hold raw arrays behind a head in MessagePack, and no pickle: a file that another user made is never read,
and one that is damaged raises RunError.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import re
import secrets
import shutil
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
import numpy as np

from ...files import private
from ..data import encoding
from ..data.columns import Array, ColumnData, ColumnRows, Verdicts
from ..process.processes import NAME, NEW, ROWS, SHARED, go_with
from ..process.task_report import RunError
from .messages import ProcessStatus

T = TypeVar("T")
_ALIGN = 64
LOCK = ".held"
SPARE = ".spare"
_LARGE = 1 << 20  # bytes of a file whose memory is kept for the next one
# A note: how many units of bytes its text takes, and from where on it lies.
_SAYS = ".says-"
_UNIT = 16
_BEGIN = 1
_OFTEN = 0.05  # seconds between two notes of how many rows are done


class Room:
    """A folder for the files of one host and one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def made(cls, name: str, size: int) -> Room:
        """Make a room with place for `size` bytes, in memory if it has that much, else among the temporary files.

        Nobody may be able to guess the name. A room of the same name, which a process that died has left, is taken
        over. The room is removed when no process holds it any more. Raises RunError for a folder that is not this
        user's alone.
        """
        places = [SHARED] if SHARED.is_dir() and os.access(SHARED, os.W_OK) else []
        places += [Path(tempfile.gettempdir())]
        for place in places:
            _sweep(place)
        old = [p for p in places if os.path.lexists(p / name)]
        roomy = [p for p in places if shutil.disk_usage(p).free >= size]
        room = cls((old or roomy or places[-1:])[0] / name)
        try:
            private.make_folder(room.path)
        except OSError as error:
            _refuse(room.path, error)
        room.join()
        go_with(room.path / LOCK, room.path)
        return room

    def said(self) -> dict[str, ProcessStatus]:
        """By process what it says, those that died too."""
        found = {}
        for path in self.path.glob(f"{_SAYS}*"):
            with suppress(OSError, ValueError):
                size = (data := path.read_bytes())[0]
                text = data[_BEGIN:]
                if size:
                    process, *told = json.loads(text[: size * _UNIT])
                    found[process] = ProcessStatus(*told)
        return found

    def held(self) -> int:
        """Bytes of the rows that lie here."""
        found = 0
        for path in self.path.glob("*/[!.]*"):
            with suppress(OSError):  # dropped meanwhile
                found += path.stat().st_size
        return found

    def join(self) -> None:
        """Hold the room for as long as this process lives. Raises RunError if it is not this user's alone."""
        try:
            private.check_folder(self.path)
        except OSError as error:
            _refuse(self.path, error)
        self._held = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._held, fcntl.LOCK_SH)


def _refuse(path: Path, error: OSError) -> NoReturn:
    what = error.what if isinstance(error, private.NotPrivate) else f"cannot be used: {error.strerror}"
    raise RunError(f"the folder for the rows of this host, {path}, {what}; start the run again") from None


class Activity:
    """What a process does, where its death does not reach and others of its host look: a write to memory that a file
    backs, and no message."""

    def __init__(self, room: Room, process: str) -> None:
        self.process = process
        descriptor = os.open(room.path / f"{_SAYS}{process.replace(' ', '-')}", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, _BEGIN + 255 * _UNIT)  # never shorter: whoever has it mapped would die of it
            self._memory = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
        self._memory[0] = 0
        self._what = ""
        self._since = time.monotonic()
        self._key = ""
        self._rows: tuple[int, int, float, str] = (0, 0, 0.0, "")  # as the last fields of Said
        self._wrote = 0.0
        self._done: dict[str, int] = {}  # by node, of the task of this key

    def say(self, what: str) -> None:
        self._what = what[:500]
        self._since = time.monotonic()
        self._rows = (0, 0, self._rows[2], "")
        self._write()

    def computed(self, rows: int, of: int, where: str = "") -> None:
        """Has computed so many rows `of` its share; written at most every _OFTEN seconds."""
        now, (before, _, moved, _) = time.monotonic(), self._rows
        self._rows = (rows, of, now if rows != before else moved, where[:200])
        if rows == 0 or now - self._wrote >= _OFTEN:
            self._write()

    def did(self, key: str, node: str, rows: int) -> None:
        """Is done with so many more rows of a node that writes none."""
        if key != self._key:
            self._key = key
            self._done = {}
        self._done[node] = self._done.get(node, 0) + rows
        self._write()

    def _write(self) -> None:
        said = [self.process, self._what, self._since, os.getpid()]
        self._wrote = time.monotonic()
        text = json.dumps([*said, self._key, self._done, *self._rows]).encode()
        if len(text) > 255 * _UNIT:  # what it does comes first
            text = json.dumps([*said, "", {}, *self._rows]).encode()
        size = -(-len(text) // _UNIT)
        self._memory[:1] = b"\0"  # who looks between these sees nothing
        self._memory[_BEGIN : _BEGIN + size * _UNIT] = text.ljust(size * _UNIT)
        self._memory[0] = size


# The name of a room: that of its run's folder, its host, and what nobody can guess.
_ROOM = re.compile(rf"{NAME.pattern}-{ROWS}-[0-9]+-[0-9a-f]{{32}}")


def room_name(run: str, host: int) -> str:
    """Return a new name for the room of a host; `run` is the name of the run's temporary folder."""
    return f"{run}-{ROWS}-{host}-{secrets.token_hex(16)}"


def _sweep(place: Path) -> None:
    """Remove this user's rooms of which every process was killed, also the one that was to remove it."""
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


class _Place(msgspec.Struct, array_like=True):
    """Where an array lies behind the head of a file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


class _Field(msgspec.Struct, array_like=True):
    """A column of a segment."""

    verdicts: bool
    rows: _Place
    values: _Place
    offsets: _Place | None


class _Head(msgspec.Struct, array_like=True):
    """What a segment says of itself: the node that wrote it, and its columns."""

    node: str
    fields: dict[str, _Field]


_heads = msgspec.msgpack.Decoder(_Head)


class Segment:
    """What one call wrote: pieces by column, as views. Raises RunError for a file that no call wrote."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            # Holds for as long as the mapping and any view of it: nobody writes to this file again before.
            fcntl.flock(file, fcntl.LOCK_SH)
            if not path.samefile(f"/proc/self/fd/{file.fileno()}"):  # dropped meanwhile
                raise FileNotFoundError(path)
            try:
                self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                size = _LENGTH.unpack_from(self._memory)[0]
                head = _heads.decode(self._memory[_LENGTH.size : _LENGTH.size + size])
                self._begin = _behind(size)
            except (ValueError, struct.error) as error:  # as msgspec's errors are
                raise _damaged(path, error) from None
        self.node = head.node
        self._fields = head.fields

    @cached_property
    def pieces(self) -> dict[str, ColumnRows]:
        return {name: self._piece(name, field) for name, field in self._fields.items()}

    def _piece(self, name: str, field: _Field) -> ColumnRows:
        try:
            rows = self._array(field.rows)
            values = self._array(field.values)
            offsets = self._array(field.offsets) if field.offsets else None
        except encoding.DecodeError as error:
            raise _damaged(self.path, error) from None
        if not _fit(rows, values, offsets):
            raise _damaged(self.path, f"its column `{name}` does not fit together")
        return (Verdicts if field.verdicts else ColumnRows)(rows, ColumnData(values, offsets))

    def _array(self, place: _Place) -> Array:
        return encoding.view(self._memory, place.dtype, place.shape, self._begin + place.offset)


def _fit(rows: Array, values: Array, offsets: Array | None) -> bool:
    """Whether these can be the arrays of a piece."""
    if rows.ndim != 1 or rows.dtype.kind != "i" or not values.ndim:
        return False
    if offsets is None:
        return len(values) == len(rows)
    right = offsets.shape == (len(rows) + 1,) and offsets.dtype.kind == "i"
    return right and (offsets[0], offsets[-1]) == (0, len(values))


def _damaged(path: Path, why: object) -> RunError:
    return RunError(f"the file {path} of the dock is damaged: {why}")


_LENGTH = struct.Struct("<Q")


def _behind(head: int) -> int:
    """Return where the arrays begin behind a head of so many bytes."""
    return -(-(_LENGTH.size + head) // _ALIGN) * _ALIGN


class Segments:
    """The segments of a room, by the key of a task and by name."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self._open: dict[str, dict[str, Segment]] = {}

    def write(self, key: str, name: str, node: str, pieces: Mapping[str, ColumnRows]) -> None:
        """Keeps the rows that `node` wrote, by column, each piece's by ascending number."""
        fields: dict[str, _Field] = {}
        arrays: list[tuple[int, Array]] = []
        at = 0

        def placed(array: Array) -> _Place:
            nonlocal at
            at = -(-at // _ALIGN) * _ALIGN
            arrays.append((at, array := np.ascontiguousarray(array)))
            at += array.nbytes
            return _Place(array.dtype.str, array.shape, arrays[-1][0])

        for column, piece in pieces.items():
            if np.any(piece.rows[1:] <= piece.rows[:-1]):
                rows, first = np.unique(piece.rows[::-1], return_index=True)  # of a row that is there twice the later
                piece = type(piece)(rows, piece.column.take(len(piece.rows) - 1 - first))
            offsets = piece.column.offsets
            fields[column] = _Field(
                isinstance(piece, Verdicts),
                placed(piece.rows),
                placed(piece.column.values),
                None if offsets is None else placed(offsets),
            )
        self._keep(key, name, _Head(node, fields), arrays)

    def _keep(self, key: str, name: str, head: _Head, arrays: list[tuple[int, Array]]) -> None:
        data = msgspec.msgpack.encode(head)
        begin = _behind(len(data))
        folder = self._folder(key)
        folder.mkdir(exist_ok=True)
        part = folder / f"{name}.part"
        descriptor = self._opened(part, begin + sum(array.nbytes for _, array in arrays))
        try:
            os.pwrite(descriptor, _LENGTH.pack(len(data)) + data, 0)
            end = begin
            for at, array in arrays:
                _write(descriptor, array, begin + at)
                end = begin + at + array.nbytes
            os.ftruncate(descriptor, max(end, begin, 1))
        finally:
            os.close(descriptor)
        part.rename(folder / name)

    def _opened(self, path: Path, size: int) -> int:
        """A file to write to: of one that was dropped, and that nobody reads any more, the memory is there already,
        which takes as long to get as to fill."""
        for spare in self._spares() if size >= _LARGE else ():
            with suppress(OSError):
                descriptor = os.open(spare, os.O_RDWR)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    spare.rename(path)  # fails where another writer was before this one
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
        """The node that wrote a segment that was read."""
        found: str = self._open[key][name].node
        return found

    def note(self, key: str, name: str, value: Any) -> None:
        """Keeps something small, for who takes this process's place."""
        folder = self._folder(key)
        folder.mkdir(exist_ok=True)
        part = folder / f".{name}.part"
        part.write_bytes(encoding.encode(value))
        part.rename(folder / f".{name}")

    def notes(self, key: str) -> list[str]:
        """The names of what was noted, in order."""
        found = (p.name for p in self._folder(key).iterdir())
        return sorted(name[1:] for name in found if name.startswith(".") and not name.endswith(".part"))

    def noted(self, key: str, name: str, type: type[T]) -> T:
        """Return a note, which was a value of this type. Raises RunError for one that is damaged."""
        path = self._folder(key) / f".{name}"
        try:
            return encoding.decode(path.read_bytes(), type)
        except encoding.DecodeError as error:
            raise _damaged(path, error) from None

    def tasks(self) -> Iterator[str]:
        """The keys of tasks of which there is something."""
        yield from (p.name.replace(":", "/") for p in self.room.path.iterdir() if p.is_dir() and p.name != SPARE)

    def names(self, key: str) -> list[str]:
        """Of a task all segments, in the order in which they were written."""
        found = [p for p in self._folder(key).iterdir() if not p.name.startswith(".") and p.suffix != ".part"]
        return [p.name for p in sorted(found, key=lambda p: p.stat().st_mtime_ns)]

    def forget(self, key: str) -> None:
        """Of a task all that this process has mapped."""
        self._open.pop(key, None)

    def drop(self, key: str) -> None:
        """Of a task everything."""
        self.forget(key)
        for old in self._spares():  # of the task before, which the last one had no use for
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


def _write(descriptor: int, array: Array, at: int) -> None:
    view = array.data.cast("B") if array.nbytes else memoryview(b"")
    while view:
        done = os.pwrite(descriptor, view, at)
        view = view[done:]
        at = at + done
