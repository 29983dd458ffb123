"""What the processes of a run print, by whatever code.

Invariant: each process has one file in the run's folder; a line that Python prints begins with the time, the process
and the node at work, so that the files of all processes can be laid together.
"""

from __future__ import annotations

import io
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from ...diagnostics.terminal_text import shown
from ...files import private


class PrefixedStream(io.TextIOBase):
    """A text stream that puts a head before each line. `node` is the node at work."""

    def __init__(self, descriptor: int, process: str) -> None:
        self.descriptor = descriptor
        self.process = process
        self.node = ""
        self.open = False  # a line is begun

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        head = shown(" ".join((time.strftime("%H:%M:%S"), self.process, self.node)).rstrip()) + " | "
        pieces = [
            _shown(piece) if self.open and i == 0 else head + _shown(piece)
            for i, piece in enumerate(text.splitlines(keepends=True))
        ]
        self.open = (self.open and not text) or (bool(text) and not text.endswith("\n"))
        with suppress(OSError):  # a full disk costs lines, not a run
            os.write(self.descriptor, "".join(pieces).encode("utf-8", "replace"))
        return len(text)

    def fileno(self) -> int:
        return self.descriptor


def _shown(line: str) -> str:
    """As it may be shown by who reads the log; its end stays."""
    text = line.rstrip("\r\n")
    return shown(text) + line[len(text) :]


_here: list[PrefixedStream] = []
_file = ""


def divert(path: str, process: str) -> None:
    """Sends all that this process prints to a file, instead of where Ray puts it."""
    global _file
    with suppress(OSError):  # a full disk, or a host that does not see the folder: Ray's own files remain
        folder = Path(path).parent
        folder.mkdir(parents=True, exist_ok=True)
        _append_to(folder, Path(path).name)
        _here[:] = [PrefixedStream(1, process), PrefixedStream(2, process)]
        sys.stdout, sys.stderr = _here
        _file = Path(path).name


def _append_to(folder: Path, name: str) -> None:
    """Send what this process prints to a file. OSError if others can write to its folder, or if it is a link.

    On a host that does not see the run's folder, another one may lie at its path, and be anybody's.
    """
    at = private.open_folder(folder, private.OTHERS_WRITE)
    try:
        file = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=at)
    finally:
        os.close(at)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def share(name: str, process: str) -> None:
    """This process prints into the file of that name, which the one that started it has open."""
    global _file
    _here[:] = [PrefixedStream(1, process), PrefixedStream(2, process)]
    sys.stdout, sys.stderr = _here
    _file = name


def at(node: str) -> None:
    """The lines to come are of this node."""
    for lines in _here:
        lines.node = node


def file() -> str:
    """The name of this process's file; empty where it has none."""
    return _file


def whole(*text: str) -> None:
    """Keeps in this process's file what a message has no room for."""
    if _file:
        print("\n".join(part.rstrip("\n") for part in text), file=sys.stderr, flush=True)
