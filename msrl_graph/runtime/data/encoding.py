"""Conversion of typed values and numpy arrays to MessagePack and back.

Invariant: decoding returns data of the declared type or raises an error. Nothing in the bytes is executed, no matter
where the bytes come from. Arrays contain numbers or booleans and are read-only views of the decoded bytes.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, TypeVar

import msgspec
import numpy as np

from .columns import Array

T = TypeVar("T")
NUMBERS = "biuf"  # kinds of numpy types that an array may have: no objects, no records
# The MessagePack extension types of an array: its bytes are in the extension, or in a buffer next to the message.
_ARRAY = 1
_OUTER_ARRAY = 2
_INLINE_LIMIT = 1 << 12  # bytes; smaller arrays stay inside a message


class DecodeError(ValueError):
    """An error in encoded bytes."""


def encode(value: Any, buffers: list[memoryview] | None = None) -> bytes:
    """Encode a value that consists of dataclasses, tuples, containers and arrays.

    The value may also contain named tuples and scalars. If `buffers` is given, the bytes of large arrays are not
    copied: the function appends views of them to `buffers`, and the result refers to these by their index.
    """
    if buffers is None:
        return _encoder.encode(value)
    return msgspec.msgpack.Encoder(enc_hook=partial(_encode_array, buffers=buffers)).encode(value)


def decode(data: Any, type: type[T], buffers: Sequence[Any] = ()) -> T:
    """Decode bytes that `encode` has returned into a value of the type `type`.

    `buffers` are those that belong to the message. Raises DecodeError.
    """
    _current.buffers = buffers
    try:
        value: T = _decoder(type).decode(data)  # type: ignore[arg-type]  # types can be hashed
        return value
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise DecodeError(str(error)) from None
    finally:
        _current.buffers = ()


@cache
def _decoder(type: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(type, ext_hook=_decode_extension, dec_hook=_check_array)


def view(buffer: Any, dtype: str, shape: tuple[int, ...], offset: int = 0) -> Array:
    """Return an array that is a view of a buffer's bytes from `offset` on.

    Raises DecodeError.
    """
    try:
        if offset < 0 or min(shape, default=0) < 0:
            raise DecodeError(f"invalid array of {dtype}, shape {shape}, at byte {offset}")
        flat = np.frombuffer(buffer, _number_dtype(dtype), math.prod(shape), offset)
        return flat if len(shape) == 1 else flat.reshape(shape)
    except (TypeError, ValueError, OverflowError, MemoryError) as error:
        raise error if isinstance(error, DecodeError) else DecodeError(str(error)) from None


@cache
def _number_dtype(dtype: str) -> np.dtype[Any]:
    kind = np.dtype(dtype)
    if kind.kind not in NUMBERS:
        raise DecodeError(f"an array cannot hold {dtype}")
    return kind


def _encode_array(value: Any, buffers: list[memoryview] | None = None) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in NUMBERS:
        if buffers is not None and value.nbytes >= _INLINE_LIMIT:
            buffers.append(np.ascontiguousarray(value).data.cast("B"))
            head = (value.dtype.str, value.shape, len(buffers) - 1)
            return msgspec.msgpack.Ext(_OUTER_ARRAY, msgspec.msgpack.encode(head))
        return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode((value.dtype.str, value.shape, value.tobytes())))
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} cannot be encoded")


def _decode_extension(code: int, data: memoryview) -> Any:
    if code == _ARRAY:
        dtype, shape, content = _array_decoder.decode(data)
        return view(content, dtype, shape)
    if code == _OUTER_ARRAY:
        dtype, shape, index = _outer_array_decoder.decode(data)
        if not 0 <= index < len(_current.buffers):
            raise DecodeError(f"there is no buffer {index}")
        return view(_current.buffers[index], dtype, shape)
    raise DecodeError(f"unknown extension type {code}")


def _check_array(kind: Any, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value
    raise DecodeError(f"expected an array, got {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_array_decoder = msgspec.msgpack.Decoder(tuple[str, tuple[int, ...], bytes])
_outer_array_decoder = msgspec.msgpack.Decoder(tuple[str, tuple[int, ...], int])
_current = threading.local()  # the buffers of the message that this thread decodes
