"""Checkpoints: all that a run needs to resume exactly, in any layout.

Invariant: a checkpoint is a folder, which is written under a temporary name and renamed when all of its files are on
disk. Every changed byte is noticed: the manifest lists every file with its size and SHA-256, a second file has the
SHA-256 of the manifest, and every file says to which checkpoint it belongs. (The hashes find accidents and edits by
hand. The hashes are no signature: anyone can write all hashes again.) A tensor is stored as the boxes that the ranks
held, each box once. A reader reads only the boxes that it needs. The order of the data, the mini-batches and the noise
are not stored, because they are functions of seed and iteration. If a host does not see the run's folder, the files of
its ranks are at the same path on its own disk (checkpoint_parts.py), and the manifest lists them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ...files import urls
from ...sharding.layout import elements, overlap, relative_box, slices
from ...sharding.tensors import Box
from . import tensor_files

if TYPE_CHECKING:
    import torch  # at run time not here: a run's supervisor reads manifests, and starts without torch
    from numpy.typing import NDArray

    from ...backends.engine_protocols import Shard

FORMAT = 2
DISTRIBUTED = 3  # the format of a manifest that lists the files of each host
MANIFEST = "manifest.json"
DIGEST = "manifest.sha256"  # as sha256sum writes it, so that `sha256sum -c` reads it
FOLDER = "checkpoints"  # within a run's folder
METRICS = "metrics.safetensors"  # a copy of the lines of metrics.jsonl so far, as gzip
_COPY = "metrics.jsonl.gz"


@dataclass(frozen=True)
class CheckpointPiece:
    name: str  # WORKER/KIND/TENSOR: the kind is `weights` or what the optimizer keeps
    box: Box


@dataclass(frozen=True)
class CheckpointFile:
    name: str
    bytes: int
    sha256: str
    pieces: tuple[CheckpointPiece, ...]


@dataclass(frozen=True)
class CheckpointHost:
    """A host that wrote files to its own disk: its address, Ray node id, and files."""

    address: str
    node: str
    files: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint.

    - `iteration`: the number of finished iterations.
    - `lines`: how many lines of metrics.jsonl belong to these iterations.
    - `steps`: the number of optimizer steps that each update node has made.
    - `position`: the number of rows that the run has taken from the endless sequence of the data's rows. If it is -1,
      the run has taken exactly the prompts of the finished iterations.
    - `hosts`: the hosts with files on their own disks; empty if all files are in one folder.
    - `inputs`: digests of the files that the run read, and versions (driver/run_inputs.py); empty if an older version
      of msrl_graph wrote the checkpoint and did not record the inputs.
    """

    format_version: int
    iteration: int
    lines: int
    steps: dict[str, int]
    program: dict[str, Any]
    files: tuple[CheckpointFile, ...]
    position: int = -1
    hosts: tuple[CheckpointHost, ...] = ()
    inputs: dict[str, Any] = field(default_factory=dict)


class CorruptCheckpoint(Exception):
    """A checkpoint is damaged or inconsistent; the message says how."""


def checkpoint_metadata(iteration: int, lines: int, position: int, program: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata that every file of a checkpoint has.

    The metadata says to which checkpoint the file belongs. The arguments are fields of `Manifest`.
    """
    digest = hashlib.sha256(msgspec.json.encode(program, order="deterministic")).hexdigest()
    return {"iteration": str(iteration), "lines": str(lines), "position": str(position), "program": digest}


def step_metadata(steps: Mapping[str, int]) -> dict[str, str]:
    """Return file metadata that has each update node's number of optimizer steps."""
    return {f"steps of {name}": str(count) for name, count in steps.items()}


# Writing


def write_tensors(
    folder: Path, name: str, pieces: Iterable[tuple[str, Shard]], metadata: Mapping[str, str]
) -> CheckpointFile:
    """Write one file of tensors, and sync the file to disk. Raises OSError."""
    shards = {f"{prefix}/{shard.name}": shard for prefix, shard in pieces if elements(shard.box)}
    tensor_files.write_tensors(
        folder / name, {key: shard.tensor.detach().contiguous() for key, shard in shards.items()}, metadata
    )
    return file_entry(folder / name, tuple(CheckpointPiece(key, shard.box) for key, shard in shards.items()))


def write_arrays(
    folder: Path, name: str, arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]
) -> CheckpointFile:
    """Write a file of arrays, which any rank can later read.

    The file is synced to disk. Raises OSError.
    """
    tensor_files.write_arrays(folder / name, arrays, metadata)
    return file_entry(folder / name, ())


def file_entry(path: Path, pieces: tuple[CheckpointPiece, ...]) -> CheckpointFile:
    """Sync a file to disk, and return its entry in the manifest."""
    sync_to_disk(path)
    return CheckpointFile(path.name, path.stat().st_size, _sha256(path), pieces)


def write_metrics(folder: Path, copy: bytes, metadata: Mapping[str, str]) -> CheckpointFile:
    """Write the metrics lines of a checkpoint; `copy` has these lines as gzip."""
    import numpy as np

    return write_arrays(folder, METRICS, {_COPY: np.frombuffer(copy, np.uint8)}, metadata)


