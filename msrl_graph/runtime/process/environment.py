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
    """Set the environment variables, temporary folder, log and heartbeat of a process.

    - `folder`: the run's temporary folder on this host. This folder contains the files that were shipped to this host.
      Temporary files of the process are also written into this folder, so they are removed when the run ends. For
      example, the cache folder that torch leaves behind is in this folder.
    - `logs`: the folder of log files. The output of the process goes to a file in this folder. The file is named after
      `process`.
    - `process`: the name of the process.
    - `deadline`: the number of seconds for which the dock lets a process wait without progress. If it is 0, the process
      has no heartbeat.

    Ray's runtime_env is not used. For a runtime_env, Ray would start an agent, which takes seconds.
    """
    os.environ |= OFFLINE
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    if deadline:
        Heart(folder, process, Limits.for_deadline(deadline))
    fork_setup.release_children()
    shipped_files.use_folder(folder)
    log.redirect_output(str(Path(logs) / f"{process.replace(' ', '-')}.log"), process)
    faulthandler.enable(all_threads=False)  # the log then shows where user or engine code died of a signal
