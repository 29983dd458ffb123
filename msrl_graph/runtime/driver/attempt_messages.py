"""What a supervisor and its driver send each other: an attempt, and its result.

Invariant: both are plain data, which msgspec writes as JSON.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...diagnostics import Diagnostic
from ...ir.plan import Plan
from ..metrics.ports import Ports
from ..process.preload import PreloadAddress
from .attempt import WatchOptions

NO_SERVER = PreloadAddress()


@dataclass(frozen=True)
class Attempt:
    """Input of a driver.

    `folder` is the temporary one, `answer` the open file for its result, `resume` a checkpoint (or nothing), `lines`
    the number of lines of the metrics in `out` that belong to it, `restarts` the number of earlier restarts, `url` the
    final place of `out` (or nothing).
    """

    plan: Plan
    out: str
    folder: str
    answer: int
    resume: str
    lines: int
    options: WatchOptions
    ports: Ports
    restarts: int
    url: str = ""
    patience: float = 0.0  # seconds to wait for missing hosts
    edited: tuple[str, ...] = ()  # files that changed since the run began, and were reported
    parent: int = -1  # a pipe whose other end the supervisor has
    lock: int = -1  # of the folder `out`
    changed: tuple[str, ...] = ()  # changes since the checkpoint of the resumed run
    preload: PreloadAddress = NO_SERVER
    data: dict[str, str] = field(default_factory=dict)  # digests of sampled blocks when the run began


@dataclass(frozen=True)
class Result:
    """How an attempt ended: done, fault, failed, died (may be retried), interrupted."""

    kind: str
    message: str = ""
    status: int = 0
    diagnostics: list[Diagnostic] = field(default_factory=list)
    hosts: int = 0  # their number, if too few hosts are the fault


__all__ = ["Attempt", "Result"]
