"""The rows of one host in memory that its processes share: a file for what one call wrote, mapped by whoever reads it.

Invariant: a file is there whole or not at all, and never changes. It says by itself what is in it, so that a process
that takes a dead one's place finds all that there was. What is read are views of the file, which nobody may write to;
they stay as they are when it is dropped: the memory of a large file is used again, but only once nobody reads it.
Where the last process that `Room.join`ed is gone, however it went, so is the room with all its files.
"""

from __future__ import annotations

import fcntl
import json
import math
import mmap
import os
import pickle
import shutil
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..data.columns import Array, Column, Piece
from ..process.processes import NEW, PREFIX, ROWS, SHARED, go_with
from .wire import Said

_ALIGN = 64
LOCK, SPARE = ".held", ".spare"
_LARGE = 1 << 20  # bytes of a file whose memory is kept for the next one
# A note: how many units of bytes its text takes, and from where on it lies.
_SAYS, _UNIT, _BEGIN = ".says-", 16, 1


class Room:
    """A folder for the files of one host and one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def made(cls, name: str, size: int) -> Room:
        """A room with place for `size` bytes: in memory where it has that much, else among the temporary files. It is
        removed when nobody holds it any more. One of the same name, which a process that died has left, is taken
        over."""
        places = [SHARED] if SHARED.is_dir() and os.access(SHARED, os.W_OK) else []
        places += [Path(tempfile.gettempdir())]
        for place in places:
            _sweep(place)
        old = [p for p in places if (p / name / LOCK).exists()]
        roomy = [p for p in places if shutil.disk_usage(p).free >= size]
        room = cls((old or roomy or places[-1:])[0] / name)
        room.path.mkdir(mode=0o700, exist_ok=True)
        room.join()
        go_with(room.path / LOCK, room.path)
        return room

    def said(self) -> dict[str, Said]:
        """By process what it says, those that died too."""
        found = {}
        for path in self.path.glob(f"{_SAYS}*"):
            with suppress(OSError, ValueError):
                size, text = (data := path.read_bytes())[0], data[_BEGIN:]
                if size:
                    process, *told = json.loads(text[: size * _UNIT])
                    found[process] = Said(*told)
        return found

    def held(self) -> int:
        """Bytes of the rows that lie here."""
        found = 0
        for path in self.path.glob("*/[!.]*"):
            with suppress(OSError):  # dropped meanwhile
                found += path.stat().st_size
        return found

    def join(self) -> None:
        """Holds the room for as long as this process lives."""
        self._held = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._held, fcntl.LOCK_SH)


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
        self._what, self._since, self._key = "", time.monotonic(), ""
        self._done: dict[str, int] = {}  # by node, of the task of this key

    def say(self, what: str) -> None:
        self._what, self._since = what[:500], time.monotonic()
        self._write()

    def did(self, key: str, node: str, rows: int) -> None:
        """Is done with so many more rows of a node that writes none."""
        if key != self._key:
            self._key, self._done = key, {}
        self._done[node] = self._done.get(node, 0) + rows
        self._write()

    def _write(self) -> None:
        said = [self.process, self._what, self._since, os.getpid()]
        text = json.dumps([*said, self._key, self._done]).encode()
        if len(text) > 255 * _UNIT:  # what it does comes first
            text = json.dumps(said).encode()
        size = -(-len(text) // _UNIT)
        self._memory[:1] = b"\0"  # who looks between these sees nothing
        self._memory[_BEGIN : _BEGIN + size * _UNIT] = text.ljust(size * _UNIT)
        self._memory[0] = size


def _sweep(place: Path) -> None:
    """Removes rooms of which every process was killed, also the one that was to remove it."""
    for lock in place.glob(f"{PREFIX}*-{ROWS}-*/{LOCK}"):
        with suppress(OSError):
            if time.time() - lock.stat().st_mtime < NEW:
                continue
            handle = os.open(lock, os.O_RDWR)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent)
            finally:
                os.close(handle)


class Segment:
    """What one call wrote: pieces by column, as views."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            # Holds for as long as the mapping and any view of it: nobody writes to this file again before.
            fcntl.flock(file, fcntl.LOCK_SH)
            if not path.samefile(f"/proc/self/fd/{file.fileno()}"):  # dropped meanwhile
                raise FileNotFoundError(path)
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        size = _LENGTH.unpack_from(self._memory)[0]
        self.node, self._fields = pickle.loads(self._memory[_LENGTH.size : _LENGTH.size + size])

    @cached_property
    def pieces(self) -> dict[str, Piece]:
        found = {}
        for name, (kind, rows, values, offsets) in self._fields.items():
            column = Column(self._array(*values), None if offsets is None else self._array(*offsets))
            found[name] = kind(self._array(*rows), column)
        return found

    def _array(self, dtype: str, shape: tuple[int, ...], offset: int) -> Array:
        return np.frombuffer(self._memory, dtype, math.prod(shape), offset).reshape(shape)


_LENGTH = struct.Struct("<Q")


class Segments:
    """The segments of a room, by the key of a task and by name."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self._open: dict[str, dict[str, Segment]] = {}

    def write(self, key: str, name: str, node: str, pieces: Mapping[str, Piece]) -> None:
        """Keeps the rows that `node` wrote, by column, each piece's by ascending number."""
        fields: dict[str, tuple[Any, ...]] = {}
        arrays: list[tuple[int, Array]] = []
        at = 0

        def placed(array: Array) -> tuple[str, tuple[int, ...], int]:
            nonlocal at
            at = -(-at // _ALIGN) * _ALIGN
            arrays.append((at, array := np.ascontiguousarray(array)))
            at += array.nbytes
            return array.dtype.str, array.shape, arrays[-1][0]

        for column, piece in pieces.items():
            if np.any(piece.rows[1:] <= piece.rows[:-1]):
                rows, first = np.unique(piece.rows[::-1], return_index=True)  # of a row that is there twice the later
                piece = type(piece)(rows, piece.column.take(len(piece.rows) - 1 - first))
            offsets = piece.column.offsets
            fields[column] = (
                type(piece),
                placed(piece.rows),
                placed(piece.column.values),
                None if offsets is None else placed(offsets),
            )
        self._keep(key, name, (node, fields), arrays)

    def _keep(
        self, key: str, name: str, head: tuple[str, dict[str, tuple[Any, ...]]], arrays: list[tuple[int, Array]]
    ) -> None:
        node, fields = head
        begin = 0
        while True:  # the head's length depends on the offsets in it, which depend on its length
            moved = {c: (f[0], *(p and (p[0], p[1], p[2] + begin) for p in f[1:])) for c, f in fields.items()}
            data = pickle.dumps((node, moved), protocol=5)
            if -(-(_LENGTH.size + len(data)) // _ALIGN) * _ALIGN <= begin:
                break
            begin = -(-(_LENGTH.size + len(data) + _ALIGN) // _ALIGN) * _ALIGN
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

    def read(self, key: str, name: str) -> dict[str, Piece]:
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
        part.write_bytes(pickle.dumps(value))
        part.rename(folder / f".{name}")

    def noted(self, key: str) -> dict[str, Any]:
        """What was noted, by name."""
        found = (p for p in self._folder(key).iterdir() if p.name.startswith(".") and p.suffix != ".part")
        return {p.name[1:]: pickle.loads(p.read_bytes()) for p in sorted(found)}

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
        view, at = view[done:], at + done
