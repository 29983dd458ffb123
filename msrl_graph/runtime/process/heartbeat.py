"""Heartbeats: which processes of a host still move, and the end of those that do not.

Invariant: a process is killed only by another one that has itself moved for the whole limit, has looked at it again and
again, and has seen neither a beat nor bytes read or written. A machine that was suspended, or is slow, therefore kills
nobody: whoever looks stood still with it. Why a process was killed is written down before the kill.

Each process of a run has a *heart*: a file in the run's folder of its host, into which a thread counts once a second.
The same thread looks at the hearts of the others. A process that is stopped (SIGSTOP), or in which no Python thread
runs (C code that holds the interpreter's lock and never returns), does not count. A process that waits, or that runs
the user's Python code, does: how long that may take is a matter of the dock's `deadline`.
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
RATE = 100 << 10  # bytes a second: what moves more than this moves
OURS = b"msrl_graph.runtime"  # in the command line of the processes that ranks start
NOTE = ".ended-"
_HEART = struct.Struct("<qqq")  # process id, its start (clock ticks since boot), beats
_BEATS = slice(16, 24)
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


class Limits(NamedTuple):
    """Seconds without a beat after which a process is killed: `stopped` by a signal, or `silent` for another reason.

    Both pass before the dock's deadline does, unless that is shorter than a minute, so that a wait is not blamed on the
    process that waits. Silent is the longer one: loading a library holds the interpreter's lock, and so do some regular
    expressions. A process that wants a processor and gets none is not silent: of it, seconds of a processor count.
    """

    stopped: float
    silent: float

    @classmethod
    def of(cls, deadline: float) -> Limits:
        return cls(max(5.0, min(60.0, deadline / 2)), max(40.0, 0.75 * deadline))


class ProcessStat(NamedTuple):
    """What the system knows of a process or of a thread: its state (`T`: stopped, `Z`: dead, `D`: waits for a disk,
    `R`: computes or would), its start in clock ticks, how many seconds of a processor it has had, and how many pages it
    had to wait for, as of a file that it has mapped."""

    state: str
    start: int
    computed: float
    faults: int


def stat(pid: int | str) -> ProcessStat | None:
    """The state of a process, or of a thread as `PID/task/ID`; None where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return ProcessStat(
        fields[0].decode(), int(fields[19]), (int(fields[11]) + int(fields[12])) / _TICKS, int(fields[9])
    )


