"""Connections between processes: Unix sockets on one host, TLS between hosts.

Invariant: a process reads no byte of a message before it knows that the process at the other end of the connection
belongs to the same run. A third party on the network cannot read the traffic, and a changed, repeated or dropped part
of the traffic breaks the connection.

- On one host, the socket is in a folder that only the user who started the run can enter. Each end asks the kernel
  which user owns the process at the other end (SO_PEERCRED). No network port is open.
- Between hosts, both ends prove that they have the key of the run. The key is new for each attempt (each start of the
  driver). Both ends use TLS 1.3 and accept only the certificate of the run. Each process receives the key with its
  arguments.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import ssl
import stat
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

from ..process.connection_gate import PATIENCE, Gate, accept, listen
from ..process.preload import peer_user

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

# TCP keep-alive (seconds, seconds, count): how soon a dead host is noticed, whether idle or with unacknowledged data.
_KEEPALIVE_IDLE = 5
_KEEPALIVE_INTERVAL = 5
_KEEPALIVE_PROBES = 3


class Address(NamedTuple):
    """The address where a process listens.

    `host` is the number of the process's host. `folder` and `name` are the private folder and the name of the Unix
    socket, for processes of the same host. `ip` and `port` are for processes of other hosts; port 0 means that the run
    has one host.
    """

    host: int
    folder: str
    name: str
    ip: str = ""
    port: int = 0


class Impostor(ConnectionError):
    """The process that answers does not belong to this run."""


@cache
def _tls_context(key: bytes, serves: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if serves else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate is the run's, not a host's
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=key.partition(b"-----BEGIN PRIVATE")[0].decode())
    key_file = os.memfd_create("key", os.MFD_CLOEXEC)  # the key is never in a file on disk
    try:
        os.write(key_file, key)
        context.load_cert_chain(f"/proc/self/fd/{key_file}")
    finally:
        os.close(key_file)
    if serves:
        context.num_tickets = 0  # a client receives nothing but answers
    return context


class Listener:
    """The listening sockets of a process.

    The listener calls the function `serve` for each connection, once the other end has proved its identity.
    """

    def __init__(self, key: bytes, serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]):
        self.key = key
        self.serve = serve
        self.gates: list[Gate] = []
        self._sockets: list[socket.socket] = []
        self._tasks: list[asyncio.Future[None]] = []

    def start(self, host: int, folder: str, ip: str) -> Address:
        """Listen in a private folder, and also at an IP address if the run has a key.

        `host` is the number of this host, and `ip` is an address of this host. Returns the address to which other
        processes connect.
        """
        name = f".line-{secrets.token_hex(8)}"
        unix_socket = socket.socket(socket.AF_UNIX)
        with _open_private_folder(folder) as path:
            unix_socket.bind(f"{path}/{name}")
        unix_socket.listen(1024)
        self._accept(unix_socket, self._serve_local)
        if not self.key:
            return Address(host, folder, name)
        tcp_socket = listen(ip)
        self._accept(tcp_socket, self._serve_remote)
        return Address(host, folder, name, ip, tcp_socket.getsockname()[1])

    def close(self) -> None:
        """Stop listening; existing connections remain open."""
        for task in self._tasks:
            task.cancel()
        for listening in self._sockets:
            listening.close()

    def _accept(self, listening: socket.socket, serve: Callable[[socket.socket, Gate], Awaitable[None]]) -> None:
        gate = Gate()
        self.gates.append(gate)
        self._sockets.append(listening)
        self._tasks.append(asyncio.ensure_future(accept(listening, gate, lambda connection: serve(connection, gate))))

    async def _serve_local(self, connection: socket.socket, gate: Gate) -> None:
        try:
            _check_user(connection)
        except OSError:
            connection.close()
            return
        gate.prove(connection.fileno())
        await self.serve(*await _open_accepted(connection))

    async def _serve_remote(self, connection: socket.socket, gate: Gate) -> None:
        number = connection.fileno()
        try:
            _set_tcp_options(connection)
            streams = await _open_accepted(connection, _tls_context(self.key, True))
        except OSError:
            connection.close()
            return
        except BaseException:
            connection.close()
            raise
        gate.prove(number)
        await self.serve(*streams)


async def _open_accepted(connection: socket.socket, context: ssl.SSLContext | None = None) -> Streams:
    """Return streams over an accepted connection.

    If `context` is given, the function first does the TLS handshake. Raises OSError.
    """
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    limit = PATIENCE if context else None
    transport, _ = await loop.connect_accepted_socket(
        lambda: protocol, connection, ssl=context, ssl_handshake_timeout=limit
    )
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


def connect(address: Address, host: int, key: bytes) -> socket.socket:
    """Connect a process on the host with the number `host` to an address.

    When the function returns, both ends have proved their identity. Raises OSError.
    """
    if address.host == host:
        return _connect_here(address)
    raw = socket.create_connection((address.ip, address.port), timeout=PATIENCE)
    try:
        _set_tcp_options(raw)
        connection = _tls_context(key, False).wrap_socket(raw)
    except BaseException:
        raw.close()
        raise
    connection.settimeout(None)
    return connection


async def open_streams(address: Address, host: int, key: bytes) -> Streams:
    """Connect in the same way as the function `connect`; return asyncio streams."""
    if address.host == host:
        return await asyncio.open_unix_connection(sock=_connect_here(address))
    context = _tls_context(key, False)
    async with asyncio.timeout(PATIENCE):
        streams = await asyncio.open_connection(address.ip, address.port, ssl=context)
    _set_tcp_options(streams[1].get_extra_info("socket"))
    return streams


def _connect_here(address: Address) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(PATIENCE)
        with _open_private_folder(address.folder) as path:
            connection.connect(f"{path}/{address.name}")
        _check_user(connection)
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def _open_private_folder(folder: str) -> Iterator[str]:
    """Yield a short path to a folder that only this user can enter.

    The path of a socket may have at most 107 bytes, so a deep folder is reached through a file descriptor. Raises
    Impostor if other users can enter the folder.
    """
    folder_fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(folder_fd)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise Impostor(f"other users can access {folder}")
        yield f"/proc/self/fd/{folder_fd}"
    finally:
        os.close(folder_fd)


def _check_user(connection: socket.socket) -> None:
    """Raise Impostor if another user owns the process at the other end of the socket."""
    if (user := peer_user(connection)) != os.geteuid():
        raise Impostor(f"the other end is a process of user {user}")


def _set_tcp_options(connection: socket.socket) -> None:
    """Set a connection's TCP options.

    Small messages are sent without delay, and a dead host is noticed within about 20 s.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE),
        (socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL),
        (socket.TCP_KEEPCNT, _KEEPALIVE_PROBES),
        (socket.TCP_USER_TIMEOUT, 1000 * (_KEEPALIVE_IDLE + _KEEPALIVE_INTERVAL * _KEEPALIVE_PROBES)),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
