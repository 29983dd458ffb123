"""What a run should have taken: the estimate once more, for the lengths of its rows and as this machine was measured.

Invariant: measured seconds go nowhere in; of a run only the lengths of its rows are used.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...backends import ENGINES
from ...cost.lengths import Rows
from ...hardware import calibration
from ...ir.plan import Estimate, Plan
from ...passes.estimate import EstimateTime
from ...passes.reshard import InsertResharding


def rows(plan: Plan, lines: Sequence[dict[str, Any]]) -> Rows | None:
    """The rows of an iteration, in medians over lines of the metrics; None where nothing is generated."""
    names = (
        "prompt_tokens",
        "response_tokens",
        "response_length_max",
        "distinct_prompt_tokens",
        "distinct_tokens",
        "distinct_rows",
    )
    if not plan.graph.verb("generate") or not all(name in line for name in names for line in lines):
        return None
    prompt, response, longest, beginnings, tokens, different = (
        statistics.median(line[name] for line in lines) for name in names
    )
    count = plan.graph.rows[-1]
    mean = (prompt + response) / count
    alike = (prompt - beginnings, response - tokens, count - different)
    return Rows(count, prompt, response, count * mean**2, prompt / count + longest, *alike)


def estimate(plan: Plan, lines: Sequence[dict[str, Any]]) -> Estimate | None:
    """What an iteration of a run takes, whose lines these are, where it ran on this machine."""
    plan = replace(plan, cluster=calibration.applied(plan.cluster)[0])
    return EstimateTime(ENGINES, rows(plan, lines)).apply(InsertResharding(ENGINES).apply(plan)).estimate
