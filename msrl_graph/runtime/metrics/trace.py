"""The trace of a run: what every process did when, for a viewer.

Invariant: its memory and its file are bounded, however long the run is: of more than FIRST + LAST tasks, those in
between are left out. A task is an iteration, or one evaluation.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..process.task_report import Report

FIRST = 20  # tasks whose events are kept from the beginning,
LAST = 180  # and from the end


class _Kept(NamedTuple):
    """An event, by numbers of a process and of a lane of it; `start` in seconds (wall clock)."""

    name: str
    start: float
    seconds: float
    process: int
    lane: int
    facts: Mapping[str, str | int]


class Trace:
    """`placed` gives what a process is called in the trace."""

    def __init__(self, placed: Callable[[str], str]) -> None:
        self.placed = placed
        self.left_out = 0  # tasks
        self._lanes: dict[str, dict[str, int]] = {}  # by process, what it does beside its work, too
        self._first: list[tuple[int, list[_Kept]]] = []  # by task its iteration, and events
        self._last: deque[tuple[int, list[_Kept]]] = deque(maxlen=LAST)
        self._start: float | None = None

    def add(self, iteration: int, reports: Sequence[Report]) -> None:
        """Adds the events of a task."""
        some = []
        for report in reports:
            lanes = self._lanes.setdefault(report.process, {"": 0})
            process = list(self._lanes).index(report.process)
            for e in report.events:
                self._start = e.start if self._start is None else min(self._start, e.start)
                lane = lanes.setdefault(e.beside, len(lanes))
                facts = {sys.intern(k): sys.intern(v) if isinstance(v, str) else v for k, v in e.facts.items()}
                some.append(_Kept(sys.intern(e.name), e.start, e.seconds, process, lane, facts))
        if len(self._first) < FIRST:
            self._first.append((iteration, some))
        else:
            self.left_out += len(self._last) == LAST
            self._last.append((iteration, some))

    def write(self, path: Path) -> None:
        """Writes what is kept, as the trace events of Chrome and Perfetto."""
        events: list[dict[str, Any]] = []
        for pid, (process, lanes) in enumerate(self._lanes.items()):
            events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": self.placed(process)}})
            events += [_lane(pid, tid, beside or "work") for beside, tid in lanes.items()]
        for iteration, some in (*self._first, *self._last):
            for e in some:
                place = {"pid": e.process, "tid": e.lane, "args": {"iteration": iteration, **e.facts}}
                when = {"ts": (e.start - (self._start or 0.0)) * 1e6, "dur": e.seconds * 1e6}
                events.append({"name": e.name, "ph": "X", **when, **place})
        about = {"tasks left out": self.left_out} if self.left_out else {}
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}))


def _lane(pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