class Heart:
    """The heart of this process, which is called `process`. It beats until the process ends, and looks at the hearts of
    the others in `folder`, and at `others` (process ids by name), which have none."""

    def __init__(
        self,
        folder: Path | str,
        process: str,
        limits: Limits,
        others: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        home = Path(folder, FOLDER)
        home.mkdir(mode=0o700, exist_ok=True)
        here = stat(os.getpid())
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
                with suppress(OSError):  # the run's folder is being removed
                    self.watch.look(passed)
                passed = 0.0


@dataclass
class _Patient:
    """What was seen of a process at the last look, and for how many seconds it has not moved since."""

    beats: int = -1
    bytes: int = 0
    computed: float = 0.0  # seconds of a processor
    silent: float = 0.0
    stopped: float = 0.0


class HeartbeatWatch:
    """Looks at the hearts in a folder, and kills the processes that do not move. `me` is not looked at."""

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
        """Looks once, `seconds` of this process's own time after the last look; why processes were killed."""
        found = self._found()
        killed = []
        self._seen = {who: self._seen.get(who, _Patient()) for who in found}
        for (name, pid, start), beats in found.items():
            patient = self._seen[name, pid, start]
            now = stat(pid)
            if now is None or now.start != start or now.state == "Z":
                continue
            moved = _bytes(pid) if beats >= 0 else 0
            if beats != patient.beats or moved - patient.bytes > RATE * seconds:
                self._seen[name, pid, start] = _Patient(beats, moved, now.computed)
                continue
            patient.bytes = moved
            states = {t.state for t in map(stat, _threads(pid)) if t is not None}
            if "R" in states:
                patient.silent += min(seconds, now.computed - patient.computed)
            elif not states & {"D", "T"}:
                patient.silent += seconds
            patient.computed = now.computed
            patient.stopped = patient.stopped + seconds if now.state == "T" else 0.0
            if patient.stopped >= self.limits.stopped:
                killed.append(self._end(name, pid, patient.stopped, "stopped"))
            elif beats >= 0 and patient.silent >= self.limits.silent:
                killed.append(self._end(name, pid, patient.silent, "none of its Python code runs"))
        return [why for why in killed if why]

    def _found(self) -> dict[tuple[str, int, int], int]:
        """By name, id and start the beats of all processes; -1 of those that have no heart."""
        found = {}
        for name, (pid, start, beats) in _hearts(self.home).items():
            if name != self.me:
                found[name, pid, start] = beats
            for child in _children(pid) if name != DRIVER else ():
                if (now := stat(child)) is not None:
                    found[f"a process of {name} ({_program(child)})", child, now.start] = -1
        for name, pid in self.others().items():
            if (now := stat(pid)) is not None:
                found.setdefault((name, pid, now.start), -1)
        return found

    def _end(self, name: str, pid: int, seconds: float, how: str) -> str:
        """Kills a process, unless another one does; why."""
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


def examine(folder: str, limits: tuple[float, float], seconds: float) -> None:
    """Looks at a host for so long, from a process that is none of the run's."""
    watch = HeartbeatWatch(folder, Limits(*limits))
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(EVERY)
        watch.look(EVERY)


def ended(folder: Path | str) -> dict[int, tuple[str, str]]:
    """The processes that were killed since they did not move: by id the name, and why."""
    found = {}
    with suppress(OSError):
        for path in Path(folder, FOLDER).glob(f"{NOTE}*"):
            name, _, why = path.read_text(encoding="utf-8").partition("\n")
            if why:
                found[int(path.name.removeprefix(NOTE))] = name, why
    return found


def moved(folder: Path | str) -> int:
    """Bytes that the processes with a heart have read and written so far. Where one of them waits for a disk, what the
    disks of this host have written, too: while a file is brought to the disk, its process only waits."""
    total = 0
    waits = False
    for pid, _, _ in _hearts(Path(folder, FOLDER)).values():
        total += _bytes(pid)
        waits = waits or any((t := stat(thread)) and t.state == "D" for thread in _threads(pid))
    return total + (_flushed() if waits else 0)


def _hearts(home: Path) -> dict[str, tuple[int, int, int]]:
    found = {}
    with suppress(OSError):
        for path in home.iterdir():
            if not path.name.startswith("."):
                with suppress(OSError, struct.error):
                    found[path.name] = _HEART.unpack(path.read_bytes())
    return found


def _bytes(pid: int) -> int:
    """What a process has read and written, pages of mapped files included."""
    now = stat(pid)
    try:
        lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    if now is None:
        return 0
    told = {name: int(value) for name, _, value in (line.partition(": ") for line in lines)}
    return told.get("rchar", 0) + told.get("wchar", 0) + now.faults * _PAGE


def _flushed() -> int:
    """Bytes that the disks of this host have written."""
    with suppress(OSError, ValueError, IndexError):
        text = Path("/proc/vmstat").read_text(encoding="ascii")
        return int(text.partition("nr_written ")[2].split()[0]) * _PAGE
    return 0


def _threads(pid: int) -> list[str]:
    """The threads of a process, as `stat` knows them; none where it has ended."""
    try:
        return [f"{pid}/task/{path.name}" for path in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []


def _children(pid: int) -> list[int]:
    """The processes below a process that run a program of this package."""
    found = []
    for thread in _threads(pid):
        with suppress(OSError):
            for child in map(int, Path(f"/proc/{thread}/children").read_text(encoding="ascii").split()):
                if OURS in _command(child):
                    found += [child, *_children(child)]
    return found


def _command(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _program(pid: int) -> str:
    """The last part of the name of the module that a process runs."""
    words = _command(pid).split(b"\0")
    return next((w.decode().rpartition(".")[2] for w in words if w.startswith(OURS)), "unknown")
