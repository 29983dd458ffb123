"""The best figures that evaluations gave, and whether they rise no more.

Invariant: all of it follows from the lines of the metrics, so that a run which is resumed knows what the run before it
knew.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...emit.humanize import many
from ...ir.evaluation import Evaluation


@dataclass(frozen=True)
class BestFigure:
    """The best figure `best` of an evaluation, and the `iteration` that it came after; `since` counts the evaluations
    after it."""

    evaluation: Evaluation
    iteration: int
    value: float
    since: int

    @property
    def name(self) -> str:
        """What a person calls the figure."""
        return self.evaluation.title(self.evaluation.best)

    @property
    def words(self) -> str:
        """The figure, its value and when it was reached."""
        when = f"after {many(self.iteration, 'iteration')}" if self.iteration else "before the training"
        return f"{self.name} {self.value:.3f} {when}"


def best_figures(evaluations: Iterable[Evaluation], lines: Sequence[Mapping[str, Any]]) -> list[BestFigure]:
    """Of each evaluation that states `best` its best figure in some lines of the metrics; the first of equal ones.

    A figure that is missing or not finite is never the best. An evaluation that gave no finite one has none.
    """
    found = []
    for evaluation in (e for e in evaluations if e.best):
        own = [line for line in lines if line.get("evaluation") == evaluation.task]
        values = [(place, line[evaluation.best]) for place, line in enumerate(own) if _is_finite(line, evaluation.best)]
        if values:
            better = min if evaluation.goal == "minimize" else max
            place, value = better(values, key=lambda item: item[1])
            found.append(BestFigure(evaluation, own[place]["after_iterations"], value, len(own) - 1 - place))
    return found


def ending(bests: Iterable[BestFigure]) -> str:
    """Why the training is to end before its last iteration, in words; "" where it is to go on."""
    spent = next((best for best in bests if 0 < best.evaluation.patience <= best.since), None)
    return f"{many(spent.since, 'evaluation')} gave nothing better than {spent.words}" if spent else ""


def _is_finite(line: Mapping[str, Any], key: str) -> bool:
    value = line.get(key)
    return isinstance(value, int | float) and math.isfinite(value)
