"""Messages between a supervisor and its driver: an attempt, and its result.

Invariant: both messages are plain data that msgspec can write as JSON.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...diagnostics import Diagnostic
from ...diagnostics.surface import Surface
from ...ir.plan import Plan
from ...ir.run_options import RunOptions
from ..metrics.ports import Ports
from ..process.preload import PreloadAddress

NO_SERVER = PreloadAddress()


@dataclass(frozen=True)
class Attempt:
    """The supervisor's message to a driver: what to run, and where.

    - `out`: the folder of the results.
    - `folder`: the temporary folder of the attempt.
    - `answer`: the descriptor of the open file to which the driver writes its result.
    - `resume`: the checkpoint to resume from; "" if the run starts from the beginning.
    - `lines`: how many lines the metrics file in `out` had when the checkpoint `resume` was written.
    - `restarts`: how many times the run was restarted before this attempt.
    - `surface`: where the messages of the driver are shown.
    - `url`: the URL to which the results are uploaded; "" if the results remain in `out`.
    """

    plan: Plan
    out: str
    folder: str
    answer: int
    resume: str
    lines: int
    options: RunOptions
    ports: Ports
    restarts: int
    surface: Surface
    url: str = ""
    patience: float = 0.0  # seconds to wait for missing hosts
    edited: tuple[str, ...] = ()  # files that changed since the run began, and were reported
    parent: int = -1  # a pipe whose other end the supervisor has
    lock: int = -1  # the descriptor that locks the folder `out`
    changed: tuple[str, ...] = ()  # changes since the checkpoint of the resumed run
    preload: PreloadAddress = NO_SERVER
    data: dict[str, str] = field(default_factory=dict)  # digests of sampled blocks when the run began


@dataclass(frozen=True)
class Result:
    """The driver's message to the supervisor: how the attempt ended.

    `kind` is one of these words. The supervisor retries the run only after "died".

    - "done": the run has ended normally.
    - "fault": the input is wrong, or the machines lack what the plan needs.
    - "failed": an error that a retry would not remove.
    - "died": a process or a host was lost, or stopped responding.
    - "interrupted": a signal asked the run to end.
    """

    kind: str
    message: str = ""
    status: int = 0
    diagnostics: list[Diagnostic] = field(default_factory=list)
    hosts: int = 0  # the number of hosts, if the fault is that there are too few


__all__ = ["Attempt", "Result"]
