"""Names, shapes and types of tensors in weight files, without importing torch.

Invariant: no values of tensors are read, except by `read_bytes`. Nothing in a file is executed: of a file that torch
saved, only the calls that rebuild a tensor are understood, and all others are an error.
"""

from __future__ import annotations

import json
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from .weights import UnclearError, weight_files

# Bytes per element, by the type's name in safetensors files.
SIZES = {
    "F64": 8,
    "F32": 4,
    "BF16": 2,
    "F16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
# The types of torch's storages that a file of torch names.
STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "BFloat16Storage": "BF16",
    "HalfStorage": "F16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}
SAVE_AGAIN = "let transformers write the folder again: `model.save_pretrained(folder)`"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a weight file.

    `dtype` is the type's name in safetensors files. The values start at the byte `start` of the file's record `record`,
    or of the file itself if `record` is "".
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    record: str = ""

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * SIZES.get(self.dtype, 0)


def read_folder(folder: Path | str) -> dict[str, StoredTensor]:
    """Return the tensors in the weight files of a model's folder, by name.

    Raises UnclearError if the files are incomplete or ambiguous, OSError, and UnreadableFile.
    """
    stored: dict[str, StoredTensor] = {}
    for file, named in weight_files(folder).read.items():
        try:
            tensors = read_header(file)
        except (OSError, ValueError, RecursionError) as error:
            raise UnreadableFile(file, error) from error
        stored |= {name: tensor for name, tensor in tensors.items() if named is None or name in named}
    return stored


class UnreadableFile(ValueError):
    """An error for a weight file that cannot be read.

    `help` says what the user can do.
    """

    def __init__(self, file: Path, error: Exception) -> None:
        super().__init__(f"the weights in {file} cannot be read: {error}")
        self.file = file
        self.help = error.help if isinstance(error, UnclearError) else "copy the file again"


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors in a weight file, by name.

    Raises ValueError if the file is incomplete or not a weight file.
    """
    if not file.is_file():
        raise ValueError("it is not a regular file")
    return _read_safetensors(file) if file.suffix == ".safetensors" else _read_torch(file)


def read_bytes(tensor: StoredTensor) -> bytes:
    """Return the values of a tensor that is contiguous in its file."""
    with tensor.file.open("rb") as opened:
        if not tensor.record:
            return _read_at(opened, tensor)
        with zipfile.ZipFile(opened) as archive, archive.open(tensor.record) as record:
            return _read_at(record, tensor)


def _read_at(opened: Any, tensor: StoredTensor) -> bytes:
    opened.seek(tensor.start)
    values: bytes = opened.read(tensor.bytes)
    return values


def _read_safetensors(file: Path) -> dict[str, StoredTensor]:
    """Read the header of a safetensors file.

    A safetensors file consists of the length of a JSON object in eight bytes, the JSON object, and the bytes of all
    tensors.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if not 0 < length <= size - 8:
            raise ValueError(f"its header has {length:,} bytes, the file {size:,}")
        entries = json.loads(opened.read(length))
    if not isinstance(entries, dict):
        raise ValueError("its header is not a JSON object")
    entries.pop("__metadata__", None)
    tensors = {}
    end = 0
    for name, entry in entries.items():
        match entry:
            case {"dtype": str(dtype), "shape": shape, "data_offsets": [int(start), int(stop)]} if all(
                isinstance(extent, int) for extent in shape
            ):
                tensors[name] = StoredTensor(file, name, dtype, tuple(shape), 8 + length + start)
                if not 0 <= start <= stop or (dtype in SIZES and stop - start != tensors[name].bytes):
                    raise ValueError(f"the bytes of `{name}` do not match its shape")
            case _:
                raise ValueError(f"its header does not describe `{name}`")
        end = max(end, stop)
    if 8 + length + end != size:
        raise ValueError(f"its tensors end at byte {8 + length + end:,}, the file has {size:,}")
    return tensors


@dataclass(frozen=True)
class _Storage:
    """A record of a file of torch, with the values of one or more tensors."""

    dtype: str
    key: str
    elements: int


@dataclass(frozen=True)
class _View:
    """A tensor as torch's pickle describes it: a part of a storage."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _rebuild_view(storage: _Storage, offset: int, shape: Any, strides: Any, *_: Any) -> _View:
    return _View(storage, offset, tuple(shape), tuple(strides))


def _rebuild_parameter(view: _View, *_: Any) -> _View:
    return view


_CALLS: Mapping[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_view,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
}


class _TensorUnpickler(pickle.Unpickler):
    """Reads the pickle of a file of torch, without torch."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        if (call := _CALLS.get((module, name))) is None:
            raise UnclearError(f"it holds `{module}.{name}`, but only tensors are read", SAVE_AGAIN)
        return call

    def persistent_load(self, reference: Any) -> _Storage:
        match reference:
            case ("storage", str(dtype), str(key), _, int(elements)):
                return _Storage(dtype, key, elements)
        raise ValueError("it refers to something that is not a storage of tensors")


def _read_torch(file: Path) -> dict[str, StoredTensor]:
    """Read the names and shapes of the tensors in a file that torch saved.

    The file is a zip archive with a pickle, `data.pkl`, and a record `data/KEY` for each storage.
    """
    with file.open("rb") as opened:
        if not zipfile.is_zipfile(opened):
            raise UnclearError("it is not a complete file of torch 1.6 or later", f"copy it again, or {SAVE_AGAIN}")
        with zipfile.ZipFile(opened) as archive:
            sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
            root = next((name.removesuffix("data.pkl") for name in sizes if name.endswith("/data.pkl")), None)
            if root is None:
                raise ValueError("it has no `data.pkl`, which lists the tensors")
            with archive.open(f"{root}data.pkl") as record:
                state = _unpickle(record)  # type: ignore[arg-type]
    tensors = {}
    for name, view in state.items():
        if not isinstance(name, str) or not isinstance(view, _View):
            raise ValueError(f"its entry {name!r} is not a tensor")
        record_name = f"{root}data/{view.storage.key}"
        size = SIZES[view.storage.dtype]
        last = view.offset + sum((extent - 1) * stride for extent, stride in zip(view.shape, view.strides, strict=True))
        if math.prod(view.shape) and not 0 <= last * size < sizes.get(record_name, 0):
            raise ValueError(f"the bytes of `{name}` do not match its shape")
        tensors[name] = StoredTensor(file, name, view.storage.dtype, view.shape, view.offset * size, record_name)
    return tensors


def _unpickle(record: BinaryIO) -> dict[Any, Any]:
    try:
        state = _TensorUnpickler(record).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"its `data.pkl` cannot be read: {error}") from error
    if not isinstance(state, dict):
        raise ValueError("it holds no dictionary of tensors")
    return state


__all__ = ["StoredTensor", "UnreadableFile", "read_bytes", "read_folder", "read_header"]
