"""What a function host is at, noted where its death does not reach, for the process that takes its place.

Invariant: a call that ended its process (a signal of its own, an exit) is not made again, nor one in which the process
was killed twice: the kill may have been for what the call does, such as taking all memory. One kill says nothing of the
call. A note costs no system call: it is a write to memory that a file backs, which the system keeps when the process is
gone.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from .own_process import end_child

_SIZE = 4096  # of the note; what Python tells of a signal stands behind it
_LENGTH = 4


class ProcessDied(Exception):
    """A call is not made again since a process died in it; `frames` are where it was, the innermost last, as far as
    that is known."""

    def __init__(self, how: str, frames: list[traceback.FrameSummary]) -> None:
        super().__init__(how)
        self.frames = frames


@dataclass(frozen=True)
class _Death:
    """In which call a process died, the `times`-th in a row there; `how` it ended itself (empty: it was killed), with
    Python's trace."""

    call: str
    times: int
    how: str
    trace: str


class CrashJournal:
    """The note of this process, in a file (none: of no use to others); `again`: it takes the place of one that died."""

    def __init__(self, path: Path | None = None, again: bool = False) -> None:
        self.path = path
        self._death = _read(path) if path and again else None
        self._memory = mmap.mmap(-1, _SIZE)
        self._pid = os.getpid()
        self._call = ""
        self._times = 0
        if path is None:
            return
        if self._death and self._death.trace:
            print(self._death.trace, file=sys.stderr)
        with suppress(OSError):  # a disk that is full: who comes after knows nothing
            path.write_bytes(bytes(_SIZE))
            self._file = path.open("r+b")
            self._memory = mmap.mmap(self._file.fileno(), _SIZE)
            self._file.seek(0, os.SEEK_END)
            faulthandler.enable(self._file, all_threads=False)
            # A function may have children of its own, whose end is not this process's.
            os.register_at_fork(after_in_child=faulthandler.disable)
            self._leave = os._exit
            os._exit = self._exit

    @contextmanager
    def at(self, call: str) -> Iterator[None]:
        """While this process makes a call, which is called so; ProcessDied where it is not to be made again."""
        death, self._call, self._times = self._death, (call := call[: _SIZE // 8]), 1
        if death is not None and death.call == call:
            if death.how or death.times > 1:
                raise ProcessDied(
                    death.how or f"its process died in it {death.times} times without a word, as where memory runs out",
                    _frames(death),
                )
            self._times += death.times
        self._write()
        try:
            yield
        finally:
            end_child(self._pid)
            self._memory[:_LENGTH] = bytes(_LENGTH)

    def _write(self, how: str = "") -> None:
        text = json.dumps([self._call, self._times, how]).encode()
        self._memory[:_LENGTH] = bytes(_LENGTH)  # a kill between these leaves no note
        self._memory[_LENGTH : _LENGTH + len(text)] = text
        self._memory[:_LENGTH] = len(text).to_bytes(_LENGTH, "little")

    def _exit(self, status: int) -> NoReturn:
        if os.getpid() == self._pid and any(self._memory[:_LENGTH]):
            self._write(f"it ended its process with status {status}")
        self._leave(status)


def _read(path: Path) -> _Death | None:
    """What the process that wrote there died in."""
    with suppress(OSError, ValueError):  # ValueError: of bytes that no process has written as a whole
        found = path.read_bytes()
        length = int.from_bytes(found[:_LENGTH], "little")
        if length:
            call, times, how = json.loads(found[_LENGTH : _LENGTH + length])
            trace = found[_SIZE:].decode("utf-8", "replace")
            signal = re.search(r"Fatal Python error: (.*)", trace)
            return _Death(call, times, how or (f"it ended its process: {signal[1]}" if signal else ""), trace)
    return None


def _frames(death: _Death) -> list[traceback.FrameSummary]:
    found = re.findall(r'File "(.*)", line (\d+) in (.*)', death.trace)
    return [traceback.FrameSummary(file, int(line), name) for file, line, name in reversed(found)]
