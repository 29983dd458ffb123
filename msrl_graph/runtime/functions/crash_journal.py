"""The current call of a function host, recorded so that it survives the host.

Invariant: a call that ended its process (by a signal of its own or an exit) is not repeated. Nor is a call in which the
process was killed twice: the kill may be due to what the call does, such as using up all memory. One kill proves
nothing about the call. An entry costs no system call: it is a write to memory that a file backs, which the kernel keeps
when the process is gone.
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

_SIZE = 4096  # bytes of the entry; Python's report of a fatal signal follows it
_LENGTH = 4


class ProcessDied(Exception):
    """A call is not repeated because a process died in it.

    `frames` are the stack at its death, innermost last, as far as known.
    """

    def __init__(self, how: str, frames: list[traceback.FrameSummary]) -> None:
        super().__init__(how)
        self.frames = frames


@dataclass(frozen=True)
class _Death:
    """The call in which a process died, for the `times`-th time in a row.

    `how` says how the call ended the process (empty: it was killed); `trace` is Python's trace.
    """

    call: str
    times: int
    how: str
    trace: str


class CrashJournal:
    """The journal of this process, in a file (None: no other process can read it).

    `again` means that this process replaces one that died.
    """

    def __init__(self, path: Path | None = None, again: bool = False) -> None:
        self.path = path
        self._death = _read_death(path) if path and again else None
        self._memory = mmap.mmap(-1, _SIZE)
        self._pid = os.getpid()
        self._call = ""
        self._times = 0
        if path is None:
            return
        if self._death and self._death.trace:
            print(self._death.trace, file=sys.stderr)
        with suppress(OSError):  # a full disk: the replacement then knows nothing
            path.write_bytes(bytes(_SIZE))
            self._file = path.open("r+b")
            self._memory = mmap.mmap(self._file.fileno(), _SIZE)
            self._file.seek(0, os.SEEK_END)
            faulthandler.enable(self._file, all_threads=False)
            # A function may fork children; their end is not the end of this process.
            os.register_at_fork(after_in_child=faulthandler.disable)
            self._real_exit = os._exit
            os._exit = self._exit

    @contextmanager
    def record_call(self, call: str) -> Iterator[None]:
        """Record a call while this process makes it.

        Raises ProcessDied if the call must not be repeated.
        """
        death = self._death
        call = call[: _SIZE // 8]
        self._call = call
        self._times = 1
        if death is not None and death.call == call:
            if death.how or death.times > 1:
                raise ProcessDied(
                    death.how or f"its process was killed in it {death.times} times, as when memory runs out",
                    _parse_frames(death),
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
        self._memory[:_LENGTH] = bytes(_LENGTH)  # a kill between these lines leaves no entry
        self._memory[_LENGTH : _LENGTH + len(text)] = text
        self._memory[:_LENGTH] = len(text).to_bytes(_LENGTH, "little")

    def _exit(self, status: int) -> NoReturn:
        if os.getpid() == self._pid and any(self._memory[:_LENGTH]):
            self._write(f"it ended its process with status {status}")
        self._real_exit(status)


def _read_death(path: Path) -> _Death | None:
    """Return the call in which the process that wrote this file died."""
    with suppress(OSError, ValueError):  # ValueError: an incomplete entry
        data = path.read_bytes()
        length = int.from_bytes(data[:_LENGTH], "little")
        if length:
            call, times, how = json.loads(data[_LENGTH : _LENGTH + length])
            trace = data[_SIZE:].decode("utf-8", "replace")
            signal = re.search(r"Fatal Python error: (.*)", trace)
            return _Death(call, times, how or (f"it ended its process: {signal[1]}" if signal else ""), trace)
    return None


def _parse_frames(death: _Death) -> list[traceback.FrameSummary]:
    frames = re.findall(r'File "(.*)", line (\d+) in (.*)', death.trace)
    return [traceback.FrameSummary(file, int(line), name) for file, line, name in reversed(frames)]
