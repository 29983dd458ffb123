"""Environment variables that the processes of a run start with.

Invariant: this module imports nothing heavy, since `msrl-run` needs it before it reads a program.
"""

from __future__ import annotations

import os
from functools import cache

MARK = "MSRL_RUN"  # in the environment of every process of a run: its temporary folder
PREFIX = "msrl-run-"  # short: Ray's sockets are in the folder, and their paths are limited to 107 bytes

# How often a thread of OpenMP looks for more work before it releases its core: about the time from one operator to the
# next. The run's other processes and other programs need the core. OpenMP libraries other than GNU's use the policy.
WAITS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000"}

# What packages read as they are imported.
OFFLINE = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}

# Ray starts a worker for each core before there are actors, and would end those that are idle for a second.
_IDLE = {"RAY_idle_worker_killing_time_threshold_ms": "60000"}
# Ray reads it at import: with "0" its servers and workers listen at the loopback only, on any system.
_ALONE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def waits() -> dict[str, str]:
    """Return the variables that a computing process must start with.

    OpenMP reads them when torch is loaded. With them, threads that wait for each other soon release their cores.
    Settings of the user stay.
    """
    return {} if WAITS.keys() & os.environ.keys() else WAITS


@cache
def own_ray() -> dict[str, str]:
    """Return the environment of a process that starts Ray for this machine alone.

    Ray then listens at the loopback only, and requires a token that no other process has. Both must be set before Ray
    is imported, so a preload server has them before it knows its run. Workers that Ray starts early become actors. What
    the caller has set for other clusters does not apply to this one.
    """
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": os.urandom(32).hex(), _ALONE: "0", **_IDLE}


__all__ = ["MARK", "OFFLINE", "PREFIX", "WAITS", "own_ray", "waits"]
