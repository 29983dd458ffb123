"""Heartbeats: find processes of a host that make no progress, and end them.

Invariant: a process is killed only by another one that was itself running for the whole limit, has looked at it again
and again, and has seen neither a beat nor bytes read or written. A machine that was suspended, or is slow, therefore
kills nothing: the process that looks stood still too. Why a process was killed is written down before the kill.

Each process of a run has a *heart*: a file in the run's folder of its host, into which a thread counts once a second.
The same thread looks at the hearts of the others. A process that is stopped (SIGSTOP), or in which no Python thread
runs (C code that holds the interpreter's lock and never returns), does not count. A process that waits, or that runs
the user's Python code, does count: how long that may take is limited by the dock's `deadline`.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

FOLDER = "hearts"  # below the run's folder of a host
DRIVER = "the driver"
EVERY = 1.0  # seconds between two beats
RATE = 100 << 10  # bytes per second: a process with more makes progress
OURS = b"msrl_graph.runtime"  # in the command line of the processes that ranks start
NOTE = ".ended-"
_HEART = struct.Struct("<qqq")  # process id, its start (clock ticks since boot), beats
_BEATS = slice(16, 24)
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


class Limits(NamedTuple):
    """Seconds without a beat after which a process is killed.

    `stopped`: stopped by a signal; `silent`: for another reason. Both pass before the dock's deadline does, unless that
    is shorter than a minute, so that a wait is not blamed on the process that waits. Silent is the longer one: loading
    a library holds the interpreter's lock, and so do some regular expressions. A process that wants a processor and
    gets none is not silent: only its seconds on a processor count.
    """

    stopped: float
    silent: float

    @classmethod
    def for_deadline(cls, deadline: float) -> Limits:
        return cls(max(5.0, min(60.0, deadline / 2)), max(40.0, 0.75 * deadline))


class ProcessStat(NamedTuple):
    """What the system reports about a process or a thread.

    Its state (`T`: stopped, `Z`: dead, `D`: waits for a disk, `R`: runs or is ready to), its start in clock ticks, the
    seconds of a processor that it has used, and the number of pages that it had to wait for, such as those of a mapped
    file.
    """

    state: str
    start: int
    computed: float
    faults: int


def read_stat(pid: int | str) -> ProcessStat | None:
    """Return the state of a process, or of a thread as `PID/task/ID`; None if gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return ProcessStat(
        fields[0].decode(), int(fields[19]), (int(fields[11]) + int(fields[12])) / _TICKS, int(fields[9])
    )


