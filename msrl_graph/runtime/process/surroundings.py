"""What a process of a run finds around it: its environment, its temporary folder, its log."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from . import log


def settle(folder: str, logs: str, process: str) -> None:
    """Sets up this process's environment; here and not by Ray's runtime_env, which starts an agent and takes seconds.

    Temporary files go to the run's `folder` (empty: stay where they are), since torch leaves a cache folder behind;
    what is printed goes to a file in `logs`.
    """
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
    log.divert(str(Path(logs) / f"{process.replace(' ', '-')}.log"), process)
