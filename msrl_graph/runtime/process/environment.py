"""The environment of a run's process: variables, temporary folder, log."""

from __future__ import annotations

import faulthandler
import os
import tempfile
from pathlib import Path

from . import fork_setup, log, shipped_files
from .heartbeat import Heart, Limits
from .start_variables import OFFLINE


def set_up_process(folder: str, logs: str, process: str, deadline: float = 0.0) -> None:
    """Set up this process's environment.

    Ray's runtime_env is not used: it starts an agent and takes seconds. Temporary files go to the run's `folder` on
    this host, since torch leaves a cache folder behind; shipped files are there too. Output goes to a file in `logs`.
    With the dock's `deadline` the process has a heartbeat.
    """
    os.environ |= OFFLINE
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    if deadline:
        Heart(folder, process, Limits.for_deadline(deadline))
    fork_setup.release_children()
    shipped_files.use_folder(folder)
    log.redirect_output(str(Path(logs) / f"{process.replace(' ', '-')}.log"), process)
    faulthandler.enable(all_threads=False)  # the log then shows where user or engine code died of a signal
