"""What is told where a user's Python fails.

Invariant: the first line has the node, its line in the program, the row and the place in the user's own file; the lines
after it how the code got there and what it was given, cut to what fits a screen. The log of the process has all of it.
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

from ...data.characters import escaped
from ...ir.attributes import place_of_call
from ...ir.graph import Node
from ..process import log
from .crash_journal import ProcessDied

MOST = 200  # characters of a value that the message shows
FRAMES = 8  # that the message shows, of a recursion the first and the last
LOGGED = 1_000_000  # characters of a value that the log holds

_HERE, _OURS = (str(folder) + os.sep for folder in Path(__file__).parents[1:3])
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class BadResult(ValueError):
    """A function returned what its columns cannot hold. It has no place in a file: what was returned is what is
    wrong. `row`: of a value for one of several rows."""

    row: int | None = None


@dataclass(frozen=True)
class ErrorSummary:
    """What there is to tell of an error, for processes that do not have it: the `reason` in a line, the `steps` that
    led there, and Python's `whole` traceback."""

    reason: str
    steps: tuple[str, ...] = ()
    whole: str = ""

    @classmethod
    def of(cls, error: BaseException) -> ErrorSummary:
        return cls(reason(error), tuple(steps(error)), escaped("".join(traceback.format_exception(error))))


def blame(node: Node, error: BaseException | ErrorSummary, where: str, given: Iterable[tuple[str, Any]] = ()) -> str:
    """What is told where a node's Python fails on what it was `given`, each with its parameter; the log of this process
    gets it in full."""
    told = error if isinstance(error, ErrorSummary) else ErrorSummary.of(error)
    head = f"`{node.name}` ({place_of_call(node)}) failed on {where}: {told.reason}"
    values = list(given)
    log.whole(head, told.whole, *(f"{name}: {cut(repr(v), LOGGED)}\n" for name, v in values))
    lines = [*told.steps, *(f"{name}: {shown(value)}" for name, value in values)]
    if log.file():
        lines.append(f"all of it is in logs/{log.file()}")
    return escaped("\n  ".join([head, *lines]))


def reason(error: BaseException) -> str:
    """An error in a line: its kind, the first line of what it says, and where a debugger would stop in the user's own
    code."""
    said = escaped(str(error)).splitlines()
    what = f"{type(error).__name__}: {said[0] if said else ''}{' …' if len(said) > 1 else ''}"
    found = _own(error)
    return what if isinstance(error, BadResult) or not found else f"{what}, at {found[-1].filename}:{found[-1].lineno}"


def steps(error: BaseException) -> list[str]:
    """How the user's code got to where it failed, a line for each of its frames; nothing where `reason` has told all of
    it."""
    found = [f"{f.filename}:{f.lineno} in {f.name}: {cut(f.line or '', MOST)}" for f in _own(error)]
    if isinstance(error, BadResult) or not found:
        return []
    half = FRAMES // 2
    return found if len(found) <= FRAMES else [*found[:half], f"… {len(found) - 2 * half} more", *found[-half:]]


def shown(value: Any) -> str:
    """A value as the message shows it: a text in quotes; of a list how many, and the first."""
    if isinstance(value, str):
        return repr(value) if len(value) <= MOST else f"{value[:MOST]!r}… ({len(value)} characters)"
    if isinstance(value, np.ndarray):
        kind = f"{value.dtype} of {'x'.join(map(str, value.shape))}"
        return cut(f"{kind}: {' '.join(np.array2string(value, threshold=20, separator=', ').split())}", MOST)
    if isinstance(value, list):
        return f"list of {len(value)}" + (f", the first is {shown(value[0])}" if value else "")
    return cut(repr(value.item() if isinstance(value, np.generic) else value), MOST)


def cut(text: str, most: int) -> str:
    """A text on one line, of so many characters at most."""
    line = " ".join(text.split("\n"))
    return line if len(line) <= most else f"{line[:most]}…"


def _own(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of the user's code; where there are none, the last of all: a function of the package fails."""
    found: list[traceback.FrameSummary] = list(traceback.extract_tb(error.__traceback__))
    if isinstance(
        error, ProcessDied
    ):  # from where the process began: what is of interest begins with what this folder called
        here = [i for i, f in enumerate(error.frames) if f.filename.startswith(_HERE)]
        found = error.frames[here[-1] if here else 0 :]
    frames = [f for f in found if not f.filename.startswith("<frozen ")]
    theirs = [f for f in frames if not f.filename.startswith(_OURS)]
    return [f for f in theirs if not f.filename.startswith(_LIBRARIES)] or theirs[-1:] or frames[-1:]


__all__ = ["BadResult", "ErrorSummary", "blame", "reason", "shown", "steps"]
