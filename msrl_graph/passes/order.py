"""All passes, in their order.

Invariant: this is the one list. The compiler goes through it, the search tries combinations by it, and advice looks by
it for what fits.
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
    """`place` is what places the nodes: the search, or what places them as it is told. `engines` are the specs by
    name; `compare` is Resharding's."""
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