class Heart:
    """The heart of this process, named `process`.

    It beats until the process ends. It also looks at the hearts of the others in `folder`, and at `others` (process ids
    by name), which have no heart.
    """

    def __init__(
        self,
        folder: Path | str,
        process: str,
        limits: Limits,
        others: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        home = Path(folder, FOLDER)
        home.mkdir(mode=0o700, exist_ok=True)
        here = read_stat(os.getpid())
        part = home / f".{process}.{os.getpid()}"
        part.write_bytes(_HEART.pack(os.getpid(), here.start if here else 0, 0))
        with part.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        part.rename(home / process)
        self.beats = 0
        self.watch = HeartbeatWatch(folder, limits, others, me=process)
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def _beat(self) -> None:
        often = self.watch.often
        passed = 0.0
        pause = min(EVERY, often)
        while True:
            time.sleep(pause)
            self.beats += 1
            self._memory[_BEATS] = self.beats.to_bytes(8, "little")
            passed += pause
            if passed >= often:
                with suppress(OSError):  # the run's folder is being removed now
                    self.watch.look(passed)
                passed = 0.0


@dataclass
class _Patient:
    """What the last look saw of a process, and for how long it has made no progress."""

    beats: int = -1
    bytes: int = 0
    computed: float = 0.0  # seconds of a processor
    silent: float = 0.0
    stopped: float = 0.0


class HeartbeatWatch:
    """Looks at the hearts in a folder and kills processes that make no progress.

    It does not look at `me`.
    """

    def __init__(
        self,
        folder: Path | str,
        limits: Limits,
        others: Callable[[], Mapping[str, int]] = dict,
        me: str = "",
    ) -> None:
        self.home = Path(folder, FOLDER)
        self.limits = limits
        self.others = others
        self.me = me
        self.often = min(5.0, limits.stopped / 10)  # seconds between two looks
        self._seen: dict[tuple[str, int, int], _Patient] = {}

    def look(self, seconds: float) -> list[str]:
        """Look once, `seconds` of this process's own time after the last look.

        Returns why processes were killed.
        """
        beats_by_process = self._read_beats()
        killed = []
        self._seen = {key: self._seen.get(key, _Patient()) for key in beats_by_process}
        for (name, pid, start), beats in beats_by_process.items():
            patient = self._seen[name, pid, start]
            now = read_stat(pid)
            if now is None or now.start != start or now.state == "Z":
                continue
            moved = _count_bytes(pid) if beats >= 0 else 0
            if beats != patient.beats or moved - patient.bytes > RATE * seconds:
                self._seen[name, pid, start] = _Patient(beats, moved, now.computed)
                continue
            patient.bytes = moved
            states = {thread.state for thread in map(read_stat, _threads(pid)) if thread is not None}
            if "R" in states:
                patient.silent += min(seconds, now.computed - patient.computed)
            elif not states & {"D", "T"}:
                patient.silent += seconds
            patient.computed = now.computed
            patient.stopped = patient.stopped + seconds if now.state == "T" else 0.0
            if patient.stopped >= self.limits.stopped:
                killed.append(self._kill(name, pid, patient.stopped, "stopped"))
            elif beats >= 0 and patient.silent >= self.limits.silent:
                killed.append(self._kill(name, pid, patient.silent, "none of its Python code runs"))
        return [why for why in killed if why]

    def _read_beats(self) -> dict[tuple[str, int, int], int]:
        """Return the beats of all processes by name, id and start; -1 if it has no heart."""
        beats_by_process = {}
        for name, (pid, start, beats) in _read_hearts(self.home).items():
            if name != self.me:
                beats_by_process[name, pid, start] = beats
            for child in _children(pid) if name != DRIVER else ():
                if (now := read_stat(child)) is not None:
                    beats_by_process[f"a process of {name} ({_program(child)})", child, now.start] = -1
        for name, pid in self.others().items():
            if (now := read_stat(pid)) is not None:
                beats_by_process.setdefault((name, pid, now.start), -1)
        return beats_by_process

    def _kill(self, name: str, pid: int, seconds: float, how: str) -> str:
        """Kill a process; return why, or "" if another watcher does it."""
        why = f"{name} has not moved for {seconds:.0f} s ({how}); killed"
        mine = True
        try:
            self.home.mkdir(mode=0o700, exist_ok=True)
            note = os.open(self.home / f"{NOTE}{pid}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            os.write(note, f"{name}\n{why}".encode())
            os.close(note)
        except OSError:
            mine = False
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
        return why if mine else ""


def watch_host(folder: str, limits: tuple[float, float], seconds: float) -> None:
    """Watch a host for some seconds, from a process that is not one of the run's."""
    watch = HeartbeatWatch(folder, Limits(*limits))
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(EVERY)
        watch.look(EVERY)


def killed_processes(folder: Path | str) -> dict[int, tuple[str, str]]:
    """Return the processes killed for lack of progress: by id, name and reason."""
    killed = {}
    with suppress(OSError):
        for path in Path(folder, FOLDER).glob(f"{NOTE}*"):
            name, _, why = path.read_text(encoding="utf-8").partition("\n")
            if why:
                killed[int(path.name.removeprefix(NOTE))] = name, why
    return killed


def bytes_moved(folder: Path | str) -> int:
    """Return the bytes that the processes with a heart have read and written so far.

    If one of them waits for a disk, what this host's disks have written counts too: while a file is flushed, its
    process only waits.
    """
    total = 0
    waits = False
    for pid, _, _ in _read_hearts(Path(folder, FOLDER)).values():
        total += _count_bytes(pid)
        waits = waits or any((state := read_stat(thread)) and state.state == "D" for thread in _threads(pid))
    return total + (_count_flushed_bytes() if waits else 0)


def _read_hearts(home: Path) -> dict[str, tuple[int, int, int]]:
    hearts = {}
    with suppress(OSError):
        for path in home.iterdir():
            if not path.name.startswith("."):
                with suppress(OSError, struct.error):
                    hearts[path.name] = _HEART.unpack(path.read_bytes())
    return hearts


def _count_bytes(pid: int) -> int:
    """Return what a process has read and written, including pages of mapped files."""
    now = read_stat(pid)
    try:
        lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    if now is None:
        return 0
    counters = {name: int(value) for name, _, value in (line.partition(": ") for line in lines)}
    return counters.get("rchar", 0) + counters.get("wchar", 0) + now.faults * _PAGE


def _count_flushed_bytes() -> int:
    """Return the bytes that the disks of this host have written."""
    with suppress(OSError, ValueError, IndexError):
        text = Path("/proc/vmstat").read_text(encoding="ascii")
        return int(text.partition("nr_written ")[2].split()[0]) * _PAGE
    return 0


def _threads(pid: int) -> list[str]:
    """Return a process's threads in the form that `stat` takes; [] if it has ended."""
    try:
        return [f"{pid}/task/{path.name}" for path in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []


def _children(pid: int) -> list[int]:
    """Return the descendants of a process that run a program of this package."""
    children = []
    for thread in _threads(pid):
        with suppress(OSError):
            for child in map(int, Path(f"/proc/{thread}/children").read_text(encoding="ascii").split()):
                if OURS in _command(child):
                    children += [child, *_children(child)]
    return children


def _command(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _program(pid: int) -> str:
    """Return the last part of the name of the module that a process runs."""
    words = _command(pid).split(b"\0")
    return next((word.decode().rpartition(".")[2] for word in words if word.startswith(OURS)), "unknown")
