"""Limits on the memory of a process.

Invariant: a limit is a number of bytes beyond the memory that the process already uses. If the system already limits
the process to less, the system's limit remains in effect.
"""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path


def data_bytes() -> int:
    """Return how many bytes of this process's memory count toward RLIMIT_DATA."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["VmData"].split()[0]) * 1024


def limit_data(more: int) -> None:
    """Limit this process to `more` bytes beyond the memory that it uses now.

    The limit applies until `unlimit_data` is called.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    with suppress(ValueError, OSError):  # a lower limit holds already
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + more, hard))


def unlimit_data() -> None:
    """Remove the limit that `limit_data` has set."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
