"""A lock that makes `ast.parse` safe to call from several threads.

Invariant: one thread at a time is in `ast.parse`. Before 3.11.8 Python counts the depth of all threads' trees in one
number (gh-106905), so two threads that parse at the same time can get a SystemError. Imports are enough for that: NumPy
and torch parse while they are imported, and they import some of their modules on first use. The error then appeared in
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
    """Let threads call `ast.parse` one at a time.

    This holds for this process and its forked children.
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
    # The fork happens while this thread holds the lock, so the child never inherits another thread's.
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


__all__ = ["FIXED_IN", "serialize_parsing"]
