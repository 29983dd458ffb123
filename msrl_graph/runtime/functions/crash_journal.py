"""A record of a function host's current call, which survives the host's death.

Invariant: a call that ended its process, by an exit or by a signal that the call caused, is not repeated. A call during
which the process was killed twice is not repeated either: the call may be the cause of the kills, for example because
it uses up all memory. A call during which the process was killed once is repeated, because one kill proves nothing
about the call. Writing an entry needs no system call: it is a write to the memory of a mapped file, and the kernel
saves this memory even if the process dies.
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
    """The error for a call that is not repeated, because a process died during it.

    `frames` is the call stack of the process when it died, with the innermost frame last. `frames` is empty if the call
    stack is not known.
    """

    def __init__(self, how: str, frames: list[traceback.FrameSummary]) -> None:
        super().__init__(how)
        self.frames = frames


@dataclass(frozen=True)
class _Death:
    """The call in which a process died.

    - `call`: the text that identifies the call.
    - `times`: how many processes, one after another, died in this call.
    - `how`: how the call ended its process; empty if the process was killed.
    - `trace`: the stack trace that Python wrote when the process died.
    """

    call: str
    times: int
    how: str
    trace: str


class CrashJournal:
    """The crash journal of this process: a record of its current call of user code.

    `path` is the file of the journal. If it is None, no other process can read the journal. `again` means that this
    process replaces a process that died.
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
        with suppress(OSError):  # a full disk: the replacement then has no journal
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
        """Record a call of the user's code while this process makes the call.

        `call` is a text that identifies the call. Raises ProcessDied if the call must not be repeated.
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
    """Return the call during which a process died; None if it died outside a call.

    `path` is the journal file that the dead process wrote.
    """
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
