"""The sockets at which a run can be watched.

Invariant: they are opened before anything is started, so that a port that is taken is told then, and held by the
supervisor until the run is over: addresses stay the same when a run is started anew, and who asks meanwhile waits.
"""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass

from ...diagnostics import Diagnostic, Fault

LOCAL = "127.0.0.1"
LAST = 65535


@dataclass(frozen=True)
class Ports:
    """Open sockets by their descriptors, -1: none: of the page, whose `token` an address has in it, and of the
    metrics."""

    page: int = -1
    metrics: int = -1
    token: str = ""

    @property
    def open(self) -> tuple[int, ...]:
        return tuple(fd for fd in (self.page, self.metrics) if fd >= 0)


class ListeningSockets:
    """The sockets of a run, which its supervisor holds: `lines` say where they are. Fault where a port is taken."""

    def __init__(self, page: bool, metrics: int | None) -> None:
        self._sockets: list[socket.socket] = []
        self.lines: list[str] = []
        page_at = metrics_at = -1
        if metrics is not None:
            metrics_at, port = self._opened(metrics)
            self.lines.append(f"metrics for Prometheus at http://{LOCAL}:{port}/metrics")
        token = secrets.token_urlsafe(16)
        if page:
            page_at, port = self._opened(0)
            self.lines.append(f"watch the run at http://{LOCAL}:{port}/?token={token}")
        self.ports = Ports(page_at, metrics_at, token)

    def _opened(self, port: int) -> tuple[int, int]:
        """A descriptor, and the port."""
        if port > LAST:
            raise _taken(port, f"ports end at {LAST}")
        try:
            made = socket.create_server((LOCAL, port))
        except OSError as error:
            self.close()
            # Not its own words, which say more in some versions of Python.
            raise _taken(port, os.strerror(error.errno or 0)) from None
        self._sockets.append(made)
        return made.fileno(), made.getsockname()[1]

    def close(self) -> None:
        for made in self._sockets:
            made.close()


def _taken(port: int, why: str) -> Fault:
    what = f"port {port} of {LOCAL} cannot be had for the metrics: {why}"
    return Fault(Diagnostic("port-taken", what, help="name another with --metrics-port, or 0 for a free one"))
