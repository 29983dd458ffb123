"""Calls between the processes of a run: named servers, and connections to them.

Invariant: a connection returns the answers in the order of its calls, one answer for each call, or raises what the
served method raised. A call whose connection breaks is repeated on a new connection to the same name, so a served
method must tolerate a repeated call. Nothing is read from a process that has not proved that it belongs to the run
(channel.py). A client first sends the name of the process that it wants to reach, and a server with another name closes
the connection.

Ray starts the processes and reports their addresses. Calls do not go through Ray: a Ray call needs about two
milliseconds of CPU time, and a call of this module a tenth of that time.
"""

from __future__ import annotations

import asyncio
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

import msgspec

from ..data import encoding
from ..process.task_report import RunError
from . import wire_format
from .channel import Address, Impostor, Listener, connect, open_streams
from .wire_format import Answer, Call, Message, Methods

Find = Callable[[str], Address]

T = TypeVar("T")

_NAME_SIZE = struct.Struct("<H")  # bytes of the name that a connection begins with
_WAIT_SLICE = 0.5  # seconds between reads of a thread's own connections while it waits for another thread
_RETRY_PAUSE = 0.05  # seconds between attempts to reach a process that is restarting
_IMPOSTOR_GRACE = 30.0  # seconds for which something other than the expected process may answer


def greeting_bytes(name: str) -> bytes:
    """Return the first bytes that a client sends to the process of this name."""
    data = name.encode()
    return _NAME_SIZE.pack(len(data)) + data


class RpcServer:
    """A server through which other processes call methods of the object `served`.

    `methods` are the methods that can be called. They are coroutines. The server has a name and answers only processes
    that have the run's key.
    """

    def __init__(self, name: str, served: Any, methods: Methods, key: bytes) -> None:
        self.name = name
        self.served = served
        self.methods = methods
        self.listener = Listener(key, self._serve)
        self.messages = 0
        self._address: Address | None = None

    def address(self, host: int, folder: str, ip: str) -> Address:
        """Return the address where the server listens; the first call starts to listen.

        `folder` is a private folder of this host, `ip` an address of the host that other hosts can reach.
        """
        if self._address is None:
            self._address = self.listener.start(host, folder, ip)
        return self._address

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            (size,) = _NAME_SIZE.unpack(await reader.readexactly(_NAME_SIZE.size))
            if await reader.readexactly(size) != self.name.encode():
                return
            while True:
                message = await wire_format.read(reader)
                self.messages += 1
                replies: list[memoryview] = []  # buffers of all answers
                answers = [await self._run_call(*call, message, replies) for call in wire_format.read_calls(message)]
                await wire_format.write(writer, wire_format.frame(encoding.encode(answers), replies))
        except (OSError, asyncio.IncompleteReadError):
            pass  # the caller is gone
        finally:
            writer.close()

    async def _run_call(self, name: str, data: msgspec.Raw, message: Message, replies: list[memoryview]) -> Answer:
        try:
            if (method := self.methods.methods.get(name)) is None:
                raise AttributeError(f"{type(self.served).__name__} does not serve {name}")
            arguments = encoding.decode(data, method.arguments, message[1])
            answer = await getattr(self.served, method.name)(*arguments)
            return True, msgspec.Raw(encoding.encode(answer, replies))
        except Exception as error:
            return False, msgspec.Raw(encoding.encode((self.methods.error_name(error), str(error))))


