"""Bounds on what a process may take.

Invariant: a bound counts from what the process has already, and a lower one that somebody has set stays.
"""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path


def data_bytes() -> int:
    """The bytes that this process has of what RLIMIT_DATA counts."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["VmData"].split()[0]) * 1024


def bound_data(more: int) -> None:
    """Let this process take `more` bytes than it has, until `unbound_data`."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    with suppress(ValueError, OSError):  # a lower limit holds already
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + more, hard))


def unbound_data() -> None:
    """Take back what `bound_data` did."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
