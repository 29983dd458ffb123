"""The best figures of evaluations, and whether the evaluations still improve.

Invariant: everything is computed from the lines of metrics.jsonl. So a resumed run has the same best figures as the run
before the interruption.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...emit.humanize import plural
from ...ir.evaluation import Evaluation


@dataclass(frozen=True)
class BestFigure:
    """The best value of the figure that an evaluation states as `best`.

    `iteration` is the number of iterations after which the best value was reached. `since` is the number of evaluations
    after the evaluation with the best value.
    """

    evaluation: Evaluation
    iteration: int
    value: float
    since: int

    @property
    def name(self) -> str:
        """Title of the figure."""
        return self.evaluation.title(self.evaluation.best)

    @property
    def description(self) -> str:
        """A text with the title of the figure, its value, and when it was reached."""
        when = f"after {plural(self.iteration, 'iteration')}" if self.iteration else "before the training"
        return f"{self.name} {self.value:.3f} {when}"


def best_figures(evaluations: Iterable[Evaluation], lines: Sequence[Mapping[str, Any]]) -> list[BestFigure]:
    """Find the best figure of each evaluation that states `best`.

    If several figures are equally good, the first one is the best figure. A missing or non-finite figure is never the
    best. An evaluation without a finite figure is left out.
    """
    bests = []
    for evaluation in (candidate for candidate in evaluations if candidate.best):
        own = [line for line in lines if line.get("evaluation") == evaluation.task]
        values = [(index, line[evaluation.best]) for index, line in enumerate(own) if _is_finite(line, evaluation.best)]
        if values:
            better = min if evaluation.goal == "minimize" else max
            index, value = better(values, key=lambda item: item[1])
            bests.append(BestFigure(evaluation, own[index]["after_iterations"], value, len(own) - 1 - index))
    return bests


def early_stop_reason(bests: Iterable[BestFigure]) -> str:
    """Return why training ends before its last iteration; "" if training continues.

    Training ends if the last `patience` runs of an evaluation have not improved its best figure.
    """
    exhausted = next((best for best in bests if 0 < best.evaluation.patience <= best.since), None)
    return (
        f"{plural(exhausted.since, 'evaluation')} gave nothing better than {exhausted.description}" if exhausted else ""
    )


def _is_finite(line: Mapping[str, Any], key: str) -> bool:
    value = line.get(key)
    return isinstance(value, int | float) and math.isfinite(value)
