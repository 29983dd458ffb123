"""The surface on which diagnostics are shown: a command line, or Python.

The name of an option depends on the surface: `--resume DIR` is a flag of a command, and `resume=DIR` is an argument in
Python.

Invariant: only the outermost entry point chooses the surface: a command, or a function of the Python API. All other
code names options with `name_option`, and does not know the surface.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

Surface = Literal["command line", "Python"]
_chosen: ContextVar[Surface | None] = ContextVar("surface", default=None)


@contextmanager
def show_on(surface: Surface) -> Iterator[None]:
    """Choose the surface for the duration of a block, unless a caller has chosen one."""
    token = _chosen.set(_chosen.get() or surface)
    try:
        yield
    finally:
        _chosen.reset(token)


def current_surface() -> Surface:
    return _chosen.get() or "command line"


def by_surface(*, command_line: str, python: str) -> str:
    """Return the text for the current surface."""
    return command_line if current_surface() == "command line" else python


def name_option(name: str, value: object = None) -> str:
    """Name an option of a command or of a function, with or without a value.

    `name` is the name of the argument in Python. `value` is True for an option without a value that is switched on.
    """
    flag = f"--{name.replace('_', '-')}"
    if value is None:
        return by_surface(command_line=flag, python=f"`{name}`")
    if value is True:
        return by_surface(command_line=flag, python=f"`{name}=True`")
    return by_surface(command_line=f"{flag} {value}", python=f"{name}={value}")
