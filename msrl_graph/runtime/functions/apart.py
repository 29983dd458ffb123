"""Instances of an environment in processes of their own, beside the rank that asks them.

Invariant: a process that ends, hangs or floods its memory takes the rows with it whose instances it has, and no others;
what it did is the reason why they fail. None outlives the rows that it is for.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from multiprocessing.connection import wait

from ..process import row_progress
from ..process.report import RunError
from .blame import Told
from .instances import Answer, Ask, Failure
from .nest import FORK, ORDER, PID, WAIT, Spec, exactly, receive, send

MOST = 64  # processes of a rank at once
PATIENCE = 5.0  # seconds that a process is left to say that its instances have had their time
PROGRAM = "msrl_graph.runtime.functions.nest"


class Nest:
    """The process that forks those of an environment. RunError where the user's file cannot be imported."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self._begin()

    def _begin(self) -> None:
        self.orders, there = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-P", "-m", PROGRAM, str(there.fileno())]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[there.fileno()], env=environment, start_new_session=True
        )
        there.close()
        weakref.finalize(self, _over, self.orders, self.process)
        told: Told | None = Told("the process for it ended before it was ready")
        with suppress(OSError, EOFError):
            send(self.orders, self.spec)
            told = receive(self.orders)
        if told is not None:
            raise RunError("\n  ".join([f"{self.spec.path} cannot be imported: {told.reason}", *told.steps]))

    def fork(self, memory: int) -> tuple[int, socket.socket]:
        """A process that may take so much memory, and the way to it."""
        here, there = socket.socketpair()
        with there:
            try:
                pid = self._ordered(FORK, memory, there)
            except (OSError, EOFError):  # somebody has killed it
                self._begin()
                pid = self._ordered(FORK, memory, there)
        return pid, here

    def status(self, pid: int) -> int | None:
        """How a process ended; waits for that. None: nobody knows."""
        with suppress(OSError, EOFError):
            return self._ordered(WAIT, pid)
        return None

    def _ordered(self, kind: bytes, number: int, handed: socket.socket | None = None) -> int:
        fds = [handed.fileno()] if handed else []
        socket.send_fds(self.orders, [ORDER.pack(kind, number)], fds)
        (answer,) = PID.unpack(exactly(self.orders, PID.size))
        return int(answer)


class _Process:
    """One with the instances of some rows; `why` it is no more."""

    def __init__(self, nest: Nest, memory: int, rows: Iterable[int]) -> None:
        self.nest, self.rows = nest, {*rows}
        self.pid, self.line = nest.fork(memory)
        self.why: Failure | None = None
        self.line.settimeout(PATIENCE)
        with suppress(OSError):
            send(self.line, len(self.rows))

    def kill(self, why: Failure | None = None) -> None:
        """Ends it with all that it has started, and keeps `why`; where that is not known, as it says by its status."""
        alone = why is None and _ends(self.pid, PATIENCE)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.line.close()
        status = self.nest.status(self.pid)
        self.why = why or (_dead(status) if alone else _GONE)


class Apart:
    """As Instances, of rows of which each `part` has a process."""

    def __init__(self, nest: Nest, parts: Sequence[Iterable[int]], memory: int) -> None:
        self.timeout = nest.spec.timeout
        self.processes = [_Process(nest, memory, part) for part in parts]
        self.of = {position: process for process in self.processes for position in process.rows}

    def answers(self, asked: Mapping[int, Ask], stops: bool = False, where: str = "") -> dict[int, Answer | Failure]:
        """What each says; of one whose process is no more, why. `where` is for reports of progress."""
        parts: dict[_Process, dict[int, Ask]] = {}
        for position, ask in asked.items():
            parts.setdefault(self.of[position], {})[position] = ask
        found: dict[int, Answer | Failure] = {}
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
                    process.kill(Failure("timeout", Told(f"TimeoutError: {words}")))
                break
            for process in [waiting.pop(line) for line in ready if isinstance(line, socket.socket)]:
                found |= self._heard(process)
        for process, part in parts.items():
            if process.why is not None:
                found |= {position: process.why for position in part if position not in found}
        return {position: found[position] for position in asked}

    def _heard(self, process: _Process) -> dict[int, Answer | Failure]:
        """What a process says that has something to say, if only by its end."""
        try:
            answers: dict[int, Answer | Failure] = receive(process.line)
            return answers
        except (OSError, EOFError):
            process.kill()
        except Exception as error:  # what is of a class that only the user's file knows
            words = f"what `step` returned cannot leave its process: {type(error).__name__}: {error}"
            process.kill(Failure("rubbish", Told(f"BadResult: {words}")))
        return {}

    def lose(self, positions: Iterable[int]) -> None:
        """Nobody will ask these again: a process that only they had does not go on."""
        for process in {self.of[position] for position in positions}:
            process.rows.difference_update(positions)
            if not process.rows and process.why is None:
                process.kill(_GONE)

    def end(self) -> None:
        """Ends all of them."""
        living = [process for process in self.processes if process.why is None]
        for process in living:
            with suppress(OSError):
                send(process.line, None)
        until = time.monotonic() + PATIENCE
        for process in living:  # each closes its end as it has let go of its instances
            wait([process.line], max(until - time.monotonic(), 0))
            process.kill(_GONE)


def _over(orders: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """Nobody asks a nest any more: it ends, with what it has forked."""
    orders.close()
    process.wait()


def parts(rows: int, unit: int) -> list[range]:
    """Rows for each process: `unit` rows that follow each other are in one."""
    units = rows // unit
    processes = min(units, MOST)
    cuts = [i * units // processes * unit for i in range(processes + 1)]
    return [range(a, b) for a, b in pairwise(cuts)]


_GONE = Failure("exited", Told("its process is gone"))


def _ends(pid: int, seconds: float) -> bool:
    """Whether a process ends by itself within so many seconds; one that has ended is still its nest's to ask after."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        return bool(wait([handle], seconds))
    finally:
        os.close(handle)


def _dead(status: int | None) -> Failure:
    """Why a process ended by itself."""
    if status is None:
        return _GONE
    if not os.WIFSIGNALED(status):
        return Failure("exited", Told(f"it ended its process with status {os.WEXITSTATUS(status)}"))
    number = os.WTERMSIG(status)
    words = f"its process was ended by {signal.Signals(number).name}"
    if number == signal.SIGKILL:
        return Failure("memory", Told(f"{words}, as the system does where memory runs out"))
    return Failure("exited", Told(words))


__all__ = ["Apart", "Nest", "parts"]
