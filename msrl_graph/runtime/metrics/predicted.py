"""An estimate of a run's time, from measured row lengths and this machine's rates.

The estimate is computed after a run, and replaces the plan's estimate in the comparison with measured values.

Invariant: the estimate uses only the lengths of the run's rows, never the run's measured seconds.
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
    """Return the number and lengths of an iteration's rows, as medians over `lines`.

    `lines` are the metrics lines of a run. Returns None if the program generates nothing, or if a line lacks a metric
    about lengths.
    """
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
    prompt, response, longest, distinct_prompt, distinct_tokens, distinct_rows = (
        statistics.median(line[name] for line in lines) for name in names
    )
    count = plan.graph.rows[-1]
    mean = (prompt + response) / count
    repeated = (prompt - distinct_prompt, response - distinct_tokens, count - distinct_rows)
    return Rows(count, prompt, response, count * mean**2, prompt / count + longest, *repeated)


def estimate(plan: Plan, lines: Sequence[dict[str, Any]]) -> Estimate | None:
    """Estimate the time of an iteration on this machine, from a run's metrics lines."""
    plan = replace(plan, cluster=calibration.apply_calibration(plan.cluster)[0])
    return EstimateTime(ENGINES, rows(plan, lines)).apply(InsertResharding(ENGINES).apply(plan)).estimate
