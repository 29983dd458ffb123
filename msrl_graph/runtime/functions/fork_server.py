"""A program that runs a user's code which may do harm, or which runs in parallel.

It is a fork server (a *nest*) that has imported the user's files, and the processes that it forks.

Invariant: the code can only harm its own process. A forked process has a memory limit on top of the memory of the
import, is the first to be killed when memory runs out, and ends with its nest; the nest ends with the process that
started it. Messages are pickles preceded by their length: the author of the code is trusted, although its processes may
break off anywhere.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from ..process import shipped_files
from ..process.resource_limits import data_bytes
from ..process.task_report import RunError
from .own_process import guarded_call
from .user_traceback import describe_reason

ORDER = struct.Struct("<cq")  # to a nest: FORK with the memory limit in bytes, or WAIT with the id of a process
PID = struct.Struct("<q")
FORK = b"f"
WAIT = b"w"
_LENGTH = struct.Struct("<q")
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG


Serve = Callable[[socket.socket], None]  # the work of a forked process: answer until the connection ends


class Spec(Protocol):
    """What a nest loads. `folder` has the run's shipped files."""

    @property
    def folder(self) -> str: ...

    def load(self) -> Serve:
        """Import the user's files."""


def send(connection: socket.socket, message: Any) -> None:
    data = pickle.dumps(message)
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket) -> Any:
    """Return the next message; EOFError if the connection has ended."""
    (length,) = _LENGTH.unpack(receive_exactly(connection, _LENGTH.size))
    return pickle.loads(receive_exactly(connection, length))


def receive_exactly(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        if not (part := connection.recv(min(length - len(data), 1 << 20))):
            raise EOFError
        data += part
    return bytes(data)


def main() -> None:
    """Import the user's files and follow orders until the client is gone.

    The first message is the spec, the reply is the reason why the import failed ("": it did not).
    """
    orders = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal, meant for the run
    faulthandler.enable()
    spec: Spec = receive(orders)
    if spec.folder:
        shipped_files.use_folder(spec.folder)
    try:
        with guarded_call(os.getpid()):
            serve = spec.load()
    except (Exception, SystemExit) as error:
        send(orders, str(error) if isinstance(error, RunError) else describe_reason(error))
        return
    send(orders, "")
    living: set[int] = set()
    while order := _receive_order(orders):
        kind, number, fds = order
        if kind == WAIT:
            status = os.waitpid(number, 0)[1]
            living.discard(number)
            orders.sendall(PID.pack(status))
            continue
        if not (pid := os.fork()):
            orders.close()
            with suppress(EOFError, OSError):
                _prepare_child(number)
                serve(socket.socket(fileno=fds[0]))
            os._exit(0)
        os.close(fds[0])
        with suppress(OSError):  # the child does it too, but the client may kill its group at once
            os.setpgid(pid, pid)
        living.add(pid)
        orders.sendall(PID.pack(pid))
    for pid in living:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _receive_order(orders: socket.socket) -> tuple[bytes, int, list[int]] | None:
    """Return an order and the file descriptors passed with it; None at the end."""
    data, fds, _, _ = socket.recv_fds(orders, ORDER.size, 1)
    return (*ORDER.unpack(data), fds) if len(data) == ORDER.size else None


def _prepare_child(memory: int) -> None:
    """Set up a forked process, which may use `memory` bytes (0: any number)."""
    os.setpgid(0, 0)  # so that the processes that it starts can be ended with it
    ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    with suppress(ValueError, OSError):  # a lower limit is already set
        most = data_bytes() + memory
        resource.setrlimit(resource.RLIMIT_DATA, (most, most) if memory else resource.getrlimit(resource.RLIMIT_DATA))


if __name__ == "__main__":
    main()
