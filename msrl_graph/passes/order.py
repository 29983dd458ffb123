"""All passes, in their order.

Invariant: this is the only list. The compiler runs it, the search evaluates combinations with it, and advice uses it to
find out what fits.
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
    """Return all passes.

    `place` is the pass that places nodes: the search, or a pass that follows a given decision. `engines` are the specs
    by name; `compare` is passed to InsertResharding.
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
