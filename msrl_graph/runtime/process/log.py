"""The log files of a run's processes.

Invariant: all output of a process goes to one file in the run's folder, whichever code prints it. A line that Python
prints begins with the time, the process and the node that the process currently executes, so that the files of all
processes can be merged.
"""

from __future__ import annotations

import io
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from ...diagnostics.terminal_text import make_printable
from ...files import private


class PrefixedStream(io.TextIOBase):
    """A text stream that writes a prefix before each line.

    The prefix has the time, the name of the process and the node that the process currently executes (`node`).
    """

    def __init__(self, descriptor: int, process: str) -> None:
        self.descriptor = descriptor
        self.process = process
        self.node = ""
        self.open = False  # whether the current line has begun

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        line_prefix = make_printable(" ".join((time.strftime("%H:%M:%S"), self.process, self.node)).rstrip()) + " | "
        pieces = [
            _shown(piece) if self.open and index == 0 else line_prefix + _shown(piece)
            for index, piece in enumerate(text.splitlines(keepends=True))
        ]
        self.open = (self.open and not text) or (bool(text) and not text.endswith("\n"))
        with suppress(OSError):  # a full disk costs lines, not a run
            os.write(self.descriptor, "".join(pieces).encode("utf-8", "replace"))
        return len(text)

    def fileno(self) -> int:
        return self.descriptor


def _shown(line: str) -> str:
    """Return a line without the control characters that could harm a terminal.

    The line break at the end is not removed.
    """
    text = line.rstrip("\r\n")
    return make_printable(text) + line[len(text) :]


_streams: list[PrefixedStream] = []
_file = ""


def redirect_output(path: str, process: str) -> None:
    """Send all output of this process to the file `path` instead of Ray's log files.

    If the file cannot be opened, the output remains in Ray's log files. `process` is the name in the prefix of each
    line.
    """
    global _file
    with suppress(OSError):  # a full disk, or a host that does not see the folder: output stays in Ray's files
        folder = Path(path).parent
        folder.mkdir(parents=True, exist_ok=True)
        _append_to(folder, Path(path).name)
        _streams[:] = [PrefixedStream(1, process), PrefixedStream(2, process)]
        sys.stdout, sys.stderr = _streams
        _file = Path(path).name


def _append_to(folder: Path, name: str) -> None:
    """Append all output of this process to the file `name` in `folder`.

    Raises OSError if other users can write to the folder, or if the file is a link. The check is needed because some
    hosts cannot see the run's folder. On such a host, another user's folder may be at the same path.
    """
    folder_handle = private.open_folder(folder, private.OTHERS_WRITE)
    try:
        file = os.open(
            name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=folder_handle
        )
    finally:
        os.close(folder_handle)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def share_file(name: str, process: str) -> None:
    """Send the output of this process to the log file of its parent process.

    The parent process has already opened the file. `name` is the name of the file. `process` is the name in the prefix
    of each line.
    """
    global _file
    _streams[:] = [PrefixedStream(1, process), PrefixedStream(2, process)]
    sys.stdout, sys.stderr = _streams
    _file = name


def set_node(node: str) -> None:
    """Set the node that the prefix shows for the lines that this process prints next."""
    for lines in _streams:
        lines.node = node


def file_name() -> str:
    """Return the name of this process's log file; "" if the process has none."""
    return _file


def log_details(*text: str) -> None:
    """Write a text to this process's log file, as details of an error.

    The text is too long for the error's message. If the process has no log file, nothing is written.
    """
    if _file:
        print("\n".join(part.rstrip("\n") for part in text), file=sys.stderr, flush=True)
