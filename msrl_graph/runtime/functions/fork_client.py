"""The client of a fork server, a process that has imported a user's code.

Invariant: a process that the fork server (fork_server.py) has forked ends no later than the client that requested the
process. The fork server is the parent of the forked processes, so it can report how each of them ended.
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
from .fork_server import FORK, ORDER, PID, WAIT, Spec, receive, receive_exactly, send
from .instances import Failure
from .user_traceback import ErrorSummary

PROGRAM = "msrl_graph.runtime.functions.fork_server"
S = TypeVar("S", bound=Spec)


class Nest(Generic[S]):
    """A handle of a fork server (a *nest*), which has imported a user's code.

    `spec` says which code the server imports. Raises RunError if the user's code cannot be imported.
    """

    def __init__(self, spec: S) -> None:
        self.spec = spec
        self._begin()

    def _begin(self) -> None:
        self.orders, server_end = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-P", "-m", PROGRAM, str(server_end.fileno())]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[server_end.fileno()], env=environment, start_new_session=True
        )
        server_end.close()
        weakref.finalize(self, _end_nest, self.orders, self.process)
        why = "a process that imports your files ended during the import; see its log"
        with suppress(OSError, EOFError):
            send(self.orders, self.spec)
            why = receive(self.orders)
        if why:
            raise RunError(why)

    def fork(self, memory: int) -> tuple[int, socket.socket]:
        """Fork a process, and return its id and a socket to the process.

        `memory` is the number of bytes that the process may use beyond what it uses after the import of the user's
        code. 0 means no limit.
        """
        client_end, server_end = socket.socketpair()
        with server_end:
            try:
                pid = self._send_order(FORK, memory, server_end)
            except (OSError, EOFError):  # the fork server was killed
                self._begin()
                pid = self._send_order(FORK, memory, server_end)
        return pid, client_end

    def status(self, pid: int) -> int | None:
        """Wait until a forked process has ended, and return its exit status.

        Returns None if the status is not known.
        """
        with suppress(OSError, EOFError):
            return self._send_order(WAIT, pid)
        return None

    def _send_order(self, kind: bytes, number: int, passed_socket: socket.socket | None = None) -> int:
        fds = [passed_socket.fileno()] if passed_socket else []
        socket.send_fds(self.orders, [ORDER.pack(kind, number)], fds)
        (answer,) = PID.unpack(receive_exactly(self.orders, PID.size))
        return int(answer)


def _end_nest(orders: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """End a fork server and the processes that it has forked."""
    orders.close()
    process.wait()


PROCESS_GONE = Failure("exited", ErrorSummary("its process is gone"))


def exits_within(pid: int, seconds: float) -> bool:
    """Return whether a forked process ends by itself within `seconds`.

    `Nest.status` can still return the status of the process afterwards.
    """
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        return bool(wait([handle], seconds))
    finally:
        os.close(handle)


def death_reason(status: int | None) -> Failure:
    """Return the failure that explains why a process ended, from its exit status.

    `status` is None if the exit status is not known.
    """
    if status is None:
        return PROCESS_GONE
    if not os.WIFSIGNALED(status):
        return Failure("exited", ErrorSummary(f"it ended its process with status {os.WEXITSTATUS(status)}"))
    number = os.WTERMSIG(status)
    words = f"its process was killed by {signal.Signals(number).name}"
    if number == signal.SIGKILL:
        return Failure("memory", ErrorSummary(f"{words}, as when memory runs out"))
    return Failure("exited", ErrorSummary(words))


__all__ = ["PROCESS_GONE", "Nest", "death_reason", "exits_within"]
