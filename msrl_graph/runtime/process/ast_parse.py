"""A lock that makes `ast.parse` safe to call from several threads.

Invariant: with Python before 3.11.8, at most one thread of a process executes `ast.parse` at a time. These versions of
Python count the depth of the syntax trees of all threads in one shared number (gh-106905). Two threads that parse at
the same time can therefore get a SystemError. Ordinary imports are enough to cause the error: NumPy and torch parse
code while they are imported, and they import some of their modules on first use. Without the lock, the error appears in
a rank or in a user's function.
"""

from __future__ import annotations

import ast
import os
import sys
import threading
from functools import wraps
from typing import Any

FIXED_IN = (3, 11, 8)


def serialize_parsing() -> None:
    """Make the threads of this process call `ast.parse` one at a time.

    The lock also works in child processes that this process forks. With Python 3.11.8 or later, the function does
    nothing.
    """
    if sys.version_info >= FIXED_IN or hasattr(ast.parse, "__wrapped__"):
        return
    parse = ast.parse
    lock = threading.RLock()

    @wraps(parse)
    def locked_parse(*args: Any, **named: Any) -> Any:
        with lock:
            return parse(*args, **named)

    ast.parse = locked_parse
    # The fork happens while this thread holds the lock, so the child never inherits a lock that another thread holds.
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


__all__ = ["FIXED_IN", "serialize_parsing"]
