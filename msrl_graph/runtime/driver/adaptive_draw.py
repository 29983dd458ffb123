"""How many prompts an iteration draws at once where a filter refills and is `adaptive`.

Invariant: a number follows from the counts of iterations that have ended, and these from the rows alone, so it is the
same on any layout, and after a resume: a checkpoint holds the counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ...ir.attributes import CallAttributes
from ...ir.graph import Graph
from ..data.columns import Array
from ..process.task_report import Report

KEY = "refill/passed"  # in a checkpoint's file of states
_FADES = 0.8  # what a count weighs an iteration later
_ROUND = 0.25  # of the target: what a further round of prompts costs beside those that it draws


class RefillSize:
    """The share of prompts that pass, and what follows from it; `adapts` where the program asks for that."""

    def __init__(self, graph: Graph) -> None:
        filter = next((CallAttributes.of(n) for n in graph.nodes if CallAttributes.of(n).refill), None)
        self.adapts = filter is not None and filter.adaptive
        self.target = graph.rows[0]
        self.most = self.target * (1 + filter.refill) if filter else self.target
        self.passed = 0.0
        self.drawn = 0.0
        self._sizes: dict[int, int] = {}  # by iteration that was begun

    @property
    def share(self) -> float:
        """The share of prompts that passed so far, of late ones more; 1 before any was drawn."""
        return min(1.0, self.passed / self.drawn) if self.drawn else 1.0

    def of(self, number: int) -> int:
        """How many prompts iteration `number` draws at once."""
        return self._sizes.setdefault(number, prompts_for(self.target, self.share, self.most))

    def count(self, number: int, report: Report) -> None:
        """Add what an iteration drew at once to its report."""
        if self.adapts:
            report.count("refill/prompts", self.of(number), 1)

    def ended(self, number: int, reports: Sequence[Report]) -> None:
        """Learn from an iteration that has ended."""
        if not self.adapts:
            return
        passed, drawn = (
            sum(r.sums[name][0] for r in reports if name in r.sums) for name in ("prompts_kept", "prompts_drawn")
        )
        self.passed = _FADES * self.passed + passed
        self.drawn = _FADES * self.drawn + drawn
        self._sizes = {n: size for n, size in self._sizes.items() if n > number}

    def saved(self) -> dict[str, Array]:
        return {KEY: np.array([self.passed, self.drawn])} if self.adapts else {}

    def restore(self, found: Mapping[str, Array]) -> None:
        """Take the counts of a checkpoint; one of a run that did not adapt has none, and the counts begin anew."""
        if self.adapts and KEY in found:
            self.passed, self.drawn = map(float, found[KEY])


def prompts_for(target: int, share: float, most: int) -> int:
    """How many prompts to draw at once, from `target` to `most`, so that the fewest are drawn until `target` passed.

    Each is taken to pass by itself with the probability `share`; a further round counts as so many prompts as `_ROUND`
    says, since whoever draws them waits for it.
    """
    return min(range(target, most + 1), key=lambda size: (_cost(size, target, share, most), size))


def _cost(size: int, target: int, share: float, most: int) -> float:
    """The expected number of prompts that rounds of a size draw, and what their number costs beside."""
    rounds = 1.0
    for count in range(1, -(-most // size)):
        rounds += (short := 1 - _suffices(count * size, target, share))
        if short < 1e-9:
            break
    return rounds * size + (rounds - 1) * _ROUND * target


def _suffices(drawn: int, target: int, share: float) -> float:
    """The probability that of `drawn` prompts `target` pass, by the normal approximation of the binomial."""
    spread = math.sqrt(drawn * share * (1 - share))
    if not spread:
        return float(drawn * share >= target)
    return 0.5 * math.erfc((target - 0.5 - drawn * share) / (spread * math.sqrt(2)))


__all__ = ["KEY", "RefillSize", "prompts_for"]
