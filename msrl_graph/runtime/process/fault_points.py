"""Named points in a process's work at which tests kill or stop the process.

`bench/chaos.py` uses these points, too.

Invariant: a point has no effect unless the environment variable MSRL_POINTS names a folder. In this folder, the file
`seen` gets one line for each point that a process reaches. A test causes a fault by writing the file whose path
`fault_file` returns. The process that reaches the point removes that file. The process then kills itself with SIGKILL,
or, if the file contains the text `stop`, stops itself with SIGSTOP. So each file causes one fault of one process.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

STOP = "stop"
_FOLDER = os.environ.get("MSRL_POINTS", "")


def reach(process: str, point: str) -> None:
    """Record that a process reached a point; cause the fault requested for this point.

    A test requests a fault by writing the file whose path `fault_file` returns. Without this file, there is no fault.
    """
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
    """Return the path of the file that makes a process fail at a point."""
    return Path(folder, f"{process}: {point}".replace("/", "-"))
