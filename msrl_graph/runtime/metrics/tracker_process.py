"""The driver's side of a tracker that runs in a process of its own.

Invariant: no method waits for the process, except `wait`, which waits until a given time. A process that fails or hangs
is ended and reported once. It ends with the driver, whose process session and mark it has (processes.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from .tracker_main import PROGRAM, Assignment, TrackerProgress

HANG = 120.0  # seconds that a tracker may take for one line, or to begin
KNOWN = 0.01  # further seconds that it may take to begin, for each line that the run has


class TrackerProcess:
    """A tracker in a process of its own.

    `label` names the tracker in messages and in the name of its log. `added` and `sent` are the numbers of lines that
    the tracker has got, and that the run has written, in this attempt.
    """

    def __init__(self, label: str, assignment: Assignment, folder: Path, log: Path, say: Callable[[str], None]) -> None:
        self.label = label
        self.say = say
        self.log = log
        self._begin = HANG + KNOWN * assignment.kept  # seconds
        self.sent = 0
        self.added = -1
        self.ended = False  # reported, or not needed any more
        self._since = time.monotonic()  # of the last progress, or of the first line that the tracker has not got
        self._text = b""
        stated = folder / f"tracker-{label}.json"
        stated.write_bytes(msgspec.json.encode(assignment))
        self._status, status = os.pipe()
        os.set_blocking(self._status, False)
        temporary = folder / f"tracker-{label}"  # what a killed process leaves goes with the folder of the attempt
        temporary.mkdir(exist_ok=True)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", PROGRAM, str(stated), str(status)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=(status,),
                process_group=0,
                env={**os.environ, "TMPDIR": str(temporary)},
            )
        os.close(status)

    def add(self) -> None:
        """Count a line of the metrics file, which the process reads by itself."""
        if self.added == self.sent:
            self._since = time.monotonic()
        self.sent += 1
        self.look()

    def look(self) -> None:
        """Read the process's reports; end and report a process that failed or hangs."""
        if self.ended:
            return
        error = self._read_reports()
        if error or self._process.poll() is not None:
            error = error or self._read_reports() or f"its process ended, {describe_status(self._process.returncode)}"
            self._give_up(f"failed: {error}")
            return
        what, limit = (f"line {self.added + 1}", HANG) if self.added >= 0 else ("its begin", self._begin)
        if self.added < self.sent and time.monotonic() - self._since > limit:
            self._give_up(f"hangs: {what} has taken more than {limit:g} s")

    def finish(self, outcome: str) -> None:
        """Ask the process to end when the tracker has got all lines."""
        self.look()
        with suppress(OSError):  # it has just ended
            if self._process.stdin is not None:
                self._process.stdin.write(f"{outcome}\n".encode())
                self._process.stdin.flush()

    def wait(self, until: float) -> None:
        """Wait for the end of the process, at most until a time of `time.monotonic`."""
        if not self.ended:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, until - time.monotonic()))
            error = self._read_reports()
            if self._process.returncode is None:
                self._give_up("did not end in time" if self.added == self.sent else "is too slow")
            elif self._process.returncode:
                reason = error or f"its process ended, {describe_status(self._process.returncode)}"
                self._give_up(f"failed: {reason}")
        self._kill()
        os.close(self._status)
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def _read_reports(self) -> str:
        """Read the process's reports; return the error that it reported, or ""."""
        with suppress(BlockingIOError):
            while piece := os.read(self._status, 65536):
                self._text += piece
        *reports, self._text = self._text.split(b"\n")
        for report in reports:
            progress = msgspec.json.decode(report, type=TrackerProgress)
            self._since = time.monotonic()
            self.added = progress.added
            if progress.error:
                return progress.error
        return ""

    def _give_up(self, problem: str) -> None:
        self._kill()
        self.ended = True
        has = f"it has {max(0, self.added)} of {self.sent} lines of this attempt" if self.sent else "it has no line"
        self.say(f"warning: the tracker `{self.label}` {problem}; {has}; the run goes on without it: see {self.log}")

    def _kill(self) -> None:
        """Kill the process and the processes that it has started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def describe_status(status: int) -> str:
    """Describe how a process ended."""
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"with exit status {status}"
