"""The program in which a user's code runs that may do harm, or that runs side by side: a *nest*, which has imported the
user's files, and the processes that it forks.

Invariant: whatever the code does, it does to its own process. A forked process has so much memory beside what the
import took, is the first that the system ends where memory runs out, and ends with its nest, and that with the process
that began it. Messages are pickles behind their length: who writes the code is trusted, though its processes may break
off anywhere.
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
from .own_process import call_of
from .user_traceback import reason

ORDER = struct.Struct("<cq")  # to a nest: FORK with the bytes that may be taken, or WAIT for a process of it
PID = struct.Struct("<q")
FORK = b"f"
WAIT = b"w"
_LENGTH = struct.Struct("<q")
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG


Serve = Callable[[socket.socket], None]  # what a forked process does: it answers until nobody asks any more


class Spec(Protocol):
    """What a nest is told to be. `folder` is where the run's shipped files lie."""

    @property
    def folder(self) -> str: ...

    def load(self) -> Serve:
        """Imports the user's files."""


def send(to: socket.socket, message: Any) -> None:
    data = pickle.dumps(message)
    to.sendall(_LENGTH.pack(len(data)) + data)


def receive(of: socket.socket) -> Any:
    """EOFError where it has ended."""
    (length,) = _LENGTH.unpack(exactly(of, _LENGTH.size))
    return pickle.loads(exactly(of, length))


def exactly(of: socket.socket, length: int) -> bytes:
    found = bytearray()
    while len(found) < length:
        if not (part := of.recv(min(length - len(found), 1 << 20))):
            raise EOFError
        found += part
    return bytes(found)


def main() -> None:
    """Hears its spec, says why the import failed ("": it did not), and does what it is ordered until nobody is there
    any more."""
    orders = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, meant for the run
    faulthandler.enable()
    spec: Spec = receive(orders)
    if spec.folder:
        shipped_files.use(spec.folder)
    try:
        with call_of(os.getpid()):
            serve = spec.load()
    except (Exception, SystemExit) as error:
        send(orders, str(error) if isinstance(error, RunError) else reason(error))
        return
    send(orders, "")
    living: set[int] = set()
    while order := _order(orders):
        kind, number, fds = order
        if kind == WAIT:
            status = os.waitpid(number, 0)[1]
            living.discard(number)
            orders.sendall(PID.pack(status))
            continue
        if not (pid := os.fork()):
            orders.close()
            with suppress(EOFError, OSError):
                _prepare(number)
                serve(socket.socket(fileno=fds[0]))
            os._exit(0)
        os.close(fds[0])
        with suppress(OSError):  # as it does itself: whoever is told of it may end it at once
            os.setpgid(pid, pid)
        living.add(pid)
        orders.sendall(PID.pack(pid))
    for pid in living:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _order(orders: socket.socket) -> tuple[bytes, int, list[int]] | None:
    """An order, and what is handed over with it."""
    data, fds, _, _ = socket.recv_fds(orders, ORDER.size, 1)
    return (*ORDER.unpack(data), fds) if len(data) == ORDER.size else None


def _prepare(memory: int) -> None:
    """A forked process, which may take so many bytes of memory; 0: as many as there are."""
    os.setpgid(0, 0)  # so that whatever it starts can be ended with it
    ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    with suppress(ValueError, OSError):  # a lower limit holds already
        most = data_bytes() + memory
        resource.setrlimit(resource.RLIMIT_DATA, (most, most) if memory else resource.getrlimit(resource.RLIMIT_DATA))


if __name__ == "__main__":
    main()
