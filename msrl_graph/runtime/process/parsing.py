"""Python's own parser in a process of several threads.

Invariant: one thread at a time is in `ast.parse`. Before 3.11.8 Python counts the depth of all threads' trees in one
number (gh-106905), so that one of two threads that parse at once gets a SystemError, and a rank or a function of the
user's failed of an import in another thread: NumPy and torch parse as they are imported, and import some of their
modules when these are first used.
"""

from __future__ import annotations

import ast
import os
import sys
import threading
from functools import wraps
from typing import Any

MENDED = (3, 11, 8)


def one_at_a_time() -> None:
    """From now on threads of this process, and of those that it forks, wait for each other to parse."""
    if sys.version_info >= MENDED or hasattr(ast.parse, "__wrapped__"):
        return
    parse, lock = ast.parse, threading.RLock()

    @wraps(parse)
    def alone(*args: Any, **named: Any) -> Any:
        with lock:
            return parse(*args, **named)

    ast.parse = alone
    # A process that is forked has the lock as it is then: nobody else's.
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


__all__ = ["MENDED", "one_at_a_time"]
