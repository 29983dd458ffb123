"""All passes, in the order in which they run.

Invariant: this is the only list of passes. The compiler runs the passes of this list. The search evaluates combinations
with the same passes. Advice is also based on these passes: they show which changes make a plan fit.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..backends.spec import EngineSpec
from .dock import InsertDock
from .environment import PrepareEnvironments
from .estimate import EstimateTime
from .memory import CountMemory
from .reshard import InsertResharding
from .schedule import BuildSchedule
from .spec import Pass, Passes
from .traffic import CountTraffic


def passes(place: Pass, engines: Mapping[str, EngineSpec], compare: bool = True) -> Passes:
    """Return all passes of the compiler, in order.

    `place` is the pass that places nodes: the search, or a pass that follows a given decision. `engines` are the engine
    specs by name. `compare` is an option of the pass InsertResharding.
    """
    return Passes(
        (
            place,
            InsertDock(engines),
            InsertResharding(engines, compare),
            BuildSchedule(),
            CountTraffic(),
            CountMemory(engines),
            EstimateTime(engines),
            PrepareEnvironments(engines),
        )
    )
