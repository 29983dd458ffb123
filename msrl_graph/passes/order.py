"""All passes, in the order in which they run.

Invariant: this is the only list of passes. The compiler runs the passes of this list. The search evaluates combinations
with the same passes. Advice is also based on these passes: they show which changes make a plan fit. The parts of a plan
are verified, shown and compared in this order.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..backends.spec import EngineSpec
from .dock import InsertDock
from .environment import PrepareEnvironments
from .estimate import EstimateTime
from .memory import CountMemory
from .place import PlacementPass
from .reshard import InsertResharding
from .schedule import BuildSchedule
from .spec import Pass, Passes
from .traffic import CountTraffic

ORDER: tuple[type[Pass], ...] = (
    PlacementPass,
    InsertDock,
    CountTraffic,
    InsertResharding,
    BuildSchedule,
    CountMemory,
    EstimateTime,
    PrepareEnvironments,
)


def passes(place: Pass, engines: Mapping[str, EngineSpec]) -> Passes:
    """Return all passes of the compiler, in order.

    `place` is the pass that places nodes: the search, or a pass that follows a given decision. `engines` are the engine
    specs by name.
    """
    return Passes((place, *(step(engines) for step in ORDER[1:])))
