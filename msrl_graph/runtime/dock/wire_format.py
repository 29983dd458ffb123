"""The bytes of calls and answers, and how sockets send and receive them.

Invariant: a message is typed MessagePack (data/encoding.py): a receiver decodes it to the types that it expects, and
executes nothing of it. A message begins with a header, which has the sizes of its parts. Large arrays are sent next to
the MessagePack and are not copied.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ..data import encoding
from ..process.task_report import RunError

Call = tuple[str, Sequence[Any]]
Answer = tuple[bool, msgspec.Raw]  # whether it is a value, and the value or the error
Message = tuple[Any, list[Any]]  # the MessagePack and the buffers of a message

_CALLS = list[tuple[str, msgspec.Raw]]
_ANSWERS = list[tuple[bool, msgspec.Raw]]
_HEADER = struct.Struct("<IQ")  # the number of buffers that follow a message, and the bytes of the message itself
_SEND_CHUNK = 1 << 18  # bytes that a coroutine writes at a time


class Method(NamedTuple):
    """A method that other processes can call.

    `name` is the name of the method in the served object. `arguments` is the tuple type of its arguments, and `answer`
    the type of its result.
    """

    name: str
    arguments: Any
    answer: Any


class Methods:
    """The methods of a server, by the names under which they are called.

    A caller gets an error of the server in the same class if this class is RunError or in `errors`, and other RunErrors
    as RunError. The constructors of these classes take a message. All other errors become a RemoteError.
    """

    def __init__(self, methods: Mapping[str, Method], errors: Sequence[type[RunError]] = ()) -> None:
        self.methods = methods
        kinds: list[type[RunError]] = [RunError, *errors]
        self.errors = {kind.__name__: kind for kind in kinds}

    def error_name(self, error: Exception) -> str:
        """Return the name of the class in which a caller gets an error."""
        names = [kind.__name__ for kind in type(error).__mro__]
        return next((name for name in names if name in self.errors), names[0])

    def read_answer(self, method: str, answer: Answer, buffers: Sequence[Any]) -> Any:
        """Return the value of an answer, or raise the error in it."""
        is_value, data = answer
        if is_value:
            return encoding.decode(data, self.methods[method].answer, buffers)
        kind, message = encoding.decode(data, tuple[str, str])
        raise self.errors[kind](message) if kind in self.errors else RemoteError(f"{kind}: {message}")


class RemoteError(Exception):
    """An error in a served method; the message begins with its class."""


def frame_calls(calls: Sequence[Call]) -> list[Any]:
    """Return the buffers to send for calls; large arrays are not copied."""
    buffers: list[memoryview] = []
    return frame(encoding.encode(calls, buffers), buffers)


def frame(data: bytes, buffers: Sequence[memoryview]) -> list[Any]:
    """Return the buffers to send for encoded calls or answers.

    `buffers` are those that belong to the encoded data.
    """
    sizes = struct.pack(f"<{len(buffers)}Q", *(view.nbytes for view in buffers))
    return [_HEADER.pack(len(buffers), len(data)) + sizes + data, *buffers]


def read_calls(message: Message) -> list[tuple[str, msgspec.Raw]]:
    """Return the names of called methods, each with its encoded arguments."""
    return encoding.decode(message[0], _CALLS)


def read_answers(message: Message) -> list[Answer]:
    return encoding.decode(message[0], _ANSWERS)


def send(connection: socket.socket, parts: list[Any]) -> None:
    if isinstance(connection, ssl.SSLSocket):
        for part in parts:
            connection.sendall(part)
        return
    views = deque(memoryview(buffer).cast("B") for buffer in parts if memoryview(buffer).nbytes)
    while views:
        sent = connection.sendmsg([view for _, view in zip(range(64), views)])  # noqa: B905
        while sent:
            if sent < len(views[0]):
                views[0] = views[0][sent:]
                break
            sent -= len(views.popleft())


async def write(writer: asyncio.StreamWriter, parts: list[Any]) -> None:
    """Send a message in chunks, so that neither asyncio nor TLS copies it as a whole."""
    for part in parts:
        view = memoryview(part).cast("B")
        for begin in range(0, len(view), _SEND_CHUNK):
            writer.write(view[begin : begin + _SEND_CHUNK])
            await writer.drain()


def _receive_exactly(connection: socket.socket, size: int) -> memoryview:
    buffer = np.empty(size, np.uint8).data
    received = 0
    while received < size:
        if not (count := connection.recv_into(buffer[received:])):
            raise ConnectionResetError
        received += count
    return buffer


def receive(connection: socket.socket) -> Message:
    count, size = _HEADER.unpack(_receive_exactly(connection, _HEADER.size))
    rest = _receive_exactly(connection, 8 * count + size)
    sizes = struct.unpack(f"<{count}Q", rest[: 8 * count])
    return rest[8 * count :], [_receive_exactly(connection, buffer_size) for buffer_size in sizes]


async def read(reader: asyncio.StreamReader) -> Message:
    count, size = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    rest = memoryview(await reader.readexactly(8 * count + size))
    sizes = struct.unpack(f"<{count}Q", rest[: 8 * count])
    return rest[8 * count :], [await reader.readexactly(buffer_size) for buffer_size in sizes]
