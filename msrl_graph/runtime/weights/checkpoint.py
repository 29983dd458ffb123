"""Checkpoints: what a run needs to go on as if nothing had happened, on any layout.

Invariant: a checkpoint is a folder, written beside its place and renamed when all of it is on the disk; its manifest
names every file with its size and SHA-256, a file beside it has the manifest's own, and every file says of what it is:
no byte changes unseen. (That tells of accidents and of edits by hand; it is no signature against who makes all of them
again.) A tensor lies in it in the boxes in which ranks held it, each box once, and whoever reads takes the boxes that
it needs. What is not in it (the order of the data, mini-batches, noise) is a function of seed and iteration. Hosts that
do not see the run's folder have their parts at the same path (checkpoint_parts.py); the manifest says which host has
what.
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
from ...sharding.layout import Box, elements, overlap, slices, within
from . import tensor_files

if TYPE_CHECKING:
    # The supervisor of a run reads manifests, and starts without torch.
    import torch
    from numpy.typing import NDArray

    from ...backends.spec import Shard

FORMAT = 2
PARTED = 3  # the format of a manifest that says which host has what
MANIFEST = "manifest.json"
DIGEST = "manifest.sha256"  # as sha256sum writes it, so that `sha256sum -c` reads it
FOLDER = "checkpoints"  # within a run's folder
METRICS = "metrics.safetensors"  # the copy of the lines of metrics.jsonl so far, as gzip
_COPY = "metrics.jsonl.gz"


@dataclass(frozen=True)
class CheckpointPiece:
    name: str  # WORKER/KIND/TENSOR: `weights`, and what the optimizer keeps
    box: Box


@dataclass(frozen=True)
class CheckpointFile:
    name: str
    bytes: int
    sha256: str
    pieces: tuple[CheckpointPiece, ...]


@dataclass(frozen=True)
class CheckpointHost:
    """Who wrote which files, on a disk of its own: its address, and Ray's name of it."""

    address: str
    node: str
    files: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """`iteration`: how many are done. `lines`: how many lines of metrics belong to them. `steps`: optimizer steps by
    update. `position`: how many rows of the data's endless sequence were drawn (-1: as many as the iterations have
    prompts). `hosts`: none where all of it lies in one folder. `inputs`: digests of the files that the run read, and
    versions (driver/run_inputs.py); nothing of a version that kept none."""

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
    """What is wrong with a checkpoint."""


def said(iteration: int, lines: int, position: int, program: Mapping[str, Any]) -> dict[str, str]:
    """What each file of a checkpoint says of it, so that no other file can speak for it: as `Manifest` has it."""
    whole = hashlib.sha256(msgspec.json.encode(program, order="deterministic")).hexdigest()
    return {"iteration": str(iteration), "lines": str(lines), "position": str(position), "program": whole}


def taken(steps: Mapping[str, int]) -> dict[str, str]:
    """What a file says of the optimizer's steps."""
    return {f"steps of {name}": str(count) for name, count in steps.items()}


# Writing


def write(folder: Path, name: str, pieces: Iterable[tuple[str, Shard]], says: Mapping[str, str]) -> CheckpointFile:
    """One file of a checkpoint, on the disk when this returns. OSError where that fails."""
    held = {f"{prefix}/{s.name}": s for prefix, s in pieces if elements(s.box)}
    tensor_files.tensors(folder / name, {key: s.tensor.detach().contiguous() for key, s in held.items()}, says)
    return written(folder / name, tuple(CheckpointPiece(key, s.box) for key, s in held.items()))


def write_arrays(
    folder: Path, name: str, arrays: Mapping[str, NDArray[Any]], says: Mapping[str, str]
) -> CheckpointFile:
    """A file of arrays that every rank may read whole, on the disk when this returns. OSError where that fails."""
    tensor_files.arrays(folder / name, arrays, says)
    return written(folder / name, ())


def written(path: Path, pieces: tuple[CheckpointPiece, ...]) -> CheckpointFile:
    """What a manifest says of a file, which is on the disk when this returns."""
    to_disk(path)
    return CheckpointFile(path.name, path.stat().st_size, _digest(path), pieces)


def write_metrics(folder: Path, copy: bytes, says: Mapping[str, str]) -> CheckpointFile:
    """The lines of metrics.jsonl that belong to a checkpoint, as a gzip file's bytes."""
    import numpy as np

    return write_arrays(folder, METRICS, {_COPY: np.frombuffer(copy, np.uint8)}, says)


