"""The timeline of a simulated iteration, for the HTML page of a plan.

In the simulation, every row has the greatest length that its columns allow.

Invariant: data-parallel groups that do the same work in the same interval are one interval of the timeline. So 10,000
devices need no more space than 16 devices.
"""

from __future__ import annotations

from collections import Counter

from ..analysis.async_schedule import lead_of_pools
from ..backends import ENGINES
from ..emit.html import BusyInterval, Timeline
from ..ir.plan import Plan
from .assumptions import read_specs
from .run import Simulator

# With staleness and partial rollout the first iterations fill the pipeline, and iterations overlap.
SHOWN = 3
AFTER = 2


def timeline(plan: Plan) -> Timeline:
    """Return the timeline of one simulated iteration of a plan.

    If iterations do not overlap, the iteration is the first one. If iterations overlap, it is a later one, because the
    first iterations only fill the pipeline.
    """
    overlap = bool(lead_of_pools(plan)) or any(node.cuts for node in plan.graph.verb("generate"))
    simulation = Simulator(plan, ENGINES, read_specs(plan, (), "", {}, plan.deploy.run.seed)).run(
        SHOWN + 1 + AFTER if overlap else 1
    )
    shown = simulation.iterations[SHOWN if overlap else 0]
    widths: Counter[tuple[str, str, float, float]] = Counter()
    for span in simulation.spans:
        begin = max(span.begin, shown.begin)
        end = min(span.end, shown.end)
        if begin < end:
            widths[span.pool, span.name, begin - shown.begin, end - shown.begin] += span.width
    stretches = tuple(
        BusyInterval(*place, width / simulation.sizes[place[0]])
        for place, width in sorted(widths.items(), key=lambda entry: (entry[0][2], entry[0]))
    )
    about = f"iteration {shown.number}, which overlaps with others" if overlap else "simulated"
    return Timeline(shown.seconds, stretches, f"{about}, every row at its bound")
