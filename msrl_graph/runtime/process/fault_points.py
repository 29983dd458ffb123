"""Named points in each process's work where tests kill or stop it.

`bench/chaos.py` uses them too.

Invariant: nothing happens unless MSRL_POINTS is a folder. Its file `seen` gets a line for each point that is reached. A
process that reaches a point with a file (`file`) removes the file and kills itself, or stops itself if the file says
STOP: each such file is one fault of one process.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

STOP = "stop"
_FOLDER = os.environ.get("MSRL_POINTS", "")


def reach(process: str, point: str) -> None:
    """Report that a process reached a point of its work."""
    if _FOLDER:
        with Path(_FOLDER, "seen").open("a", encoding="utf-8") as seen:
            seen.write(f"{process}: {point}\n")
        fault = fault_file(_FOLDER, process, point)
        try:
            action = fault.read_text(encoding="utf-8")
            fault.unlink()
        except FileNotFoundError:
            return
        os.kill(os.getpid(), signal.SIGSTOP if action == STOP else signal.SIGKILL)


def fault_file(folder: Path | str, process: str, point: str) -> Path:
    """Return the file that makes a process die at a point."""
    return Path(folder, f"{process}: {point}".replace("/", "-"))
