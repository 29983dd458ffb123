"""The process of a tracker, which hands each line of metrics.jsonl to the tracker.

The driver starts this process with the path of an `Assignment`. The process reports its progress through a pipe. At the
end of the attempt, the driver writes the outcome to standard input; if standard input closes without an outcome, the
driver is dead.

Invariant: the driver never waits for this process while iterations run, because the file is the queue: the process
reads each line when it has handed over the line before.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from ...trackers import Line, TrackedRun, find_tracker, is_file
from ..process.shipped_files import import_file, use_folder
from .metrics_file import parse_line

PROGRAM = "msrl_graph.runtime.metrics.tracker_main"
EVERY = 0.2  # seconds between two looks at the metrics file


@dataclass(frozen=True)
class Assignment:
    """What a tracker's process has to do.

    - `tracker`: the name of the tracker, or `/folder/mine.py:MyTracker`.
    - `run`: the tracked run, without its lines.
    - `metrics`: the metrics file, whose first `kept` lines were there before.
    - `artefacts`: the files to add.
    - `shipped`: the temporary folder with the run's copies of the user's files.
    """

    tracker: str
    run: TrackedRun
    metrics: str
    kept: int
    artefacts: list[str]
    shipped: str


@dataclass(frozen=True)
class TrackerProgress:
    """The progress of a tracker's process.

    `added` is the number of lines that the tracker has got in this attempt, -1 before it has begun. `error` is the
    error that ended the process, or "".
    """

    added: int
    error: str = ""


class TrackerLoop:
    """The work of a tracker's process; `status` is the descriptor to which it reports."""

    def __init__(self, assignment: Assignment, status: int) -> None:
        self.assignment = assignment
        self.status = status
        self.added = -1
        self.outcome = ""

    def run(self) -> None:
        tracker = _make_tracker(self.assignment)
        texts = _read_lines(Path(self.assignment.metrics))
        kept = [parse_line(next(texts)) for _ in range(self.assignment.kept)]
        tracker.begin(replace(self.assignment.run, lines=kept))
        self._report_added()
        for path in self.assignment.artefacts:
            if hasattr(tracker, "add_artefact"):
                tracker.add_artefact(Path(path))
        for line in self._follow(texts):
            if line is not None:
                tracker.add(line)
                self._report_added()
            elif hasattr(tracker, "flush"):
                tracker.flush()
        if hasattr(tracker, "close"):
            tracker.close(self.outcome)

    def _follow(self, texts: Iterator[bytes]) -> Iterator[Line | None]:
        """Yield each line of the metrics file until the driver has reported the outcome.

        Lines that the driver wrote before it reported the outcome are complete. After the last line that there is, None
        is yielded.
        """
        has_new = True
        while True:
            ended = bool(self.outcome)
            for text in texts:
                if not text:
                    break
                has_new = True
                yield parse_line(text)
            if has_new:
                has_new = False
                yield None
            if ended:
                return
            if select.select([sys.stdin], [], [], EVERY)[0]:
                self.outcome = sys.stdin.readline().strip()
                if not self.outcome:
                    os._exit(1)  # the driver is dead

    def _report_added(self) -> None:
        self.added += 1
        self.report(TrackerProgress(self.added))

    def report(self, progress: TrackerProgress) -> None:
        with suppress(OSError):  # the driver is dead
            os.write(self.status, msgspec.json.encode(progress) + b"\n")


def _make_tracker(assignment: Assignment) -> Any:
    if not is_file(assignment.tracker):
        return find_tracker(assignment.tracker)()
    path, _, name = assignment.tracker.rpartition(":")
    return getattr(import_file(path), name)()


def _read_lines(path: Path) -> Iterator[bytes]:
    """Yield each complete line of a file that grows.

    Whenever there is no further line, b"" is yielded.
    """
    with path.open("rb") as file:
        rest = b""
        while True:
            rest += file.readline()
            if rest.endswith(b"\n"):
                yield rest
                rest = b""
            else:
                yield b""


def main(path: str, status: int) -> NoReturn:
    os.environ.setdefault("DO_NOT_TRACK", "1")  # of the use of the packages
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the driver says when to end
    assignment = msgspec.json.decode(Path(path).read_bytes(), type=Assignment)
    if assignment.shipped:
        use_folder(assignment.shipped)
    loop = TrackerLoop(assignment, status)
    try:
        loop.run()
    except BaseException as error:  # a tracker may raise anything, also SystemExit
        traceback.print_exc()
        loop.report(TrackerProgress(loop.added, f"{type(error).__name__}: {error}"))
        sys.stderr.flush()
        os._exit(1)
    sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
