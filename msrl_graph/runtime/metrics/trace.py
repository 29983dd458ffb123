"""Trace of a run for a viewer: what every process did, and when.

Invariant: the trace's memory and file are bounded, even for a long run: only the first FIRST and the last LAST tasks
are kept. A task is one iteration or one evaluation.
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
    """An event of the trace.

    `process` is the number of the process in the trace. The viewer shows the events of a process on one or more tracks:
    a process that works in parallel has several. `lane` is the number of the event's track. `start` is the wall-clock
    time in seconds.
    """

    name: str
    start: float
    seconds: float
    process: int
    lane: int
    facts: Mapping[str, str | int]


class Trace:
    """Events of a run's tasks; `label` returns a process's name in the trace."""

    def __init__(self, label: Callable[[str], str]) -> None:
        self.label = label
        self.left_out = 0  # tasks
        self._lanes: dict[str, dict[str, int]] = {}  # by process: its lanes, for work and for what it does in parallel
        self._first: list[tuple[int, list[_Kept]]] = []  # by task: its iteration and its events
        self._last: deque[tuple[int, list[_Kept]]] = deque(maxlen=LAST)
        self._start: float | None = None

    def add(self, iteration: int, reports: Sequence[Report]) -> None:
        """Add the events of a task, from the reports of all processes."""
        events = []
        for report in reports:
            lanes = self._lanes.setdefault(report.process, {"": 0})
            process = list(self._lanes).index(report.process)
            for event in report.events:
                self._start = event.start if self._start is None else min(self._start, event.start)
                lane = lanes.setdefault(event.parallel_part, len(lanes))
                facts = {
                    sys.intern(key): sys.intern(value) if isinstance(value, str) else value
                    for key, value in event.facts.items()
                }
                events.append(_Kept(sys.intern(event.name), event.start, event.seconds, process, lane, facts))
        if len(self._first) < FIRST:
            self._first.append((iteration, events))
        else:
            self.left_out += len(self._last) == LAST
            self._last.append((iteration, events))

    def write(self, path: Path) -> None:
        """Write the events of the kept tasks to a file that Chrome and Perfetto can show."""
        events: list[dict[str, Any]] = []
        for pid, (process, lanes) in enumerate(self._lanes.items()):
            events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": self.label(process)}})
            events += [_lane(pid, tid, lane_name or "work") for lane_name, tid in lanes.items()]
        for iteration, kept_events in (*self._first, *self._last):
            for event in kept_events:
                place = {"pid": event.process, "tid": event.lane, "args": {"iteration": iteration, **event.facts}}
                when = {"ts": (event.start - (self._start or 0.0)) * 1e6, "dur": event.seconds * 1e6}
                events.append({"name": event.name, "ph": "X", **when, **place})
        about = {"tasks left out": self.left_out} if self.left_out else {}
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}))


def _lane(pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
