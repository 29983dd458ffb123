"""Connections between the processes of a run: on one host a Unix socket, between hosts TLS.

Invariant: before a byte of a message is read, each end knows that the other is of the same run, and nobody between them
can read, change, repeat or leave out a part of what they say without breaking the connection.

- On one host the socket is in a folder that only this user can enter, and the system says of either end whose process
  it is (SO_PEERCRED). No port is open.
- Between hosts both ends prove that they have the key of the run, which is made for each attempt: TLS 1.3, in which the
  certificate of the run is the only one that either end accepts. The key travels with the processes' arguments.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import ssl
import stat
import struct
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from typing import NamedTuple

from ..process.connection_gate import PATIENCE, Gate, accept, listen

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

_CREDENTIALS = struct.Struct("3i")  # of SO_PEERCRED: process, user, group
# Seconds: until a host that has vanished is noticed, from silence and from what it does not take.
_IDLE = 5
_EVERY = 5
_TIMES = 3


class Address(NamedTuple):
    """Where a process listens: its host's number, the private folder and the name of its Unix socket, and for other
    hosts an IP address and port (port 0: the run has one host)."""

    host: int
    folder: str
    name: str
    ip: str = ""
    port: int = 0


class Impostor(ConnectionError):
    """What answers is not of this run."""


def new_key() -> bytes:
    """Return a private key and its certificate (PEM), by which the processes of a run on several hosts know each
    other."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "msrl-run")])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        # For as long as the run lasts, whatever the clocks of the hosts say.
        .not_valid_before(datetime(2000, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(9999, 12, 31, tzinfo=UTC))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return certificate.public_bytes(serialization.Encoding.PEM) + key.private_bytes(serialization.Encoding.PEM, *form)


@cache
def _context(key: bytes, serves: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if serves else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate is the run's, not a host's
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=key.partition(b"-----BEGIN PRIVATE")[0].decode())
    held = os.memfd_create("key", os.MFD_CLOEXEC)  # it is never in a file
    try:
        os.write(held, key)
        context.load_cert_chain(f"/proc/self/fd/{held}")
    finally:
        os.close(held)
    if serves:
        context.num_tickets = 0  # nothing comes to a client but answers
    return context


class Listener:
    """Where a process is called: hands each connection to `serve` once the other end has proved itself."""

    def __init__(self, key: bytes, serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]):
        self.key = key
        self.serve = serve
        self.gates: list[Gate] = []
        self._sockets: list[socket.socket] = []
        self._tasks: list[asyncio.Future[None]] = []

    def start(self, host: int, folder: str, ip: str) -> Address:
        """Listen in a private folder, and with a key at this IP address of the host too."""
        name = f".line-{secrets.token_hex(8)}"
        here = socket.socket(socket.AF_UNIX)
        with _private(folder) as path:
            here.bind(f"{path}/{name}")
        here.listen(1024)
        self._accept(here, self._here)
        if not self.key:
            return Address(host, folder, name)
        away = listen(ip)
        self._accept(away, self._away)
        return Address(host, folder, name, ip, away.getsockname()[1])

    def close(self) -> None:
        """Listen no more; connections stay."""
        for task in self._tasks:
            task.cancel()
        for listening in self._sockets:
            listening.close()

    def _accept(self, listening: socket.socket, serve: Callable[[socket.socket, Gate], Awaitable[None]]) -> None:
        gate = Gate()
        self.gates.append(gate)
        self._sockets.append(listening)
        self._tasks.append(asyncio.ensure_future(accept(listening, gate, lambda c: serve(c, gate))))

    async def _here(self, connection: socket.socket, gate: Gate) -> None:
        try:
            _check_user(connection)
        except OSError:
            connection.close()
            return
        gate.prove(connection.fileno())
        await self.serve(*await _streams(connection))

    async def _away(self, connection: socket.socket, gate: Gate) -> None:
        number = connection.fileno()
        try:
            _heed(connection)
            streams = await _streams(connection, _context(self.key, True))
        except OSError:
            connection.close()
            return
        except BaseException:
            connection.close()
            raise
        gate.prove(number)
        await self.serve(*streams)


async def _streams(connection: socket.socket, context: ssl.SSLContext | None = None) -> Streams:
    """Streams over an accepted connection, with a `context` after a handshake. Raises OSError."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    limit = PATIENCE if context else None
    transport, _ = await loop.connect_accepted_socket(
        lambda: protocol, connection, ssl=context, ssl_handshake_timeout=limit
    )
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


def connect(address: Address, host: int, key: bytes) -> socket.socket:
    """Return a connection from a process of this host, after both ends have proved themselves. Raises OSError."""
    if address.host == host:
        return _connect_here(address)
    raw = socket.create_connection((address.ip, address.port), timeout=PATIENCE)
    try:
        _heed(raw)
        connection = _context(key, False).wrap_socket(raw)
    except BaseException:
        raw.close()
        raise
    connection.settimeout(None)
    return connection


async def open_streams(address: Address, host: int, key: bytes) -> Streams:
    """As `connect`, for a coroutine."""
    if address.host == host:
        return await asyncio.open_unix_connection(sock=_connect_here(address))
    context = _context(key, False)
    async with asyncio.timeout(PATIENCE):
        streams = await asyncio.open_connection(address.ip, address.port, ssl=context)
    _heed(streams[1].get_extra_info("socket"))
    return streams


def _connect_here(address: Address) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(PATIENCE)
        with _private(address.folder) as path:
            connection.connect(f"{path}/{address.name}")
        _check_user(connection)
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def _private(folder: str) -> Iterator[str]:
    """A path to a folder, short however deep that is (a socket's may have 107 bytes). Raises Impostor where others than
    this user can enter it."""
    held = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(held)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise Impostor(f"{folder} is not this user's alone")
        yield f"/proc/self/fd/{held}"
    finally:
        os.close(held)


def _check_user(connection: socket.socket) -> None:
    """Raises Impostor where the other end of a Unix socket is another user's process."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user = _CREDENTIALS.unpack(told)[1]
    if user != os.geteuid():
        raise Impostor(f"what answers is a process of user {user}")


def _heed(connection: socket.socket) -> None:
    """Sends small messages at once, and notices within some 20 s that the other host is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _IDLE),
        (socket.TCP_KEEPINTVL, _EVERY),
        (socket.TCP_KEEPCNT, _TIMES),
        (socket.TCP_USER_TIMEOUT, 1000 * (_IDLE + _EVERY * _TIMES)),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
