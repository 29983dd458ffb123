"""Listening sockets of a run, and their connections that have not authenticated.

Invariant: such a connection lasts some seconds, and there are few of them. If there is one too many, the oldest one of
the source with the most connections is closed: a flood from one address pushes out only itself.
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

MOST = 64  # connections of a listening socket that have not authenticated
PATIENCE = 10.0  # seconds that each of them has
PAUSE = 0.05  # seconds until the next try when this process has no descriptor left
_BACKLOG = 1024  # connections that the system keeps until they are accepted


def listen(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at one address of this host; port 0: any free one.

    Raises OSError.
    """
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)


class _Visitor(NamedTuple):
    connection: socket.socket
    source: bytes
    since: float


class Gate:
    """The connections of one listening socket that have not authenticated.

    Any thread may call it.
    """

    def __init__(self, most: int = MOST, patience: float = PATIENCE) -> None:
        self.most = most
        self.patience = patience
        self._visitors: dict[int, _Visitor] = {}  # by descriptor, the oldest first
        self._lock = threading.Lock()

    def enter(self, connection: socket.socket) -> None:
        """Count a connection that was just accepted; close others if there are too many."""
        with self._lock:
            self._forget_closed()
            while len(self._visitors) >= self.most:
                self._close_one()
            number = connection.fileno()
            self._visitors.pop(number, None)
            self._visitors[number] = _Visitor(connection, _source(connection), time.monotonic())

    def prove(self, descriptor: int) -> None:
        """Keep a connection that has authenticated."""
        with self._lock:
            self._visitors.pop(descriptor, None)

    def expire(self) -> None:
        """Close the connections whose time is over."""
        with self._lock:
            self._forget_closed()
            latest = time.monotonic() - self.patience
            for visitor in [entry for entry in self._visitors.values() if entry.since <= latest]:
                self._close(visitor)

    def make_room(self) -> None:
        """Close a connection, if there is one, to free its descriptor."""
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
        """Shut a connection down; its reader sees the end and closes it."""
        self._visitors = {number: other for number, other in self._visitors.items() if other is not visitor}
        with suppress(OSError):
            visitor.connection.shutdown(socket.SHUT_RDWR)


def _source(connection: socket.socket) -> bytes:
    """Return who connects: an address, for IPv6 its network half; b"" if gone already."""
    with suppress(OSError):
        name = connection.getpeername()
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            return socket.inet_pton(connection.family, name[0].partition("%")[0])[:8]
    return b""


async def accept(listening: socket.socket, gate: Gate, serve: Callable[[socket.socket], Awaitable[None]]) -> None:
    """Hand each connection to `serve` in its own task, until this task is cancelled.

    `serve` closes the connection.
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
