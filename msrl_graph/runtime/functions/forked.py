"""Processes that are forked from one that has imported a user's code (nest.py), as who asks them has them.

Invariant: none of them outlives who asked for it. How one ended is known to its nest, which is its parent.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import weakref
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Generic, TypeVar

from ..process.report import RunError
from .blame import Told
from .instances import Failure
from .nest import FORK, ORDER, PID, WAIT, Spec, exactly, receive, send

PROGRAM = "msrl_graph.runtime.functions.nest"
S = TypeVar("S", bound=Spec)


class Nest(Generic[S]):
    """The process that forks others which run a user's code. RunError where that cannot be imported."""

    def __init__(self, spec: S) -> None:
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
        why = "a process that imports files of yours ended before it had; its log says more"
        with suppress(OSError, EOFError):
            send(self.orders, self.spec)
            why = receive(self.orders)
        if why:
            raise RunError(why)

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


def _over(orders: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """Nobody asks a nest any more: it ends, with what it has forked."""
    orders.close()
    process.wait()


GONE = Failure("exited", Told("its process is gone"))


def ends(pid: int, seconds: float) -> bool:
    """Whether a process ends by itself within so many seconds; one that has ended is still its nest's to ask after."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        return bool(wait([handle], seconds))
    finally:
        os.close(handle)


def dead(status: int | None) -> Failure:
    """Why a process ended by itself."""
    if status is None:
        return GONE
    if not os.WIFSIGNALED(status):
        return Failure("exited", Told(f"it ended its process with status {os.WEXITSTATUS(status)}"))
    number = os.WTERMSIG(status)
    words = f"its process was ended by {signal.Signals(number).name}"
    if number == signal.SIGKILL:
        return Failure("memory", Told(f"{words}, as the system does where memory runs out"))
    return Failure("exited", Told(words))


__all__ = ["GONE", "Nest", "dead", "ends"]
