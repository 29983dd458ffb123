"""The program in which instances of an environment live that may do harm: a *nest*, which has imported the user's file,
and the processes that it forks, each with the instances of some rows.

Invariant: whatever an instance does, it does to the rows of its own process. A forked process has so much memory beside
what the import took, is the first that the system ends where memory runs out, and ends with its nest, and that with
the rank that began it. Messages are pickles behind their length: who writes the environment is trusted, though its
processes may break off anywhere.
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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..process import shipped
from ..process.limits import data_bytes
from .blame import BadResult, Told
from .instances import Answer, Called, Failure, Instances
from .own_process import call_of
from .values import Filled

ORDER = struct.Struct("<cq")  # to a nest: FORK with the bytes that may be taken, or WAIT for a process of it
PID = struct.Struct("<q")
FORK, WAIT = b"f", b"w"
_LENGTH = struct.Struct("<q")
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True)
class Spec:
    """What a nest is told of its environment; `folder` is where the run's shipped files lie."""

    folder: str
    path: str
    name: str
    filled: Filled
    columns: tuple[str, ...]
    timeout: float
    gym: Literal["", "sum", "each"]


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
    """Hears its spec, says why the import failed (None: it did not), and does what it is ordered until nobody is there
    any more."""
    orders = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, meant for the run
    faulthandler.enable()
    spec: Spec = receive(orders)
    if spec.folder:
        shipped.use(spec.folder)
    try:
        with call_of(os.getpid()):
            make = getattr(shipped.module(spec.path), spec.name)
    except (Exception, SystemExit) as error:
        send(orders, Told.of(error))
        return
    send(orders, None)
    called = Called(make, spec.filled, spec.columns, spec.timeout, spec.gym)
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
                _serve(socket.socket(fileno=fds[0]), called, number)
            os._exit(0)
        os.close(fds[0])
        living.add(pid)
        orders.sendall(PID.pack(pid))
    for pid in living:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _order(orders: socket.socket) -> tuple[bytes, int, list[int]] | None:
    """An order, and what is handed over with it."""
    data, fds, _, _ = socket.recv_fds(orders, ORDER.size, 1)
    return (*ORDER.unpack(data), fds) if len(data) == ORDER.size else None


def _serve(asking: socket.socket, called: Called, memory: int) -> None:
    """Answers until nobody asks any more."""
    os.setsid()  # so that whatever it starts can be ended with it
    ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    with suppress(ValueError, OSError):  # a lower limit holds already
        most = data_bytes() + memory
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
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


def _sendable(answer: Answer | Failure) -> Answer | Failure:
    """An answer, if it can leave the process."""
    try:
        pickle.dumps(answer)
    except Exception as error:
        return Failure.of(BadResult(f"what `step` returned cannot leave its process: {error}"))
    return answer


if __name__ == "__main__":
    main()
