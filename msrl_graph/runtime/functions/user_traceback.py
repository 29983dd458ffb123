"""Error messages for failures in a user's Python code.

Invariant: the first line of a message has the node, the node's line in the program, the row, and the place of the error
in the user's own file. The following lines show the call stack and the arguments, shortened to fit a screen. The log of
the process has the full text.
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...data.characters import escape_half_characters
from ...ir.attributes import place_of_call
from ...ir.graph import Node
from ..process import log
from .crash_journal import ProcessDied

MAX_SHOWN = 200  # characters of a value that the message shows
MAX_FRAMES = 8  # frames that the message shows: for a longer stack, the first and the last frames
MAX_LOGGED = 1_000_000  # characters of a value that the log shows

_HERE, _OURS = (str(folder) + os.sep for folder in Path(__file__).parents[1:3])
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class BadResult(ValueError):
    """A function returned a value that the node's columns cannot hold.

    The message names no line of the user's file, because the error is the returned value. `row` is set if the function
    returned values for several rows and the value of this row is wrong.
    """

    row: int | None = None


@dataclass(frozen=True)
class ErrorSummary:
    """The description of an error, for processes that do not have the error object.

    - `reason`: the error in one line.
    - `steps`: the call stack of the user's code at the error, with one line for each frame.
    - `traceback`: Python's full traceback.
    """

    reason: str
    steps: tuple[str, ...] = ()
    traceback: str = ""

    @classmethod
    def from_error(cls, error: BaseException) -> ErrorSummary:
        return cls(
            describe_reason(error),
            tuple(describe_steps(error)),
            escape_half_characters("".join(traceback.format_exception(error))),
        )


def describe_failure(
    node: Node, error: BaseException | ErrorSummary, where: str, given: Iterable[tuple[str, Any]] = ()
) -> str:
    """Return the message for a failed call of a node's Python code.

    `where` names the row or the unit in words. `given` has a (parameter, value) pair for each argument of the call. The
    full text, with the whole traceback, is written to the log of this process.
    """
    summary = error if isinstance(error, ErrorSummary) else ErrorSummary.from_error(error)
    headline = f"`{node.name}` ({place_of_call(node)}) failed on {where}: {summary.reason}"
    values = list(given)
    log.log_details(
        headline,
        summary.traceback,
        *(f"{name}: {shorten_line(repr(argument), MAX_LOGGED)}\n" for name, argument in values),
    )
    lines = [*summary.steps, *(f"{name}: {shorten_value(value)}" for name, value in values)]
    if log.file_name():
        lines.append(f"all of it is in logs/{log.file_name()}")
    return escape_half_characters("\n  ".join([headline, *lines]))


def describe_reason(error: BaseException) -> str:
    """Describe an error in one line.

    The line has the type of the error, the first line of its message, and the innermost line of the user's own code in
    the traceback. A BadResult has no such line of code.
    """
    lines = escape_half_characters(str(error)).splitlines()
    headline = f"{type(error).__name__}: {lines[0] if lines else ''}{' …' if len(lines) > 1 else ''}"
    frames = _user_frames(error)
    return (
        headline
        if isinstance(error, BadResult) or not frames
        else f"{headline}, at {frames[-1].filename}:{frames[-1].lineno}"
    )


def describe_steps(error: BaseException) -> list[str]:
    """Describe the call stack of the user's code at an error, with one line per frame.

    Returns an empty list for a BadResult: the function returned normally, but its value was wrong. The middle of a
    long stack is left out.
    """
    lines = [
        f"{frame.filename}:{frame.lineno} in {frame.name}: {shorten_line(frame.line or '', MAX_SHOWN)}"
        for frame in _user_frames(error)
    ]
    if isinstance(error, BadResult) or not lines:
        return []
    half = MAX_FRAMES // 2
    return lines if len(lines) <= MAX_FRAMES else [*lines[:half], f"… {len(lines) - 2 * half} more", *lines[-half:]]


def shorten_value(value: Any) -> str:
    """Shorten a value for a message.

    A text is quoted. A list is shown by its size and its first item.
    """
    if isinstance(value, str):
        return repr(value) if len(value) <= MAX_SHOWN else f"{value[:MAX_SHOWN]!r}… ({len(value)} characters)"
    if isinstance(value, np.ndarray):
        kind = f"{value.dtype} of {'x'.join(map(str, value.shape))}"
        return shorten_line(
            f"{kind}: {' '.join(np.array2string(value, threshold=20, separator=', ').split())}", MAX_SHOWN
        )
    if isinstance(value, list):
        return f"list of {len(value)}" + (f", the first is {shorten_value(value[0])}" if value else "")
    return shorten_line(repr(value.item() if isinstance(value, np.generic) else value), MAX_SHOWN)


def shorten_line(text: str, limit: int) -> str:
    """Put a text on one line and cut it to `limit` characters."""
    line = " ".join(text.split("\n"))
    return line if len(line) <= limit else f"{line[:limit]}…"


def _user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of an error's traceback that are in the user's own code.

    If no frame is in the user's own code, the result is the last frame in a library. If no frame is in a library
    either, a function of msrl_graph failed, and the result is the last frame.
    """
    all_frames: list[traceback.FrameSummary] = list(traceback.extract_tb(error.__traceback__))
    if isinstance(error, ProcessDied):  # the frames begin with the process; keep those after the ones of this folder
        package_frames = [index for index, frame in enumerate(error.frames) if frame.filename.startswith(_HERE)]
        all_frames = error.frames[package_frames[-1] if package_frames else 0 :]
    frames = [frame for frame in all_frames if not frame.filename.startswith("<frozen ")]
    user_frames = [frame for frame in frames if not frame.filename.startswith(_OURS)]
    return (
        [frame for frame in user_frames if not frame.filename.startswith(_LIBRARIES)] or user_frames[-1:] or frames[-1:]
    )


__all__ = ["BadResult", "ErrorSummary", "describe_failure", "describe_reason", "describe_steps", "shorten_value"]
