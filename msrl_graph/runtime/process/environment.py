"""What a process of a run finds around it: its environment, its temporary folder, its log."""

from __future__ import annotations

import faulthandler
import os
import tempfile
from pathlib import Path

from . import fork_setup, log, shipped_files
from .heartbeat import Heart, Limits

# How often a thread of OpenMP looks for more work before it leaves its core: for as long as it is from one operator to
# the next. Others want the core: the run's own processes, and other programs. OpenMPs other than GNU's have the policy.
WAITS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000"}


def waits() -> dict[str, str]:
    """The environment in which a process that computes must begin, since OpenMP reads it as torch is loaded: threads
    that wait for each other soon leave their cores. What the user has set stays."""
    return {} if WAITS.keys() & os.environ.keys() else WAITS


def settle(folder: str, logs: str, process: str, deadline: float = 0.0) -> None:
    """Sets up this process's environment; here and not by Ray's runtime_env, which starts an agent and takes seconds.

    Temporary files go to the run's `folder` on this host, since torch leaves a cache folder behind; what was shipped
    lies there. What is printed goes to a file in `logs`. With the dock's `deadline` the process has a heart.
    """
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    if deadline:
        Heart(folder, process, Limits.of(deadline))
    fork_setup.release_children()
    shipped_files.use(folder)
    log.divert(str(Path(logs) / f"{process.replace(' ', '-')}.log"), process)
    faulthandler.enable(all_threads=False)  # where the code of a user or of an engine dies of a signal, the log says it
