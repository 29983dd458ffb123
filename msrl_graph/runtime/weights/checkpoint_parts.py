"""A host's part of a checkpoint, on a disk that the driver does not see; the driver asks for these by name.

Invariant: all raise nothing for a disk that fails: the answer says what went wrong, "" where nothing did. A file that
comes from another host has its name when it is whole.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import ParamSpec

from ...files import private, urls
from . import checkpoint
from .checkpoint import CheckpointFile

P = ParamSpec("P")
PIECE = 16 << 20  # bytes of a file that go from host to host at once


def _said(act: Callable[P, None]) -> Callable[P, str]:
    @wraps(act)
    def told(*args: P.args, **kwargs: P.kwargs) -> str:
        try:
            act(*args, **kwargs)
        except OSError as error:
            return str(error)
        return ""

    return told


@_said
def begin(run: str, iteration: int) -> None:
    """Make the folder to write in. Nothing is written into a folder of another user, which may be at the run's path."""
    Path(run).mkdir(parents=True, exist_ok=True)
    private.check_folder(Path(run).resolve(), private.OTHERS_WRITE)
    checkpoint.begin(Path(run), iteration)


@_said
def name(partial: str) -> None:
    """Gives what ranks of this host wrote the checkpoint's name; there is no manifest in it yet."""
    path = Path(partial)
    if path.exists():  # else a host with the same disk was first
        checkpoint.settle(path)


@_said
def keep(run: str, names: Sequence[str], newest: Mapping[str, bytes]) -> None:
    """Puts the manifest beside this host's part of the newest checkpoint, and removes all but those of these names."""
    target = Path(run) / checkpoint.FOLDER / names[-1]
    for file, content in newest.items():
        partial = target / f".{file}"
        partial.write_bytes(content)
        checkpoint.to_disk(partial)
        partial.rename(target / file)
    for old in checkpoint.up_to(target):
        if old.name not in names:
            shutil.rmtree(old, ignore_errors=True)


@_said
def forget(partial: str) -> None:
    shutil.rmtree(partial, ignore_errors=True)


@_said
def send(folder: str, url: str, names: Sequence[str]) -> None:
    urls.send(Path(folder), url, names)


def amiss(folder: str, files: Sequence[CheckpointFile]) -> dict[str, str]:
    """What is wrong with each of the files here."""
    found = {}
    for file in files:
        try:
            found[file.name] = checkpoint.amiss(Path(folder) / file.name, file)
        except OSError as error:
            found[file.name] = f"cannot be read: {error.strerror}"
    return found


def listed(folder: str) -> list[CheckpointFile]:
    """The files of a folder that is no checkpoint."""
    files = [p for p in Path(folder).rglob("*") if p.is_file()]
    return [replace(checkpoint.written(p, ()), name=str(p.relative_to(folder))) for p in files]


def piece(folder: str, name: str, offset: int) -> bytes:
    with (Path(folder) / name).open("rb") as file:
        file.seek(offset)
        return file.read(PIECE)


@_said
def take(folder: str, name: str, offset: int, content: bytes) -> None:
    """Writes a piece of a file beside its place."""
    path = _partial(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("r+b" if offset else "wb") as file:
        file.seek(offset)
        file.write(content)


@_said
def whole(folder: str, file: CheckpointFile) -> None:
    """Gives a file its name when all of it has come."""
    path = _partial(folder, file.name)
    if wrong := checkpoint.amiss(path, file):
        raise OSError(f"{file.name} came from another host and {wrong}")
    checkpoint.to_disk(path)
    path.rename(Path(folder) / file.name)


def _partial(folder: str, name: str) -> Path:
    path = Path(folder) / name
    return path.with_name(f".{path.name}.partial")


ACTS: Mapping[str, Callable[..., object]] = {
    f.__name__: f for f in (begin, name, keep, forget, send, amiss, listed, piece, take, whole)
}
