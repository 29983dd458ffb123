"""Metrics computed from sums that all processes report: means and derived metrics.

Invariant: if the last part of a sum's name (after the last `/`) begins with `_`, the sum is only an input of other
metrics and appears in no metrics line. The metrics do not depend on how rows are split into micro-batches and ranks,
because the sums do not depend on this split.
"""

from __future__ import annotations

from collections.abc import Mapping

Sums = Mapping[str, tuple[float, float]]  # by name: the total and the weight, 0 for a plain count


def means(sums: Sums) -> dict[str, float]:
    """Return the mean of each metric, and the metrics derived from several sums.

    `sums` has the pair (total, weight) of each metric. A metric with weight 0 is a count; its total is returned instead
    of a mean. The derived metrics of a loss term TERM are:

    - `TERM/effective_sample_size`: (mean r)^2 / mean r^2, from 0 to 1. r is the number whose mean is the metric
      `TERM/ratio`.
    - `TERM/explained_variance`: 1 - var(e) / var(R), where e is the error of the predicted values and R the returns.
      This metric is absent if all returns are equal.
    """
    values = {name: total / weight if weight else total for name, (total, weight) in sorted(sums.items())}
    for name in [key for key in values if key.rpartition("/")[2] == "_ratio_square"]:
        term = name.removesuffix("_ratio_square")
        if square := values[name]:
            values[f"{term}effective_sample_size"] = values[f"{term}ratio"] ** 2 / square
    for name in [key for key in values if key.rpartition("/")[2] == "_returns_square"]:
        term = name.removesuffix("_returns_square")
        variance = values[name] - values[f"{term}_returns"] ** 2
        if variance > 1e-12 * values[name]:
            residual = values[f"{term}_error_square"] - values[f"{term}error"] ** 2
            values[f"{term}explained_variance"] = 1 - residual / variance
    return {name: value for name, value in values.items() if not name.rpartition("/")[2].startswith("_")}


__all__ = ["means"]
