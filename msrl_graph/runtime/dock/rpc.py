"""Calls between the processes of a run: who serves them is a process with a name, who calls has a line to it.

Invariant: a line answers in the order of its calls, each once, or raises what the served method raised. A call whose
line breaks is made again on a new line to the same name: what is served may be called twice and must not mind. Nothing
is read from a process that has not proved that it is of the run (channel.py), and a server answers only those who mean
it: a line begins with the name of the process that it is to.

Ray starts the processes and says where they are; calls do not go through it, since one of its own takes some two
milliseconds of a processor, one of these a tenth of that.
"""

from __future__ import annotations

import asyncio
import pickle
import select
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent import futures
from typing import Any, TypeVar

import numpy as np

from ..process.task_report import RunError
from .channel import Address, Impostor, Listener, connect, open_streams

Find = Callable[[str], Address]
Call = tuple[str, Sequence[Any]]

T = TypeVar("T")

_HEAD = struct.Struct("<IQ")  # how many buffers follow a message, and its own bytes
_NAME = struct.Struct("<H")  # bytes of the name that a line begins with
_SMALL = 1 << 12  # bytes of a buffer that is not worth a place of its own
_PIECE = 1 << 18  # bytes that a coroutine sends at a time
_TENDS = 0.5  # seconds between looks at a thread's own lines, while it waits for another thread
_PAUSE = 0.05  # seconds between tries to reach a process that is being started again
_PROVES = 30.0  # seconds for which what answers may be something else than the process that is meant


