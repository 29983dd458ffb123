"""Progress reports: how many rows of its share this process has computed.

Invariant: a report needs no message and no system call, and results never depend on it. The listener of this process
writes the report where the dock of the host reads it. Without a listener, a report has no effect.
"""

from __future__ import annotations

from collections.abc import Callable

Listen = Callable[[int, int, str], None]
_listener: Listen | None = None


def listen(listener: Listen) -> None:
    """Send all later reports to `listener` instead of the previous listener."""
    global _listener
    _listener = listener


def report(rows: int, of: int, where: str = "") -> None:
    """Report that `rows` of the `of` present rows are computed.

    `where` is a text with more detail, such as the turn of an episode.
    """
    if _listener is not None:
        _listener(rows, of, where)
