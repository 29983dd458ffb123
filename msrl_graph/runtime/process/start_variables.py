"""Environment variables with which the processes of a run start.

Invariant: this module imports nothing that takes long to import, since `msrl-run` imports this module before it reads a
program.
"""

from __future__ import annotations

import os
from functools import cache

MARK = "MSRL_RUN"  # in the environment of every process of a run: the run's temporary folder
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
    """Return the OpenMP variables with which a compute process must start.

    OpenMP reads these variables when torch is loaded. With these variables, a thread that waits for another thread
    releases its core after a short time. Returns {} if the user has set one of these variables.
    """
    return {} if WAITS.keys() & os.environ.keys() else WAITS


@cache
def own_ray() -> dict[str, str]:
    """Return the environment variables for a Ray that serves this machine alone.

    With these variables, Ray listens at the loopback address only. Ray also requires a random token, which only
    processes with these variables have. The variables also let idle Ray workers live longer, so that workers that Ray
    starts early can become actors. Ray settings that the user has made for other clusters do not apply.

    The variables must be set before Ray is imported. So a preload server starts with these variables, although it is
    not yet known which run will use the server.
    """
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": os.urandom(32).hex(), _ALONE: "0", **_IDLE}


__all__ = ["MARK", "OFFLINE", "PREFIX", "WAITS", "own_ray", "waits"]
