"""Conversion of typed values and numpy arrays to MessagePack and back.

Invariant: decoding returns data of the declared type or raises an error. Nothing in the bytes is executed, no matter
where the bytes come from. Arrays contain numbers or booleans and are read-only views of the decoded bytes.
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
_ARRAY = 1  # the MessagePack extension type of an array


class DecodeError(ValueError):
    """An error in encoded bytes."""


def encode(value: Any) -> bytes:
    """Encode a value that consists of dataclasses, tuples, containers and arrays.

    The value may also contain named tuples and scalars.
    """
    return _encoder.encode(value)


def decode(data: bytes | memoryview, type: type[T]) -> T:
    """Decode bytes that `encode` has returned into a value of the type `type`.

    Raises DecodeError.
    """
    try:
        return msgspec.msgpack.decode(data, type=type, ext_hook=_decode_extension, dec_hook=_check_array)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise DecodeError(str(error)) from None


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


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in NUMBERS:
        return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode((value.dtype.str, value.shape, value.tobytes())))
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} cannot be encoded")


def _decode_extension(code: int, data: memoryview) -> Any:
    if code != _ARRAY:
        raise DecodeError(f"unknown extension type {code}")
    dtype, shape, content = _array_decoder.decode(data)
    return view(content, dtype, shape)


def _check_array(kind: Any, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value
    raise DecodeError(f"expected an array, got {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_array_decoder = msgspec.msgpack.Decoder(tuple[str, tuple[int, ...], bytes])
