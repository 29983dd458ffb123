"""Values with numpy arrays as MessagePack, decoded by their types.

Invariant: what is decoded is data of the declared type or an error; no byte of it is run, whoever wrote it. Arrays are
numbers or booleans, and views of the decoded bytes that nobody may write to.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, TypeVar

import msgspec
import numpy as np

from .columns import Array

T = TypeVar("T")
NUMBERS = "biuf"  # kinds of numpy types that an array may have: no objects, no records
_ARRAY = 1  # the code of an array among the extension types


class DecodeError(ValueError):
    """What is wrong with encoded bytes."""


def encode(value: Any) -> bytes:
    """Encode dataclasses, named tuples, containers, scalars and arrays."""
    return _encoder.encode(value)


def decode(data: bytes | memoryview, type: type[T]) -> T:
    """Decode what `encode` made of a value of this type. Raises Damaged."""
    try:
        return msgspec.msgpack.decode(data, type=type, ext_hook=_extension, dec_hook=_array)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise DecodeError(str(error)) from None


def view(buffer: Any, dtype: str, shape: tuple[int, ...], offset: int = 0) -> Array:
    """Return an array that is a view of a buffer's bytes from `offset` on. Raises Damaged."""
    try:
        if offset < 0 or min(shape, default=0) < 0:
            raise DecodeError(f"an array of {dtype}, shape {shape}, at byte {offset}")
        flat = np.frombuffer(buffer, _number(dtype), math.prod(shape), offset)
        return flat if len(shape) == 1 else flat.reshape(shape)
    except (TypeError, ValueError, OverflowError, MemoryError) as error:
        raise error if isinstance(error, DecodeError) else DecodeError(str(error)) from None


@cache
def _number(dtype: str) -> np.dtype[Any]:
    kind = np.dtype(dtype)
    if kind.kind not in NUMBERS:
        raise DecodeError(f"an array of {dtype}")
    return kind


def _parts(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in NUMBERS:
        return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode((value.dtype.str, value.shape, value.tobytes())))
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} cannot be encoded")


def _extension(code: int, data: memoryview) -> Any:
    if code != _ARRAY:
        raise DecodeError(f"an extension of type {code}")
    dtype, shape, content = _array_decoder.decode(data)
    return view(content, dtype, shape)


def _array(kind: Any, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value
    raise DecodeError(f"{type(value).__name__} where an array belongs")


_encoder = msgspec.msgpack.Encoder(enc_hook=_parts)
_array_decoder = msgspec.msgpack.Decoder(tuple[str, tuple[int, ...], bytes])
