"""Choice of the runs that fork their ranks from a preloaded process.

Invariant: a forked process computes the same as one that Ray started. Packages that read the environment at import find
the same variables as in a rank.
"""

from __future__ import annotations

import os
from pathlib import Path

from ...backends import ENGINES
from ...ir.plan import Plan
from ..process.environment import OFFLINE, openmp_variables
from ..process.preload import PreloadServer
from .attempt_messages import Attempt

RANK = "msrl_graph.runtime.rank.rank"


def start(attempt: Attempt) -> PreloadServer | None:
    """Start the server that a run's processes are forked from.

    Runs on the cores of this machine have one. The servers of an existing cluster start its workers themselves. For
    other devices, no one has tried yet whether their packages can be imported before a fork.
    """
    if os.environ.get("RAY_ADDRESS") or not attempt.plan.cluster.device.kind.is_host:
        return None
    environment = OFFLINE | openmp_variables() | {"TMPDIR": attempt.folder}
    return PreloadServer(Path(attempt.folder), modules(attempt.plan), environment)


def modules(plan: Plan) -> list[str]:
    """Return the modules that the ranks of a plan import, in their order."""
    engines = {ENGINES[p.engine.name].build.partition(":")[0] for p in plan.placements if p.engine.name in ENGINES}
    families = {model.family for model in plan.deploy.models.values()}
    models = [f"transformers.models.{family}.modeling_{family}" for family in sorted(families)]
    return [RANK, *sorted(engines - {""}), *models]
