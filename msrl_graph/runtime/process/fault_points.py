"""Named points in the work of each process, at which `bench/chaos.py` and tests kill or stop it.

Invariant: nothing happens unless MSRL_POINTS names a folder. There the file `seen` gets a line for each point that is
reached, and a process that reaches a point of which there is a file (`file`) removes it and kills itself, or where the
file says STOP stops itself: each such file is one fault, of one process.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

STOP = "stop"
_FOLDER = os.environ.get("MSRL_POINTS", "")


def reach(process: str, what: str) -> None:
    """A process gets to a point of its work."""
    if _FOLDER:
        with Path(_FOLDER, "seen").open("a", encoding="utf-8") as seen:
            seen.write(f"{process}: {what}\n")
        fault = file(_FOLDER, process, what)
        try:
            how = fault.read_text(encoding="utf-8")
            fault.unlink()
        except FileNotFoundError:
            return
        os.kill(os.getpid(), signal.SIGSTOP if how == STOP else signal.SIGKILL)


def file(folder: Path | str, process: str, what: str) -> Path:
    """The file that stands for the death of a process at a point."""
    return Path(folder, f"{process}: {what}".replace("/", "-"))
