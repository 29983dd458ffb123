"""Number of prompts that each round draws, if the program's filter is `adaptive`.

Invariant: the number of prompts depends on only two counts: how many prompts the ended iterations have drawn, and how
many of these prompts have passed the filter. A checkpoint contains both counts, and both counts are the same on any
layout. So the number of prompts is the same on any layout and after a resume.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ...ir.attributes import CallAttributes
from ...ir.graph import Graph
from ..data.columns import Array
from ..process.task_report import Report

KEY = "refill/passed"  # in the state file of a checkpoint
_FADES = 0.8  # factor on the weight of a count after one more iteration
_ROUND = 0.25  # cost of one more round, without its prompts, as a share of the target


class RefillSize:
    """Estimator of the number of prompts that each round draws.

    `adapts` says whether the program has an `adaptive` filter.
    """

    def __init__(self, graph: Graph) -> None:
        filter = next((CallAttributes.of(node) for node in graph.nodes if CallAttributes.of(node).refill), None)
        self.adapts = filter is not None and filter.adaptive
        self.target = graph.rows[0]
        self.max_prompts = self.target * (1 + filter.refill) if filter else self.target
        self.passed = 0.0
        self.drawn = 0.0
        self._sizes: dict[int, int] = {}  # by begun iteration

    @property
    def share(self) -> float:
        """Fraction of the drawn prompts that passed the filter; 1 before the first draw.

        The fraction is a weighted mean over the ended iterations. Later iterations count more than earlier iterations.
        """
        return min(1.0, self.passed / self.drawn) if self.drawn else 1.0

    def draw_size(self, number: int) -> int:
        """Return the number of prompts in each round of iteration `number`."""
        return self._sizes.setdefault(number, prompts_for(self.target, self.share, self.max_prompts))

    def count(self, number: int, report: Report) -> None:
        """Add a metric to a report: how many prompts each round of an iteration draws.

        `number` is the number of the iteration.
        """
        if self.adapts:
            report.count("refill/prompts", self.draw_size(number), 1)

    def learn(self, number: int, reports: Sequence[Report]) -> None:
        """Add an ended iteration's prompts to the counts of drawn and of passed prompts.

        A passed prompt is a prompt that passed the filter. The two counts give the fraction `share`, which decides how
        many prompts later iterations draw.
        """
        if not self.adapts:
            return
        passed, drawn = (
            sum(report.sums[name][0] for report in reports if name in report.sums)
            for name in ("prompts_kept", "prompts_drawn")
        )
        self.passed = _FADES * self.passed + passed
        self.drawn = _FADES * self.drawn + drawn
        self._sizes = {iteration: size for iteration, size in self._sizes.items() if iteration > number}

    def to_arrays(self) -> dict[str, Array]:
        return {KEY: np.array([self.passed, self.drawn])} if self.adapts else {}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Restore the counts of drawn prompts and of passed prompts from a checkpoint.

        If the run that wrote the checkpoint had no adaptive filter, both counts start from zero.
        """
        if self.adapts and KEY in arrays:
            self.passed, self.drawn = map(float, arrays[KEY])


def prompts_for(target: int, share: float, most: int) -> int:
    """Choose how many prompts each round draws: at least `target`, at most `most`.

    The choice minimizes the expected cost of drawing until `target` prompts have passed the filter. The cost is the
    number of drawn prompts, plus a fixed cost for each round after the first, because the run waits for each round. The
    fixed cost is `target` times the constant `_ROUND`. Each prompt is assumed to pass independently with the
    probability `share`.
    """
    return min(range(target, most + 1), key=lambda size: (_cost(size, target, share, most), size))


def _cost(size: int, target: int, share: float, most: int) -> float:
    """Return the expected cost of rounds that draw `size` prompts each.

    The cost is defined in `prompts_for`.
    """
    rounds = 1.0
    for count in range(1, -(-most // size)):
        rounds += (short := 1 - _suffices(count * size, target, share))
        if short < 1e-9:
            break
    return rounds * size + (rounds - 1) * _ROUND * target


def _suffices(drawn: int, target: int, share: float) -> float:
    """Return the probability that `target` or more of `drawn` prompts pass the filter.

    `share` is the probability that one prompt passes. The result uses the normal approximation of the binomial
    distribution.
    """
    deviation = math.sqrt(drawn * share * (1 - share))
    if not deviation:
        return float(drawn * share >= target)
    return 0.5 * math.erfc((target - 0.5 - drawn * share) / (deviation * math.sqrt(2)))


__all__ = ["KEY", "RefillSize", "prompts_for"]
