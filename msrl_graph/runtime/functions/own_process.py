"""Guards of a process against forks and exits in the user's code that it calls.

Invariant: a call returns only in the process that began the call. If the user's code forks and the child returns from
the call, the child is ended at this point, so it never answers instead of its parent. In a process that other processes
depend on, `os._exit` within a call is an error of the call.
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
    """The error that a user's code tried to end a process that other code uses."""

    def __init__(self, status: int) -> None:
        super().__init__(f"it ends its process with status {status}")
        self.status = status


@contextmanager
def guarded_call(process: int) -> Iterator[None]:
    """Mark a call of the user's code, so that it returns only in one process.

    `process` is the id of the process that begins the call. A forked child that returns from the call is ended.
    """
    token = _guarded.set(process)
    try:
        yield
    finally:
        end_child(process)
        _guarded.reset(token)


def end_child(parent: int) -> None:
    """End this process if it is a forked child of `parent` that returned from a call.

    The exit status is 1 if the call raised an error, the argument of `sys.exit` if the call used it, and 0 in all other
    cases.
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
    """Make `os._exit` within a `guarded_call` of this process raise ProcessExit."""
    leave = os._exit
    own = os.getpid()

    def leave_or_raise(status: int) -> NoReturn:
        if _guarded.get() == own == os.getpid():
            raise ProcessExit(status)
        leave(status)

    os._exit = leave_or_raise
