"""A program that runs a user's code in processes of its own.

The program is a fork server (a *nest*): it imports the user's files, and then forks processes that run the code. The
program is used for code that may do harm, or that runs in parallel.

Invariant: the user's code can only harm its own process.
- A forked process has a memory limit: a number of bytes beyond what the process uses after the import of the user's
  files.
- If memory runs out, the system kills the forked processes before all other processes.
- A forked process ends when its nest ends. The nest ends when the process that started the nest ends.

A message is a pickle, preceded by its length. Pickles are safe because the author of the user's code is trusted. But a
process may die after it has sent only the beginning of a message.
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
    """The user's code that a fork server loads.

    `folder` is the folder with the run's shipped files.
    """

    @property
    def folder(self) -> str: ...

    def load(self) -> Serve:
        """Import the user's files, and return the function that a forked process runs."""


def send(connection: socket.socket, message: Any) -> None:
    data = pickle.dumps(message)
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket) -> Any:
    """Return the next message. Raises EOFError if the other process closed the socket."""
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
    """Import the user's files, and execute the client's orders until the client ends.

    The first message from the client is the Spec. The server replies with the reason why the import failed, or with ""
    if the import succeeded. An order is to fork a process, or to wait for the end of a forked process.
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
    """Return the client's next order and its file descriptors.

    An order is a kind (FORK or WAIT) and a number (see `ORDER`). Returns None after the last order.
    """
    data, fds, _, _ = socket.recv_fds(orders, ORDER.size, 1)
    return (*ORDER.unpack(data), fds) if len(data) == ORDER.size else None


def _prepare_child(memory: int) -> None:
    """Set up a forked process.

    `memory` is the number of bytes that the process may use beyond what it uses after the import of the user's files. 0
    means no limit.
    """
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