def framed(message: Any) -> list[Any]:
    """A message as the buffers that are sent: large arrays as they lie in memory."""
    buffers: list[pickle.PickleBuffer] = []

    def apart(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < _SMALL:
            return True
        buffers.append(buffer)
        return False

    data = pickle.dumps(message, protocol=5, buffer_callback=apart)
    views = [b.raw() for b in buffers]
    sizes = struct.pack(f"<{len(views)}Q", *(v.nbytes for v in views))
    return [_HEAD.pack(len(views), len(data)) + sizes + data, *views]


def greeting(name: str) -> bytes:
    """Return what a line to the process of this name begins with."""
    data = name.encode()
    return _NAME.pack(len(data)) + data


class RpcServer:
    """Serves some `methods` of an object, which are coroutines, under a name, to the processes that have the run's
    key."""

    def __init__(self, name: str, served: Any, methods: Sequence[str], key: bytes) -> None:
        self.name = name
        self.served = served
        self.methods = frozenset(methods)
        self.listener = Listener(key, self._serve)
        self.messages = 0
        self._address: Address | None = None

    def address(self, host: int, folder: str, ip: str) -> Address:
        """Where it listens: begins to, the first time. `folder` is a private one of this host, `ip` an address of it
        that other hosts can reach."""
        if self._address is None:
            self._address = self.listener.start(host, folder, ip)
        return self._address

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            (size,) = _NAME.unpack(await reader.readexactly(_NAME.size))
            if await reader.readexactly(size) != self.name.encode():
                return
            while True:
                calls = await _read(reader)
                self.messages += 1
                await _write(writer, framed([await self._called(*call) for call in calls]))
        except (OSError, asyncio.IncompleteReadError):
            pass  # who called is gone
        finally:
            writer.close()

    async def _called(self, method: str, arguments: Sequence[Any]) -> tuple[bool, Any]:
        try:
            if method not in self.methods:
                raise AttributeError(f"{type(self.served).__name__} does not serve {method}")
            return True, await getattr(self.served, method)(*arguments)
        except Exception as error:
            return False, error


class UnprovedPeer:
    """What is thought of a process that has not proved to be the one that is meant."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._since = 0.0

    def failed(self, error: OSError, address: Address) -> None:
        """Count a try that failed. Raises RunError when what answers has been something else for a while: a port can be
        another program's for a moment after a process has died."""
        if not isinstance(error, Impostor | ssl.SSLError) or isinstance(error, ssl.SSLEOFError):
            return
        self._since = self._since or time.monotonic()
        if time.monotonic() - self._since > _PROVES:
            at = f"{address.ip}:{address.port}" if address.port else address.folder
            raise RunError(f"what answers at {at} is not the {self.name} of this run: {error}") from error

    def settled(self) -> None:
        """It has proved to be that process."""
        self._since = 0.0


class AsyncRpcConnection:
    """A coroutine's line from a process of a `host`: what is sent waits in a queue, one call after the other."""

    def __init__(self, name: str, find: Callable[[str], Awaitable[Address]], host: int, key: bytes) -> None:
        self.name = name
        self.find = find
        self.host = host
        self.key = key
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._turn = asyncio.Lock()
        self._doubt = UnprovedPeer(name)

    async def send(self, method: str, *arguments: Any) -> Any:
        """The answer."""
        async with self._turn:
            while True:
                try:
                    reader, writer = self._streams = self._streams or await self._connect()
                    await _write(writer, framed([(method, arguments)]))
                    ((done, value),) = await _read(reader)
                    break
                except (OSError, asyncio.IncompleteReadError):
                    self.close()
                    await asyncio.sleep(_PAUSE)
        if not done:
            raise value
        return value

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
        self._streams = None

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        address = await self.find(self.name)
        try:
            reader, writer = await open_streams(address, self.host, self.key)
        except OSError as error:
            self._doubt.failed(error, address)
            raise
        self._doubt.settled()
        writer.write(greeting(self.name))
        return reader, writer


class PendingReply:
    """What a call is going to give."""

    def __init__(self, line: RpcConnection) -> None:
        self.line = line
        self.done = False
        self.value = None
        self.error: Exception | None = None

    def get(self) -> Any:
        """The answer; waits for it."""
        while not self.done:
            self.line.receive()
        if self.error is not None:
            raise self.error
        return self.value


class RpcConnection:
    """A thread's line to the process of a name. Answers are read when they are asked for, or while that of another of
    the thread's lines, `every`, is waited for: it might never come where a call on this one was lost."""

    def __init__(self, name: str, find: Find, host: int, key: bytes, every: Mapping[str, RpcConnection]) -> None:
        self.name = name
        self.find = find
        self.host = host
        self.key = key
        self.every = every
        self._doubt = UnprovedPeer(name)
        self._socket: socket.socket | None = None
        self._held: list[tuple[PendingReply, Call]] = []  # for the next message
        self._open: deque[list[tuple[PendingReply, Call]]] = deque()  # messages without an answer

    def send(self, method: str, *arguments: Any, wait: bool = False) -> PendingReply:
        """Makes a call; `wait`: it goes with the next one, in one message, or when its answer is asked for."""
        self._held.append((answer := PendingReply(self), (method, arguments)))
        if not wait:
            self.flush()
        return answer

    def flush(self) -> None:
        """Sends what waits."""
        if not self._held:
            return
        self._open.append(self._held)
        self._held = []
        try:
            if self._socket is not None:
                _send(self._socket, framed([call for _, call in self._open[-1]]))
        except OSError:
            self.close()
        if self._socket is None:
            self._connect()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def receive(self) -> None:
        """Reads the next answers, once they are there."""
        self.flush()
        while self._socket is not None and self not in (ready := _readable([*self.every.values()], None)):
            for line in ready:
                line._read()
        self._read()

    def _read(self) -> None:
        while True:
            try:
                assert self._socket is not None
                told = _receive(self._socket)
                break
            except OSError:
                self._connect()
        for (answer, _), (done, value) in zip(self._open.popleft(), told, strict=True):
            answer.done = True
            if done:
                answer.value = value
            else:
                answer.error = value

    def _connect(self) -> None:
        """A new line, on which all that has no answer yet is sent again."""
        self.close()
        while True:
            address = self.find(self.name)  # raises where the process is gone for good
            try:
                self._socket = connect(address, self.host, self.key)
                self._doubt.settled()
                self._socket.sendall(greeting(self.name))
                for calls in self._open:
                    _send(self._socket, framed([call for _, call in calls]))
                return
            except OSError as error:
                self.close()
                self._doubt.failed(error, address)
                time.sleep(_PAUSE)


class RpcConnections:
    """The lines of a process of a `host`: each of its threads has its own."""

    def __init__(self, find: Find, host: int, key: bytes) -> None:
        self.find = find
        self.host = host
        self.key = key
        self._own = threading.local()

    def to(self, name: str) -> RpcConnection:
        known: dict[str, RpcConnection] = self._own.__dict__.setdefault("lines", {})
        if name not in known:
            known[name] = RpcConnection(name, self.find, self.host, self.key, known)
        return known[name]

    def wait(self, asked: futures.Future[T]) -> T:
        """What another thread of this process has asked for. Meanwhile what comes on this thread's lines is read, and
        what was lost on those that broke is sent again: the dock that died may have lost the very rows that are waited
        for."""
        while not futures.wait([asked], _TENDS).done:
            for line in _readable([*self._own.__dict__.get("lines", {}).values()], 0):
                line._read()
        return asked.result()


def _readable(lines: Sequence[RpcConnection], patience: int | None) -> list[RpcConnection]:
    """Those with open calls on which something can be read, or which broke; waits for one, as many milliseconds as
    there is patience (None: without end)."""
    of = {line._socket.fileno(): line for line in lines if line._open and line._socket is not None}
    # What TLS has read and nobody has asked for yet, the system does not know of.
    held = [line for line in of.values() if isinstance(line._socket, ssl.SSLSocket) and line._socket.pending()]
    poll = select.poll()
    for number in of:
        poll.register(number, select.POLLIN)
    return held or [of[number] for number, _ in poll.poll(patience)]


def _send(connection: socket.socket, parts: list[Any]) -> None:
    if isinstance(connection, ssl.SSLSocket):
        for part in parts:
            connection.sendall(part)
        return
    views = deque(memoryview(p).cast("B") for p in parts if memoryview(p).nbytes)
    while views:
        sent = connection.sendmsg([v for _, v in zip(range(64), views)])  # noqa: B905
        while sent:
            if sent < len(views[0]):
                views[0] = views[0][sent:]
                break
            sent -= len(views.popleft())


async def _write(writer: asyncio.StreamWriter, parts: list[Any]) -> None:
    """Sends a message in pieces, so that neither asyncio nor TLS holds copies of all of it."""
    for part in parts:
        view = memoryview(part).cast("B")
        for begin in range(0, len(view), _PIECE):
            writer.write(view[begin : begin + _PIECE])
            await writer.drain()


def _exactly(connection: socket.socket, size: int) -> memoryview:
    found = np.empty(size, np.uint8).data
    at = 0
    while at < size:
        if not (got := connection.recv_into(found[at:])):
            raise ConnectionResetError
        at += got
    return found


def _receive(connection: socket.socket) -> Any:
    count, size = _HEAD.unpack(_exactly(connection, _HEAD.size))
    rest = _exactly(connection, 8 * count + size)
    sizes = struct.unpack(f"<{count}Q", rest[: 8 * count])
    return pickle.loads(rest[8 * count :], buffers=[_exactly(connection, s) for s in sizes])


async def _read(reader: asyncio.StreamReader) -> Any:
    count, size = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    rest = memoryview(await reader.readexactly(8 * count + size))
    sizes = struct.unpack(f"<{count}Q", rest[: 8 * count])
    return pickle.loads(rest[8 * count :], buffers=[await reader.readexactly(s) for s in sizes])
