"""All passes, in the order in which they run.

Invariant: this is the only list of passes. The compiler runs the passes of this list. The search uses the same list to
evaluate combinations, and advice uses it to find out which changes make a plan fit.
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
    specs by name. The pass InsertResharding has an option `compare`, which gets the value of `compare`.
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
