"""The caller's side of processes that are forked from one that has imported a user's code (fork_server.py).

Invariant: no forked process outlives the process that asked for it. Its parent, the nest, knows how it ended.
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

from ..process.task_report import RunError
from .fork_server import FORK, ORDER, PID, WAIT, Spec, exactly, receive, send
from .instances import Failure
from .user_traceback import ErrorSummary

PROGRAM = "msrl_graph.runtime.functions.fork_server"
S = TypeVar("S", bound=Spec)


class Nest(Generic[S]):
    """The process that forks others to run a user's code. Raises RunError if that code cannot be imported."""

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
        """Fork a process that may use `memory` bytes (0: any number); return its id and a socket to it."""
        here, there = socket.socketpair()
        with there:
            try:
                pid = self._ordered(FORK, memory, there)
            except (OSError, EOFError):  # somebody has killed it
                self._begin()
                pid = self._ordered(FORK, memory, there)
        return pid, here

    def status(self, pid: int) -> int | None:
        """Wait until a process has ended and return its status; None if it is unknown."""
        with suppress(OSError, EOFError):
            return self._ordered(WAIT, pid)
        return None

    def _ordered(self, kind: bytes, number: int, handed: socket.socket | None = None) -> int:
        fds = [handed.fileno()] if handed else []
        socket.send_fds(self.orders, [ORDER.pack(kind, number)], fds)
        (answer,) = PID.unpack(exactly(self.orders, PID.size))
        return int(answer)


def _over(orders: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """End a nest and the processes that it has forked."""
    orders.close()
    process.wait()


PROCESS_GONE = Failure("exited", ErrorSummary("its process is gone"))


def exits_within(pid: int, seconds: float) -> bool:
    """Return whether a process ends by itself within `seconds`. Its status can still be asked for afterwards."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        return bool(wait([handle], seconds))
    finally:
        os.close(handle)


def death_reason(status: int | None) -> Failure:
    """Return the failure that explains a process's exit status."""
    if status is None:
        return PROCESS_GONE
    if not os.WIFSIGNALED(status):
        return Failure("exited", ErrorSummary(f"it ended its process with status {os.WEXITSTATUS(status)}"))
    number = os.WTERMSIG(status)
    words = f"its process was ended by {signal.Signals(number).name}"
    if number == signal.SIGKILL:
        return Failure("memory", ErrorSummary(f"{words}, as the system does where memory runs out"))
    return Failure("exited", ErrorSummary(words))


__all__ = ["PROCESS_GONE", "Nest", "death_reason", "exits_within"]