def begin(run: Path, iteration: int) -> Path:
    """Make an empty folder to write a checkpoint in."""
    partial = run / FOLDER / f".{folder_name(iteration)}.partial"
    for stale in (run / FOLDER).glob(".*.partial"):  # left by a run that ended while it wrote a checkpoint
        if is_folder_name(stale.stem.lstrip(".")):
            shutil.rmtree(stale, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def commit(partial: Path, manifest: Manifest, keep: int, best: Collection[int] = ()) -> Path:
    """Write the manifest, and rename the folder of a complete checkpoint.

    Older checkpoints are removed, except the newest `keep` (including this one) and the checkpoints of iterations in
    `best`.
    """
    content = msgspec.json.format(msgspec.json.encode(manifest))
    for name, text in ((MANIFEST, content), (DIGEST, _digest_line(content))):
        (partial / name).write_bytes(text)
        sync_to_disk(partial / name)
    target = finalize(partial)
    for old in (path for path in list_up_to(target)[:-keep] if int(path.name) not in best):
        shutil.rmtree(old, ignore_errors=True)
    return target


def finalize(partial: Path) -> Path:
    """Give the folder that `begin` has made its final name; return the new path."""
    target = partial.parent / partial.stem.lstrip(".")
    sync_to_disk(partial)
    if target.exists():  # the run was resumed from an older checkpoint and writes this one again with the same contents
        shutil.rmtree(target)
    partial.rename(target)
    sync_to_disk(target.parent)
    return target


def sync_to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest_line(manifest: bytes) -> bytes:
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n".encode()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Reading


def folder_name(iteration: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"{iteration:06d}"


def is_folder_name(name: str) -> bool:
    """Return whether a name has the form of a checkpoint folder's name."""
    return name.isascii() and name.isdecimal() and name == folder_name(int(name))


def list_checkpoints(run: Path) -> list[Path]:
    """List the checkpoints in a run's folder, oldest first, intact or not.

    A folder without any file of a checkpoint is not a checkpoint, whatever its name.
    """
    candidates = (
        path
        for path in (run / FOLDER).glob("*")
        if is_folder_name(path.name) and path.is_dir() and not path.is_symlink()
    )
    return sorted((path for path in candidates if _holds_files(path)), key=lambda path: int(path.name))


def list_up_to(path: Path) -> list[Path]:
    """List the checkpoints of a run, from the oldest to the checkpoint `path`."""
    return [checkpoint for checkpoint in list_checkpoints(path.parent.parent) if int(checkpoint.name) <= int(path.name)]


def list_at_url(url: str, whole: bool = True) -> list[str]:
    """List the names of the checkpoints in a folder at a URL, oldest first.

    If `whole` is true, only checkpoints with a manifest (complete ones) are listed. Raises the errors of files/urls.py.
    """
    files_by_name = {name: urls.names(urls.join(url, name)) for name in urls.names(url) if is_folder_name(name)}
    return sorted(
        (
            checkpoint_name
            for checkpoint_name, files in files_by_name.items()
            if MANIFEST in files or (not whole and _has_checkpoint_file(files))
        ),
        key=int,
    )


def _holds_files(path: Path) -> bool:
    try:
        return _has_checkpoint_file(file.name for file in path.iterdir())
    except OSError:
        return False


def _has_checkpoint_file(names: Iterable[str]) -> bool:
    return any(name == MANIFEST or name.endswith(".safetensors") for name in names)


def read_manifest(path: Path) -> Manifest:
    """Read and check the manifest, but no other file. Raises CorruptCheckpoint."""
    name = MANIFEST
    try:
        content = (path / name).read_bytes()
        manifest = msgspec.json.decode(content, type=Manifest)
        if manifest.format_version not in (FORMAT, DISTRIBUTED):
            known = f"{FORMAT} and {DISTRIBUTED}"
            raise CorruptCheckpoint(f"its {MANIFEST} has format {manifest.format_version}, this version reads {known}")
        name = DIGEST
        if (path / name).read_bytes() != _digest_line(content):
            raise CorruptCheckpoint(
                f"its {MANIFEST} or its {DIGEST} was changed after it was written: one is not the SHA-256 of the other"
            )
    except OSError as error:
        raise CorruptCheckpoint(f"its {name} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:  # the last: endless brackets
        raise CorruptCheckpoint(f"its {MANIFEST} is damaged: {error}") from None
    if outside := [file.name for file in manifest.files if "/" in file.name or not file.name.strip(".")]:
        raise CorruptCheckpoint(f"its {MANIFEST} cannot be right: `{outside[0]}` is not the name of one of its files")
    counts = {"iteration": manifest.iteration, "lines": manifest.lines, "position": manifest.position + 1}
    counts |= {f"steps of {name}": count for name, count in manifest.steps.items()}
    if below := next((count_name for count_name, count in counts.items() if count < 0), ""):
        raise CorruptCheckpoint(f"its {MANIFEST} cannot be right: {below} is below zero")
    if is_folder_name(path.name) and path.name != folder_name(manifest.iteration):
        raise CorruptCheckpoint(
            f"its folder is called {path.name}, but its {MANIFEST} says iteration {manifest.iteration}"
        )
    return manifest


def verify(path: Path) -> Manifest:
    """Verify every file of a checkpoint and return its manifest.

    Files that are on the disks of other hosts may be absent. Raises CorruptCheckpoint.
    """
    manifest = read_manifest(path)
    expected = checkpoint_metadata(manifest.iteration, manifest.lines, manifest.position, manifest.program)
    expected |= step_metadata(manifest.steps)
    for file in manifest.files:
        file_path = path / file.name
        if manifest.hosts and not file_path.is_file():
            continue
        if wrong := find_corruption(file_path, file):
            raise CorruptCheckpoint(f"its file {file.name} {wrong}")
        for key, value in _read_metadata(file_path).items():
            if value != expected.get(key):
                raise CorruptCheckpoint(
                    f"its {MANIFEST} says {key} {expected.get(key)}, but its file {file.name} says {value}"
                )
    return manifest


def find_corruption(path: Path, file: CheckpointFile) -> str:
    """Return the end of a sentence about what is wrong with a file; "" if intact."""
    if not path.is_file():
        return "is missing"
    if (size := path.stat().st_size) != file.bytes:
        return f"has {size} bytes of {file.bytes}"
    return "" if _sha256(path) == file.sha256 else "was changed after it was written: its SHA-256 differs"


def _read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a checkpoint's file. Raises CorruptCheckpoint."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            return file.metadata() or {}
    except SafetensorError as error:
        raise CorruptCheckpoint(f"its file {path.name} holds no tensors: {error}") from None


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    from safetensors.numpy import load_file

    arrays: dict[str, NDArray[Any]] = load_file(path)
    return arrays


def read_metrics_copy(path: Path, manifest: Manifest) -> bytes | None:
    """Return the lines of metrics.jsonl that belong to a checkpoint.

    Returns None if the checkpoint has no copy of these lines. Raises CorruptCheckpoint.
    """
    if not any(file.name == METRICS for file in manifest.files):
        return None
    try:
        lines = zlib.decompress(read_arrays(path / METRICS)[_COPY].tobytes(), wbits=31)
    except (KeyError, zlib.error, OSError) as error:
        raise CorruptCheckpoint(f"its file {METRICS} cannot be read: {error}") from None
    if (count := lines.count(b"\n")) != manifest.lines:
        raise CorruptCheckpoint(f"its file {METRICS} holds {count} lines of {manifest.lines}")
    return lines


def find_newest(run: Path) -> tuple[Path, Manifest] | None:
    """Return the newest intact checkpoint of a run's folder; None if there is none."""
    for path in reversed(list_checkpoints(run)):
        try:
            return path, verify(path)
        except CorruptCheckpoint:
            continue
    return None


class CheckpointSource:
    """A reader of a checkpoint's tensors, which can read any box of a tensor."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.pieces: dict[str, list[tuple[str, Box]]] = {}
        for file in manifest.files:
            for piece in file.pieces:
                self.pieces.setdefault(piece.name, []).append((file.name, piece.box))

    def kinds(self, worker: str) -> dict[str, set[str]]:
        """Return the kinds of data stored for a worker, and the tensors of each kind.

        A kind is `weights` or data of the optimizer. Some kinds of optimizer data exist only for some tensors.
        """
        kinds: dict[str, set[str]] = {}
        for name in self.pieces:
            owner, kind, tensor = name.split("/", 2)
            if owner == worker:
                kinds.setdefault(kind, set()).add(tensor)
        return kinds

    def files(self, name: str, box: Box) -> set[str]:
        """Return the names of the files that contain a part of a tensor's `box`."""
        return {file for file, piece_box in self.pieces.get(name, ()) if overlap(piece_box, box) is not None}

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor was saved. Raises CorruptCheckpoint."""
        from safetensors import safe_open

        if name not in self.pieces:
            raise CorruptCheckpoint(f"it holds no {name}")
        with safe_open(self.path / self.pieces[name][0][0], framework="pt") as tensors:
            saved_dtype: torch.dtype = tensors.get_slice(name)[:0].dtype
        return saved_dtype

    def read(self, name: str, box: Box, dtype: torch.dtype) -> torch.Tensor:
        """Read one box of a tensor from all files that contain a part of the box."""
        import torch
        from safetensors import safe_open

        out = torch.empty([stop - start for start, stop in box], dtype=dtype)
        missing = elements(box)
        for file, piece_box in self.pieces.get(name, ()):
            common = overlap(piece_box, box)
            if common is None:
                continue
            with safe_open(self.path / file, framework="pt") as tensors:
                piece = tensors.get_slice(name)[slices(relative_box(common, piece_box))]
            out[slices(relative_box(common, box))] = piece
            missing -= elements(common)
        if missing:
            raise CorruptCheckpoint(f"it holds {elements(box) - missing} of {elements(box)} elements of {name}")
        return out
