"""Protection of a process from forks and exits in the user's code that it calls.

Invariant: a call returns only in the process that began the call. If the user's code forks and the forked child returns
from the call, the child is ended immediately. So the child never answers instead of its parent. In a process that other
processes depend on, `os._exit` does not end the process; it raises an error in the call.
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
    """The error for a user's call that tried to end a process that other code needs."""

    def __init__(self, status: int) -> None:
        super().__init__(f"it ends its process with status {status}")
        self.status = status


@contextmanager
def guarded_call(process: int) -> Iterator[None]:
    """Context for a call of the user's code: only one process leaves the context.

    `process` is the id of the process that begins the call. A forked child that returns from the call is ended.
    """
    token = _guarded.set(process)
    try:
        yield
    finally:
        end_child(process)
        _guarded.reset(token)


def end_child(parent: int) -> None:
    """End this process if it is a forked child in which a guarded call has returned.

    `parent` is the id of the process that began the call. If this process is `parent`, the function does nothing. The
    exit status is 1 if the call raised an error. If the call used `sys.exit`, the exit status is the argument of
    `sys.exit`. In all other cases, the exit status is 0.
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
    """Replace `os._exit`, so that it raises ProcessExit inside a `guarded_call`.

    Only calls that this process guards are affected. In all other code, `os._exit` ends the process as usual.
    """
    leave = os._exit
    own = os.getpid()

    def leave_or_raise(status: int) -> NoReturn:
        if _guarded.get() == own == os.getpid():
            raise ProcessExit(status)
        leave(status)

    os._exit = leave_or_raise
