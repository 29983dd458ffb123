"""Limits on the memory of a process.

Invariant: a limit is added to the memory that the process already uses. A lower limit that was set by someone else
remains in effect.
"""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path


def data_bytes() -> int:
    """Return the bytes of this process that RLIMIT_DATA counts."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["VmData"].split()[0]) * 1024


def limit_data(more: int) -> None:
    """Limit this process to `more` bytes in addition to what it uses.

    The limit ends with `unlimit_data`.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    with suppress(ValueError, OSError):  # a lower limit holds already
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + more, hard))


def unlimit_data() -> None:
    """Remove the limit that `limit_data` has set."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
