"""The files of a checkpoint on a host whose disk the driver does not see.

The driver calls the functions in `ACTS` by name, in a process on that host.

Invariant: a function that writes does not raise if a disk fails. The function returns what went wrong, or "". A file
that is sent from another host gets its final name only when it is complete.
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
PIECE = 16 << 20  # bytes of a file that are sent from host to host in one piece


def _return_error(act: Callable[P, None]) -> Callable[P, str]:
    @wraps(act)
    def message_of(*args: P.args, **kwargs: P.kwargs) -> str:
        try:
            act(*args, **kwargs)
        except OSError as error:
            return str(error)
        return ""

    return message_of


@_return_error
def begin(run: str, iteration: int) -> None:
    """Make the folder into which the ranks of this host write a checkpoint.

    It is an error if the run's path leads to a folder of another user, or to a folder to which other users can write.
    The error is returned, not raised.
    """
    Path(run).mkdir(parents=True, exist_ok=True)
    private.check_folder(Path(run).resolve(), private.OTHERS_WRITE)
    checkpoint.begin(Path(run), iteration)


@_return_error
def name(partial: str) -> None:
    """Give the folder of a written checkpoint on this host its final name.

    `partial` is the path of the folder, into which the ranks of this host wrote their files. The checkpoint has no
    manifest yet. If the folder does not exist, nothing is done.
    """
    path = Path(partial)
    if path.exists():  # otherwise a host with the same disk was first
        checkpoint.finalize(path)


@_return_error
def keep(run: str, names: Sequence[str], newest: Mapping[str, bytes]) -> None:
    """Add the manifest to this host's newest checkpoint, and remove old checkpoints.

    `names` are the names of the checkpoints to keep, with the newest last. All other checkpoints are removed. `newest`
    maps the names of the manifest's files to their contents.
    """
    target = Path(run) / checkpoint.FOLDER / names[-1]
    for file, content in newest.items():
        partial = target / f".{file}"
        partial.write_bytes(content)
        checkpoint.sync_to_disk(partial)
        partial.rename(target / file)
    for old in checkpoint.list_up_to(target):
        if old.name not in names:
            shutil.rmtree(old, ignore_errors=True)


@_return_error
def forget(partial: str) -> None:
    shutil.rmtree(partial, ignore_errors=True)


@_return_error
def send(folder: str, url: str, names: Sequence[str]) -> None:
    urls.send(Path(folder), url, names)


def amiss(folder: str, files: Sequence[CheckpointFile]) -> dict[str, str]:
    """Return what is wrong with each of the files on this host, by file name.

    The value is "" for an intact file.
    """
    problems = {}
    for file in files:
        try:
            problems[file.name] = checkpoint.find_corruption(Path(folder) / file.name, file)
        except OSError as error:
            problems[file.name] = f"cannot be read: {error.strerror}"
    return problems


def listed(folder: str) -> list[CheckpointFile]:
    """List the files of a folder that has no manifest (such as an exported model)."""
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return [replace(checkpoint.file_entry(path, ()), name=str(path.relative_to(folder))) for path in files]


def piece(folder: str, name: str, offset: int) -> bytes:
    with (Path(folder) / name).open("rb") as file:
        file.seek(offset)
        return file.read(PIECE)


@_return_error
def take(folder: str, name: str, offset: int, content: bytes) -> None:
    """Write one piece of a file under a temporary name.

    Another host sends the file, piece by piece. `content` is written at `offset` bytes.
    """
    path = _partial(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("r+b" if offset else "wb") as file:
        file.seek(offset)
        file.write(content)


@_return_error
def whole(folder: str, file: CheckpointFile) -> None:
    """Give a file its final name, after another host has sent the file.

    It is an error if the file is not complete. The error is returned, not raised.
    """
    path = _partial(folder, file.name)
    if wrong := checkpoint.find_corruption(path, file):
        raise OSError(f"{file.name} came from another host and {wrong}")
    checkpoint.sync_to_disk(path)
    path.rename(Path(folder) / file.name)


def _partial(folder: str, name: str) -> Path:
    path = Path(folder) / name
    return path.with_name(f".{path.name}.partial")


ACTS: Mapping[str, Callable[..., object]] = {
    act.__name__: act for act in (begin, name, keep, forget, send, amiss, listed, piece, take, whole)
}
