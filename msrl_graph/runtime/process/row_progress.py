"""Progress reports: how many rows of a process's work are computed.

A report is passed to the *listener*, a function that the process has set with `listen`. The listener writes the report
to a place where the dock of the host reads the report.

Invariant: a report needs no message and no system call, and results never depend on a report. Without a listener, a
report has no effect.
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
    """Report that `rows` of the `of` rows of this process's current work are computed.

    `where` is a text with more detail, for example which turn of an episode is computed.
    """
    if _listener is not None:
        _listener(rows, of, where)