def begin(run: Path, iteration: int) -> Path:
    """An empty folder to write a checkpoint in."""
    partial = run / FOLDER / f".{named(iteration)}.partial"
    for stale in (run / FOLDER).glob(".*.partial"):  # of a run that was ended while it wrote
        if is_named(stale.stem.lstrip(".")):
            shutil.rmtree(stale, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def commit(partial: Path, manifest: Manifest, keep: int, best: Collection[int] = ()) -> Path:
    """Gives a whole checkpoint its name, and removes those older than the newest `keep` up to this one, but for the
    `best`."""
    content = msgspec.json.format(msgspec.json.encode(manifest))
    for name, text in ((MANIFEST, content), (DIGEST, _sum(content))):
        (partial / name).write_bytes(text)
        to_disk(partial / name)
    target = settle(partial)
    for old in (path for path in up_to(target)[:-keep] if int(path.name) not in best):
        shutil.rmtree(old, ignore_errors=True)
    return target


def settle(partial: Path) -> Path:
    """Gives what was written in a folder of `begin` the checkpoint's name."""
    target = partial.parent / partial.stem.lstrip(".")
    to_disk(partial)
    if target.exists():  # of a run that was resumed from an older one: what it held, it will hold again
        shutil.rmtree(target)
    partial.rename(target)
    to_disk(target.parent)
    return target


def to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sum(manifest: bytes) -> bytes:
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n".encode()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Reading


def named(iteration: int) -> str:
    """The name of a checkpoint's folder."""
    return f"{iteration:06d}"


def is_named(name: str) -> bool:
    """Whether a folder of this name may be a checkpoint."""
    return name.isascii() and name.isdecimal() and name == named(int(name))


def found(run: Path) -> list[Path]:
    """The checkpoints of a run's folder, oldest first, sound or not. A folder that holds no file of a checkpoint is
    not one, whatever its name."""
    named_so = (p for p in (run / FOLDER).glob("*") if is_named(p.name) and p.is_dir() and not p.is_symlink())
    return sorted((p for p in named_so if _holds_files(p)), key=lambda p: int(p.name))


def up_to(path: Path) -> list[Path]:
    """The checkpoints of a run from the oldest to this one; a folder with a larger number is none of them."""
    return [p for p in found(path.parent.parent) if int(p.name) <= int(path.name)]


def at_url(url: str, whole: bool = True) -> list[str]:
    """The names of the checkpoints in a folder at a URL, oldest first: those that have a manifest, or also those of
    which only a part is there. Raises what `urls.told` tells."""
    found = {name: urls.names(urls.under(url, name)) for name in urls.names(url) if is_named(name)}
    return sorted((n for n, files in found.items() if MANIFEST in files or (not whole and _of_ours(files))), key=int)


def _holds_files(path: Path) -> bool:
    try:
        return _of_ours(file.name for file in path.iterdir())
    except OSError:
        return False


def _of_ours(names: Iterable[str]) -> bool:
    return any(name == MANIFEST or name.endswith(".safetensors") for name in names)


def manifest_of(path: Path) -> Manifest:
    """The manifest alone, as it was written. Raises Unsound."""
    name = MANIFEST
    try:
        content = (path / name).read_bytes()
        manifest = msgspec.json.decode(content, type=Manifest)
        if manifest.format_version not in (FORMAT, PARTED):
            known = f"{FORMAT} and {PARTED}"
            raise CorruptCheckpoint(
                f"its {MANIFEST} is of format {manifest.format_version}, this version reads {known}"
            )
        name = DIGEST
        if (path / name).read_bytes() != _sum(content):
            raise CorruptCheckpoint(
                f"its {MANIFEST} or its {DIGEST} was changed after it was written: one is not the SHA-256 of the other"
            )
    except OSError as error:
        raise CorruptCheckpoint(f"its {name} cannot be read: {error.strerror}") from None
    except (
        msgspec.MsgspecError,
        UnicodeDecodeError,
        RecursionError,
    ) as error:  # no JSON of ours, no text, or brackets without end
        raise CorruptCheckpoint(f"its {MANIFEST} is damaged: {error}") from None
    if outside := [f.name for f in manifest.files if "/" in f.name or not f.name.strip(".")]:
        raise CorruptCheckpoint(
            f"its {MANIFEST} cannot be right: `{outside[0]}` is not the name of a file in its folder"
        )
    counts = {"iteration": manifest.iteration, "lines": manifest.lines, "position": manifest.position + 1}
    counts |= {f"steps of {name}": count for name, count in manifest.steps.items()}
    if below := next((what for what, count in counts.items() if count < 0), ""):
        raise CorruptCheckpoint(f"its {MANIFEST} cannot be right: {below} is below zero")
    if is_named(path.name) and path.name != named(manifest.iteration):
        raise CorruptCheckpoint(
            f"its folder is called {path.name}, and its {MANIFEST} is of {manifest.iteration} iterations"
        )
    return manifest


def sound(path: Path) -> Manifest:
    """The manifest of a checkpoint whose every byte is there, or is another host's to have. Raises Unsound."""
    manifest = manifest_of(path)
    true = said(manifest.iteration, manifest.lines, manifest.position, manifest.program) | taken(manifest.steps)
    for file in manifest.files:
        there = path / file.name
        if manifest.hosts and not there.is_file():
            continue
        if wrong := amiss(there, file):
            raise CorruptCheckpoint(f"its file {file.name} {wrong}")
        for what, value in _says(there).items():
            if value != true.get(what):
                raise CorruptCheckpoint(
                    f"its {MANIFEST} says {what} {true.get(what)}, and its file {file.name} {value}"
                )
    return manifest


def amiss(path: Path, file: CheckpointFile) -> str:
    """What is wrong with a file of a checkpoint, for a sentence; "" where it is as it was written."""
    if not path.is_file():
        return "is missing"
    if (size := path.stat().st_size) != file.bytes:
        return f"has {size} bytes of {file.bytes}"
    return "" if _digest(path) == file.sha256 else "was changed after it was written: its SHA-256 differs"


def _says(path: Path) -> dict[str, str]:
    """What a file says of its checkpoint. Raises Unsound."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            return file.metadata() or {}
    except SafetensorError as error:
        raise CorruptCheckpoint(f"its file {path.name} holds no tensors: {error}") from None


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    from safetensors.numpy import load_file

    found: dict[str, NDArray[Any]] = load_file(path)
    return found


def metrics_copy(path: Path, manifest: Manifest) -> bytes | None:
    """The lines of metrics.jsonl that belong to a checkpoint; None where it holds no copy of them. Raises Unsound."""
    if not any(f.name == METRICS for f in manifest.files):
        return None
    try:
        lines = zlib.decompress(read_arrays(path / METRICS)[_COPY].tobytes(), wbits=31)
    except (KeyError, zlib.error, OSError) as error:
        raise CorruptCheckpoint(f"its file {METRICS} cannot be read: {error}") from None
    if (count := lines.count(b"\n")) != manifest.lines:
        raise CorruptCheckpoint(f"its file {METRICS} holds {count} lines of {manifest.lines}")
    return lines


def newest(run: Path) -> tuple[Path, Manifest] | None:
    """The newest sound checkpoint of a run's folder."""
    for path in reversed(found(run)):
        try:
            return path, sound(path)
        except CorruptCheckpoint:
            continue
    return None


class CheckpointSource:
    """The tensors of a checkpoint, by box."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.pieces: dict[str, list[tuple[str, Box]]] = {}
        for file in manifest.files:
            for piece in file.pieces:
                self.pieces.setdefault(piece.name, []).append((file.name, piece.box))

    def kinds(self, worker: str) -> dict[str, set[str]]:
        """What is kept of a worker's tensors, and of which: an optimizer may step by several rules."""
        found: dict[str, set[str]] = {}
        for name in self.pieces:
            of, kind, tensor = name.split("/", 2)
            if of == worker:
                found.setdefault(kind, set()).add(tensor)
        return found

    def files(self, name: str, box: Box) -> set[str]:
        """The files that hold something of what lies in `box`."""
        return {file for file, there in self.pieces.get(name, ()) if overlap(there, box) is not None}

    def dtype(self, name: str) -> torch.dtype:
        """The type in which a tensor was saved. Raises Unsound."""
        from safetensors import safe_open

        if name not in self.pieces:
            raise CorruptCheckpoint(f"it holds no {name}")
        with safe_open(self.path / self.pieces[name][0][0], framework="pt") as tensors:
            found: torch.dtype = tensors.get_slice(name)[:0].dtype
        return found

    def read(self, name: str, box: Box, dtype: torch.dtype) -> torch.Tensor:
        """The part of a tensor that lies in `box`, from however many files."""
        import torch
        from safetensors import safe_open

        out = torch.empty([b - a for a, b in box], dtype=dtype)
        missing = elements(box)
        for file, there in self.pieces.get(name, ()):
            common = overlap(there, box)
            if common is None:
                continue
            with safe_open(self.path / file, framework="pt") as tensors:
                piece = tensors.get_slice(name)[slices(within(common, there))]
            out[slices(within(common, box))] = piece
            missing -= elements(common)
        if missing:
            raise CorruptCheckpoint(f"it holds {elements(box) - missing} of {elements(box)} elements of {name}")
        return out
