"""Guards for a process against the user's code that it calls: forks and exits.

Invariant: a call that one process began returns in that process only. A child that the code forked and that returns
from the call ends there, so it never answers instead of its parent. In a process that others depend on, `os._exit`
within a call is an error of that call.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NoReturn

_guarded: ContextVar[int] = ContextVar("process of the guarded call", default=0)  # its id; 0: no such call


class ProcessExit(BaseException):
    """The user's code tried to end the process that it shares with others."""

    def __init__(self, status: int) -> None:
        super().__init__(f"it ends its process with status {status}")
        self.status = status


@contextmanager
def guarded_call(process: int) -> Iterator[None]:
    """Mark a call of the user's code that the process of this id began."""
    token = _guarded.set(process)
    try:
        yield
    finally:
        end_child(process)
        _guarded.reset(token)


def end_child(parent: int) -> None:
    """End this process if it is not `parent`, but a child that returned from the call.

    The exit status is that of a program: 1 if the call raised an error, the argument of `sys.exit`, else 0.
    """
    if os.getpid() == parent:
        return
    error = sys.exc_info()[1]
    status = 0
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        status = 1
        traceback.print_exception(error)
    print(f"a forked child of process {parent} returned from the call that forked it and was ended", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def guard_exit() -> None:
    """Make `os._exit` within a `call_of` this process raise ProcessExit."""
    leave = os._exit
    own = os.getpid()

    def leave_or_raise(status: int) -> NoReturn:
        if _guarded.get() == own == os.getpid():
            raise ProcessExit(status)
        leave(status)

    os._exit = leave_or_raise
