"""Heartbeats, by which the processes of a host find and kill stuck processes.

Each process of a run has a *heart*: a file in the run's folder on the host. A thread of the process increases a counter
in this file once a second. Each increase is a *beat*. The same thread watches the hearts of the other processes on the
host.

- The counter stops if the process is stopped (SIGSTOP). The counter also stops if C code holds the interpreter's lock
  and never returns, because no Python thread can then run.
- The counter continues if the process waits or runs the user's Python code. The dock's `deadline` limits how long a
  process may wait or run this code.

Invariant: a process is killed only by a watching process that was itself running during the whole time limit. During
this time, the watching process has repeatedly looked at the other process. It has seen no beat of the other process,
and the other process has read and written hardly any bytes. So no process is killed because the machine was suspended
or is slow: in these cases, the watching process did not run either. The reason for a kill is written to a file before
the kill.
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
RATE = 100 << 10  # bytes per second: a process that reads and writes more makes progress
OURS = b"msrl_graph.runtime"  # in the command line of the processes that ranks start
NOTE = ".ended-"
_HEART = struct.Struct("<qqq")  # process id, its start (clock ticks since boot), beats
_BEATS = slice(16, 24)
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


class Limits(NamedTuple):
    """Time limits in seconds, after which a process without a beat is killed.

    - `stopped`: the limit for a process that is stopped by a signal.
    - `silent`: the limit for a process that has no beat for another reason. This limit is longer than `stopped`,
      because a process holds the interpreter's lock while it loads a library or evaluates some regular expressions.
      While a process is ready to run, only its seconds on a CPU core count, so a process that gets no core is not
      killed.

    A process can wait for another process, which makes no progress. The waiting process is limited by the dock's
    deadline. Both limits of this class are shorter than this deadline, unless the deadline is shorter than a minute. So
    the process without progress is killed first, and the waiting process is not blamed.
    """

    stopped: float
    silent: float

    @classmethod
    def for_deadline(cls, deadline: float) -> Limits:
        return cls(max(5.0, min(60.0, deadline / 2)), max(40.0, 0.75 * deadline))


class ProcessStat(NamedTuple):
    """The system's statistics of a process or a thread.

    - `state`: `T` is stopped, `Z` is dead, `D` waits for a disk, `R` runs or is ready to run.
    - `start`: the start time, in clock ticks since boot.
    - `computed`: the CPU time in seconds.
    - `faults`: the number of major page faults. In a major page fault, the system loads a memory page, for example of a
      mapped file.
    """

    state: str
    start: int
    computed: float
    faults: int


def read_stat(pid: int | str) -> ProcessStat | None:
    """Return the statistics of a process or a thread; None if it has ended.

    `pid` is the id of a process, or `PID/task/ID` for a thread.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return ProcessStat(
        fields[0].decode(), int(fields[19]), (int(fields[11]) + int(fields[12])) / _TICKS, int(fields[9])
    )


class Heart:
    """The heart of this process, with a thread that beats until the process ends.

    `process` is the name of this process. The thread also watches other processes, and kills a process that exceeds
    `limits`. The thread watches each process that has a heart in `folder`. It also watches processes that have no
    heart: `others` returns the names of these processes with their process ids.
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
    """The last observation of a watched process, and its seconds without progress."""

    beats: int = -1
    bytes: int = 0
    computed: float = 0.0  # seconds of a processor
    silent: float = 0.0
    stopped: float = 0.0


class HeartbeatWatch:
    """A watch that looks at processes and kills a process without progress.

    The watch looks at each process that has a heart in `folder`, except the process named `me`. It also looks at
    processes that have no heart: `others` returns the names of these processes with their process ids.
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
        """Look once at each watched process, and kill the processes without progress.

        `seconds` is the time for which this process itself was running since the last look. Returns the reason for each
        kill.
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
        """Return the number of beats of each watched process.

        The keys are (name of the process, process id, start time). The number is -1 for a process without a heart.
        """
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
        """Kill a process, and return the reason as a sentence for the user.

        `seconds` is the time without progress, and `how` says in words why there was no progress. Returns "" if another
        watching process has already recorded the kill.
        """
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
    """Watch the run's processes on this host for `seconds` seconds.

    A process that is not part of the run calls this function. `folder` is the run's folder on this host. `limits` has
    the two fields of `Limits`.
    """
    watch = HeartbeatWatch(folder, Limits(*limits))
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(EVERY)
        watch.look(EVERY)


def killed_processes(folder: Path | str) -> dict[int, tuple[str, str]]:
    """Return the processes that were killed on this host for lack of progress.

    The result maps the process id to (name of the process, reason for the kill). `folder` is the run's folder on this
    host.
    """
    killed = {}
    with suppress(OSError):
        for path in Path(folder, FOLDER).glob(f"{NOTE}*"):
            name, _, why = path.read_text(encoding="utf-8").partition("\n")
            if why:
                killed[int(path.name.removeprefix(NOTE))] = name, why
    return killed


def bytes_moved(folder: Path | str) -> int:
    """Return how many bytes the run's processes on this host have read and written.

    The function counts each process with a heart in `folder`. While a process flushes a file to disk, the process only
    waits, and the system does not count the flushed bytes for this process. So if one of the processes waits for a
    disk, the function adds the number of bytes that all disks of this host have written.
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
    """Return how many bytes a process has read or written, in files and sockets.

    The pages of mapped files that the system has loaded for the process count as read bytes.
    """
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
    """Return how many bytes the disks of this host have written."""
    with suppress(OSError, ValueError, IndexError):
        text = Path("/proc/vmstat").read_text(encoding="ascii")
        return int(text.partition("nr_written ")[2].split()[0]) * _PAGE
    return 0


def _threads(pid: int) -> list[str]:
    """Return the threads of a process, each as `PID/task/ID`.

    Returns an empty list if the process has ended.
    """
    try:
        return [f"{pid}/task/{path.name}" for path in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []


def _children(pid: int) -> list[int]:
    """Return the ids of the child processes that run a program of msrl_graph.

    The children of these child processes are included, at any depth, if they run a program of msrl_graph.
    """
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
    """Return the short name of the module that a process of msrl_graph runs.

    The short name is the last part of the module's dotted name. The result is "unknown" for any other process.
    """
    words = _command(pid).split(b"\0")
    return next((word.decode().rpartition(".")[2] for word in words if word.startswith(OURS)), "unknown")
