"""Named points in the work of each process, at which `bench/chaos.py` and tests kill it.

Invariant: nothing happens unless MSRL_POINTS names a folder. There the file `seen` gets a line for each point that is
reached, and a process that reaches a point of which there is a file (`file`) removes it and kills itself: each such
file is one death, of one process.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

_FOLDER = os.environ.get("MSRL_POINTS", "")


def reach(process: str, what: str) -> None:
    """A process gets to a point of its work."""
    if _FOLDER:
        with Path(_FOLDER, "seen").open("a", encoding="utf-8") as seen:
            seen.write(f"{process}: {what}\n")
        try:
            file(_FOLDER, process, what).unlink()
        except FileNotFoundError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


def file(folder: Path | str, process: str, what: str) -> Path:
    """The file that stands for the death of a process at a point."""
    return Path(folder, f"{process}: {what}".replace("/", "-"))
