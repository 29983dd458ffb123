"""Instances of an environment in processes of their own, beside the rank that asks them.

Invariant: a process that ends, hangs or floods its memory takes the rows with it whose instances it has, and no others;
what it did is the reason why they fail. None outlives the rows that it is for.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from multiprocessing.connection import wait
from typing import Literal

from ...ir.graph import Expr
from ..process import row_progress
from .fork_client import PROCESS_GONE, Nest, death_reason, exits_within
from .fork_server import Serve, receive, send
from .instances import Ask, ClassSignature, EnvironmentReply, Failure, Instances
from .user_traceback import BadResult, ErrorSummary
from .values import InjectedArguments, imported

MOST = 64  # processes of a rank at once
PATIENCE = 5.0  # seconds that a process is left to say that its instances have had their time


@dataclass(frozen=True)
class EnvironmentSpec:
    """What a nest is told of an environment."""

    folder: str
    path: str
    name: str
    call: Expr
    filled: InjectedArguments
    columns: tuple[str, ...]
    timeout: float
    gym: Literal["", "sum", "each"]

    def load(self) -> Serve:
        make = getattr(imported(self.path, self.call), self.name)
        return partial(_serve, ClassSignature(make, self.filled, self.columns, self.timeout, self.gym))


def _serve(called: ClassSignature, asking: socket.socket) -> None:
    instances = Instances(called, receive(asking))
    while asked := receive(asking):
        answers = instances.answers(asked, stops=False)
        try:
            send(asking, answers)
        except OSError:
            raise
        except Exception:
            send(asking, {position: _sendable(answer) for position, answer in answers.items()})
    instances.end()


def _sendable(answer: EnvironmentReply | Failure) -> EnvironmentReply | Failure:
    """An answer, if it can leave the process."""
    try:
        pickle.dumps(answer)
    except Exception as error:
        return Failure.of(BadResult(f"what `step` returned cannot leave its process: {error}"))
    return answer


class _Process:
    """One with the instances of some rows; `why` it is no more."""

    def __init__(self, nest: Nest[EnvironmentSpec], memory: int, rows: Iterable[int]) -> None:
        self.nest, self.rows = nest, {*rows}
        self.pid, self.line = nest.fork(memory)
        self.why: Failure | None = None
        self.line.settimeout(PATIENCE)
        with suppress(OSError):
            send(self.line, len(self.rows))

    def kill(self, why: Failure | None = None) -> None:
        """Ends it with all that it has started, and keeps `why`; where that is not known, as it says by its status."""
        alone = why is None and exits_within(self.pid, PATIENCE)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.line.close()
        status = self.nest.status(self.pid)
        self.why = why or (death_reason(status) if alone else PROCESS_GONE)


class IsolatedInstances:
    """As Instances, of rows of which each `part` has a process."""

    def __init__(self, nest: Nest[EnvironmentSpec], parts: Sequence[Iterable[int]], memory: int) -> None:
        self.timeout = nest.spec.timeout
        self.processes = [_Process(nest, memory, part) for part in parts]
        self.of = {position: process for process in self.processes for position in process.rows}

    def answers(
        self, asked: Mapping[int, Ask], stops: bool = False, where: str = ""
    ) -> dict[int, EnvironmentReply | Failure]:
        """What each says; of one whose process is no more, why. `where` is for reports of progress."""
        parts: dict[_Process, dict[int, Ask]] = {}
        for position, ask in asked.items():
            parts.setdefault(self.of[position], {})[position] = ask
        found: dict[int, EnvironmentReply | Failure] = {}
        waiting: dict[socket.socket, _Process] = {}
        for process, part in parts.items():
            if process.why is None:
                try:
                    send(process.line, part)
                    waiting[process.line] = process
                except OSError:
                    process.kill()
        until = time.monotonic() + self.timeout + PATIENCE
        while waiting:
            row_progress.report(len(found), len(asked), where)
            left = until - time.monotonic()
            ready = wait([*waiting], None if left == math.inf else max(left, 0))
            if not ready and left <= 0:
                for process in waiting.values():
                    words = f"it takes longer than {self.timeout:g} s, its `timeout`, and its process does not answer"
                    process.kill(Failure("timeout", ErrorSummary(f"TimeoutError: {words}")))
                break
            for process in [waiting.pop(line) for line in ready if isinstance(line, socket.socket)]:
                found |= self._heard(process)
        for process, part in parts.items():
            if process.why is not None:
                found |= {position: process.why for position in part if position not in found}
        return {position: found[position] for position in asked}

    def _heard(self, process: _Process) -> dict[int, EnvironmentReply | Failure]:
        """What a process says that has something to say, if only by its end."""
        try:
            answers: dict[int, EnvironmentReply | Failure] = receive(process.line)
            return answers
        except (OSError, EOFError):
            process.kill()
        except Exception as error:  # what is of a class that only the user's file knows
            words = f"what `step` returned cannot leave its process: {type(error).__name__}: {error}"
            process.kill(Failure("rubbish", ErrorSummary(f"BadResult: {words}")))
        return {}

    def lose(self, positions: Iterable[int]) -> None:
        """Nobody will ask these again: a process that only they had does not go on."""
        for process in {self.of[position] for position in positions}:
            process.rows.difference_update(positions)
            if not process.rows and process.why is None:
                process.kill(PROCESS_GONE)

    def end(self) -> None:
        """Ends all of them."""
        living = [process for process in self.processes if process.why is None]
        for process in living:
            with suppress(OSError):
                send(process.line, None)
        until = time.monotonic() + PATIENCE
        for process in living:  # each closes its end as it has let go of its instances
            wait([process.line], max(until - time.monotonic(), 0))
            process.kill(PROCESS_GONE)


def parts(rows: int, unit: int) -> list[range]:
    """Rows for each process: `unit` rows that follow each other are in one."""
    units = rows // unit
    processes = min(units, MOST)
    cuts = [i * units // processes * unit for i in range(processes + 1)]
    return [range(a, b) for a, b in pairwise(cuts)]


__all__ = ["EnvironmentSpec", "IsolatedInstances", "parts"]
