"""The report of a process on one task: phases, trace events and metrics.

Invariant: a report contains plain data and no tensors. A metric is either a (sum, weight) pair, so that the reports of
several ranks can be added, or a maximum.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from .task import CutPrompt

# perf_counter is the same clock in all processes of a host; its offset from wall time is computed once.
_EPOCH = time.time() - time.perf_counter()


class RunError(Exception):
    """An error in a process of the run, with a message for the user."""


class RankFailed(RunError):
    """An error that an engine raised in a rank.

    `joint` is true if the error occurred in a collective. The cause may then be the death of another process.
    """

    def __init__(self, message: str, joint: bool = False) -> None:
        super().__init__(message, joint)
        self.message = message
        self.joint = joint

    def __str__(self) -> str:
        return self.message


class RanksNotJoined(RunError):
    """A rank did not find the other ranks at its start.

    Either the network failed, or another rank is lost.
    """


class ProcessLost(RunError):
    """A process that a rank needs was killed from outside the run. A retry may help."""


class WeightsNotDelivered(RunError):
    """A rank does not hold, or does not compute with, the weights that it should have."""


@dataclass
class NextValues:
    """The values that functions have computed for one state, for the next iteration.

    `units` has, for each entry of `values`, the number of the row or group to which the value belongs. If the state has
    a single value, the only unit is the batch.
    """

    units: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


class Event(NamedTuple):
    """One interval of a run's trace.

    - `name`, `seconds`: what the process did in the interval, and the interval's length.
    - `start`: the start of the interval (wall clock).
    - `facts`: details about the interval.
    - `parallel_part`: the part of the process that worked during the interval, in parallel with the rest of the
      process, or "".
    """

    name: str
    start: float
    seconds: float
    facts: Mapping[str, str | int] = {}
    parallel_part: str = ""

    @classmethod
    def since(cls, start: float, name: str, beside: str = "", **facts: str | int) -> Event:
        """Return the event of an interval that began at `start` and ends now.

        `start` is a value of `time.perf_counter`. `beside` becomes the field `parallel_part`.
        """
        return cls(name, start + _EPOCH, time.perf_counter() - start, facts, beside)


@dataclass(frozen=True)
class Loaded:
    """The number of rows that a process has loaded from one data file.

    `rows` is the number of usable rows. `left_out` says in words which rows of the file are not usable.
    """

    rows: int
    left_out: str = ""


@dataclass
class Report:
    """The report of one process on one task."""

    process: str
    seconds: dict[str, float] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)  # for the user to read
    failed: dict[str, dict[str, str]] = field(default_factory=dict)  # by generation and reason: the first such row
    groups: dict[str, list[Any]] = field(default_factory=dict)  # by metric: figures of each prompt's rows
    bytes: dict[str, int] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)  # bytes by what was done with rows, as `node get away`
    loads: dict[str, list[int]] = field(default_factory=dict)  # by node: the tokens of each share that it got
    states: dict[str, NextValues] = field(default_factory=dict)  # by the state's name
    cut: list[CutPrompt] | None = None  # prompts that the next iteration continues; None: not known
    rounds: int = 0  # of prompts in its task; 0: not known
    prompt_rows: Any = field(
        default_factory=lambda: np.zeros(0, np.int64)
    )  # the data's rows that became prompts, in order

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.add(name, start)

    def add(self, name: str, start: float) -> None:
        """Add the interval from `start` until now to a phase and to the trace.

        `start` is a value of `time.perf_counter`. `name` is the name of the phase.
        """
        self.events.append(event := Event.since(start, name))
        self.add_seconds(name, event.seconds)

    def add_seconds(self, name: str, seconds: float) -> None:
        """Add seconds to a phase without adding an interval to the trace.

        Another interval of the trace already covers these seconds, or these seconds are in parallel with that interval.
        """
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def count(self, name: str, total: float, weight: float) -> None:
        old = self.sums.get(name, (0.0, 0.0))
        self.sums[name] = (old[0] + total, old[1] + weight)

    def peak(self, name: str, value: float) -> None:
        self.peaks[name] = max(self.peaks.get(name, value), value)