class UnprovedPeer:
    """A record of failed attempts to reach a process that has not proved its identity."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._since = 0.0

    def failed(self, error: OSError, address: Address) -> None:
        """Record an attempt that failed.

        Raises RunError if another program has answered for too long. (After a process has died, another program may
        briefly use its port.)
        """
        if not isinstance(error, Impostor | ssl.SSLError) or isinstance(error, ssl.SSLEOFError):
            return
        self._since = self._since or time.monotonic()
        if time.monotonic() - self._since > _IMPOSTOR_GRACE:
            location = f"{address.ip}:{address.port}" if address.port else address.folder
            raise RunError(f"the process at {location} is not the {self.name} of this run: {error}") from error

    def settled(self) -> None:
        """Note that the process has proved its identity."""
        self._since = 0.0


class AsyncRpcConnection:
    """A connection from coroutines on the host `host` to the process `name`.

    The connection sends one call at a time. `find` returns the address of a process. `methods` are those of the server.
    """

    def __init__(
        self, name: str, find: Callable[[str], Awaitable[Address]], host: int, key: bytes, methods: Methods
    ) -> None:
        self.name = name
        self.find = find
        self.host = host
        self.key = key
        self.methods = methods
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._lock = asyncio.Lock()
        self._doubt = UnprovedPeer(name)

    async def send(self, method: str, *arguments: Any) -> Any:
        """Make a call and return its answer."""
        async with self._lock:
            while True:
                try:
                    reader, writer = self._streams = self._streams or await self._connect()
                    await wire_format.write(writer, wire_format.frame_calls([(method, arguments)]))
                    message = await wire_format.read(reader)
                    break
                except (OSError, asyncio.IncompleteReadError):
                    self.close()
                    await asyncio.sleep(_RETRY_PAUSE)
        (answer,) = wire_format.read_answers(message)
        return self.methods.read_answer(method, answer, message[1])

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
        writer.write(greeting_bytes(self.name))
        return reader, writer


class PendingReply:
    """The reply to a call, which may not have arrived yet."""

    def __init__(self, line: RpcConnection) -> None:
        self.line = line
        self.done = False
        self.value = None
        self.error: Exception | None = None

    def get(self) -> Any:
        """Wait for the reply; return its value or raise its error."""
        while not self.done:
            self.line.receive()
        if self.error is not None:
            raise self.error
        return self.value


class RpcConnection:
    """A thread's connection to the process `name`.

    `find` returns the address of a process, and `methods` are those of the server. A reply is read when its value is
    requested.

    `lines` has all connections of the thread. A reply on one connection may depend on a call that was lost on another
    connection. So while the thread waits for a reply, it reads the replies on all its connections and repairs broken
    connections.
    """

    def __init__(
        self, name: str, find: Find, host: int, key: bytes, methods: Methods, lines: Mapping[str, RpcConnection]
    ) -> None:
        self.name = name
        self.find = find
        self.host = host
        self.key = key
        self.methods = methods
        self.lines = lines
        self._doubt = UnprovedPeer(name)
        self._socket: socket.socket | None = None
        self._queued: list[tuple[PendingReply, Call]] = []  # calls for the next message
        self._unanswered: deque[list[tuple[PendingReply, Call]]] = deque()  # messages without an answer yet

    def send(self, method: str, *arguments: Any, wait: bool = False) -> PendingReply:
        """Make a call; return its pending reply.

        If `wait` is true, the call is sent later: in one message with the next call, or when its reply is requested.
        """
        self._queued.append((answer := PendingReply(self), (method, arguments)))
        if not wait:
            self.flush()
        return answer

    def flush(self) -> None:
        """Send the queued calls in one message."""
        if not self._queued:
            return
        self._unanswered.append(self._queued)
        self._queued = []
        try:
            if self._socket is not None:
                wire_format.send(self._socket, wire_format.frame_calls([call for _, call in self._unanswered[-1]]))
        except OSError:
            self.close()
        if self._socket is None:
            self._connect()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def receive(self) -> None:
        """Wait for the replies to the oldest unanswered message and read them."""
        self.flush()
        while self._socket is not None and self not in (ready := _readable([*self.lines.values()], None)):
            for line in ready:
                line._read()
        self._read()

    def _read(self) -> None:
        while True:
            try:
                assert self._socket is not None
                message = wire_format.receive(self._socket)
                break
            except OSError:
                self._connect()
        for (reply, (method, _)), answer in zip(
            self._unanswered.popleft(), wire_format.read_answers(message), strict=True
        ):
            reply.done = True
            try:
                reply.value = self.methods.read_answer(method, answer, message[1])
            except Exception as error:
                reply.error = error

    def _connect(self) -> None:
        """Open a new connection and send all unanswered calls again."""
        self.close()
        while True:
            address = self.find(self.name)  # raises if the process will not be restarted
            try:
                self._socket = connect(address, self.host, self.key)
                self._doubt.settled()
                self._socket.sendall(greeting_bytes(self.name))
                for calls in self._unanswered:
                    wire_format.send(self._socket, wire_format.frame_calls([call for _, call in calls]))
                return
            except OSError as error:
                self.close()
                self._doubt.failed(error, address)
                time.sleep(_RETRY_PAUSE)


class RpcConnections:
    """The connections of a process on the host `host` to other processes.

    Each thread has its own connections. `find` returns the address of the process with a given name. `methods` are
    those of the processes.
    """

    def __init__(self, find: Find, host: int, key: bytes, methods: Methods) -> None:
        self.find = find
        self.host = host
        self.key = key
        self.methods = methods
        self._thread_local = threading.local()

    def connection_to(self, name: str) -> RpcConnection:
        known: dict[str, RpcConnection] = self._thread_local.__dict__.setdefault("lines", {})
        if name not in known:
            known[name] = RpcConnection(name, self.find, self.host, self.key, self.methods, known)
        return known[name]

    def wait(self, future: futures.Future[T]) -> T:
        """Wait for the result of a future that another thread of this process sets.

        While it waits, the calling thread reads its own connections and repeats calls that were lost on broken
        connections. (A dock that died may have lost the very rows that the other thread waits for.)
        """
        while not futures.wait([future], _WAIT_SLICE).done:
            for line in _readable([*self._thread_local.__dict__.get("lines", {}).values()], 0):
                line._read()
        return future.result()


def _readable(lines: Sequence[RpcConnection], patience: int | None) -> list[RpcConnection]:
    """Return the connections that can be read or are broken.

    Only connections with unanswered calls are considered. The function waits up to `patience` milliseconds until there
    is such a connection (None: without limit).
    """
    by_descriptor = {line._socket.fileno(): line for line in lines if line._unanswered and line._socket is not None}
    # The kernel does not report data that TLS has already decrypted and nobody has read yet.
    buffered = [
        line for line in by_descriptor.values() if isinstance(line._socket, ssl.SSLSocket) and line._socket.pending()
    ]
    poll = select.poll()
    for number in by_descriptor:
        poll.register(number, select.POLLIN)
    return buffered or [by_descriptor[number] for number, _ in poll.poll(patience)]
