"""Listening sockets of a run's web page and Prometheus metrics.

Invariant: the sockets are opened before any process starts, so a port that is in use is reported before the start. The
supervisor keeps the sockets open until the run is over. So the addresses stay the same when a run restarts, and
requests wait during the restart.
"""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass

from ...diagnostics import Diagnostic, Fault
from ...diagnostics.surface import name_option

LOCAL = "127.0.0.1"
LAST = 65535


@dataclass(frozen=True)
class Ports:
    """File descriptors of open sockets; -1 means that a socket does not exist.

    `page` is the socket of the run's web page, whose address contains `token`. `metrics` is the socket of the
    Prometheus metrics.
    """

    page: int = -1
    metrics: int = -1
    token: str = ""

    @property
    def open(self) -> tuple[int, ...]:
        return tuple(descriptor for descriptor in (self.page, self.metrics) if descriptor >= 0)


class ListeningSockets:
    """Listening sockets of a run, which the run's supervisor keeps open.

    `lines` are messages with the addresses of the sockets. Raises Fault if a port is in use.
    """

    def __init__(self, page: bool, metrics: int | None) -> None:
        self._sockets: list[socket.socket] = []
        self.lines: list[str] = []
        page_descriptor = metrics_descriptor = -1
        if metrics is not None:
            metrics_descriptor, port = self._open(metrics)
            self.lines.append(f"metrics for Prometheus at http://{LOCAL}:{port}/metrics")
        token = secrets.token_urlsafe(16)
        if page:
            page_descriptor, port = self._open(0)
            self.lines.append(f"watch the run at http://{LOCAL}:{port}/?token={token}")
        self.ports = Ports(page_descriptor, metrics_descriptor, token)

    def _open(self, port: int) -> tuple[int, int]:
        """Open a socket; return its descriptor and its port."""
        if port > LAST:
            raise _port_fault(port, f"ports end at {LAST}")
        try:
            listener = socket.create_server((LOCAL, port))
        except OSError as error:
            self.close()
            # Not the error's own text, which says more in some versions of Python.
            raise _port_fault(port, os.strerror(error.errno or 0)) from None
        self._sockets.append(listener)
        return listener.fileno(), listener.getsockname()[1]

    def close(self) -> None:
        for listener in self._sockets:
            listener.close()


def _port_fault(port: int, why: str) -> Fault:
    message = f"cannot use port {port} of {LOCAL} for the metrics: {why}"
    help = f"name another with {name_option('metrics_port')}, or 0 for a free one"
    return Fault(Diagnostic("port-taken", message, help=help))
