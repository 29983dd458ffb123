"""The listening sockets of a run, and limits on their unauthenticated connections.

Invariant: a connection that does not authenticate is closed after some seconds, and each listening socket has a limited
number of unauthenticated connections. If a new connection would exceed the limit, an older unauthenticated connection
is closed. The gate selects the client address that has the most unauthenticated connections, and closes the oldest of
that address. So a flood of connections from one address closes only connections from that address.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import NamedTuple

MOST = 64  # maximum number of unauthenticated connections of a listening socket
PATIENCE = 10.0  # seconds that a connection has to authenticate
PAUSE = 0.05  # seconds until the next try when this process has no descriptor left
_BACKLOG = 1024  # connections that the system keeps until they are accepted


def listen(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at one address of this host.

    Port 0 means any free port. Raises OSError.
    """
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)


class _Visitor(NamedTuple):
    connection: socket.socket
    source: bytes
    since: float


class Gate:
    """The unauthenticated connections of one listening socket, and limits on them.

    `most` is the maximum number of unauthenticated connections. `patience` is the number of seconds within which each
    connection must authenticate. Any thread may call the methods.
    """

    def __init__(self, most: int = MOST, patience: float = PATIENCE) -> None:
        self.most = most
        self.patience = patience
        self._visitors: dict[int, _Visitor] = {}  # by descriptor, the oldest first
        self._lock = threading.Lock()

    def enter(self, connection: socket.socket) -> None:
        """Add a connection that was just accepted.

        If the gate already has `most` unauthenticated connections, the gate first closes one of these connections.
        """
        with self._lock:
            self._forget_closed()
            while len(self._visitors) >= self.most:
                self._close_one()
            number = connection.fileno()
            self._visitors.pop(number, None)
            self._visitors[number] = _Visitor(connection, _source(connection), time.monotonic())

    def prove(self, descriptor: int) -> None:
        """Record that the connection with this file descriptor has authenticated.

        The gate no longer counts this connection and never closes it.
        """
        with self._lock:
            self._visitors.pop(descriptor, None)

    def expire(self) -> None:
        """Close the connections that did not authenticate within `patience` seconds."""
        with self._lock:
            self._forget_closed()
            latest = time.monotonic() - self.patience
            for visitor in [entry for entry in self._visitors.values() if entry.since <= latest]:
                self._close(visitor)

    def make_room(self) -> None:
        """Close one unauthenticated connection, if there is one.

        The connection's file descriptor can then be used for another connection.
        """
        with self._lock:
            self._forget_closed()
            self._close_one()

    def _forget_closed(self) -> None:
        for number in [
            descriptor for descriptor, visitor in self._visitors.items() if visitor.connection.fileno() != descriptor
        ]:
            del self._visitors[number]

    def _close_one(self) -> None:
        counts = Counter(entry.source for entry in self._visitors.values())
        most = max(counts.values(), default=0)
        for visitor in self._visitors.values():
            if counts[visitor.source] == most:
                self._close(visitor)
                return

    def _close(self, visitor: _Visitor) -> None:
        """Shut a connection down.

        The code that reads from the connection sees the end of the data and closes the connection.
        """
        self._visitors = {number: other for number, other in self._visitors.items() if other is not visitor}
        with suppress(OSError):
            visitor.connection.shutdown(socket.SHUT_RDWR)


def _source(connection: socket.socket) -> bytes:
    """Return the address of a connection's client as bytes.

    For an IPv6 address, only the first half (the network) is returned. The result is b"" if the connection is already
    closed or is not an internet connection.
    """
    with suppress(OSError):
        name = connection.getpeername()
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            return socket.inet_pton(connection.family, name[0].partition("%")[0])[:8]
    return b""


async def accept(listening: socket.socket, gate: Gate, serve: Callable[[socket.socket], Awaitable[None]]) -> None:
    """Accept connections, and run `serve` for each connection in its own asyncio task.

    The function accepts connections until the asyncio task that runs it is cancelled. `serve` must close the connection
    that it gets. `gate` limits the connections that have not authenticated.
    """
    loop = asyncio.get_running_loop()
    listening.setblocking(False)
    tasks: set[asyncio.Future[None]] = set()
    while True:
        try:
            connection, _ = await loop.sock_accept(listening)
        except OSError:
            gate.make_room()
            await asyncio.sleep(PAUSE)
            continue
        gate.enter(connection)
        loop.call_later(gate.patience, gate.expire)
        tasks.add(task := asyncio.ensure_future(serve(connection)))
        task.add_done_callback(tasks.discard)
        await asyncio.sleep(0)  # let other tasks run between two connections
