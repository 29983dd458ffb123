"""The best figures of evaluations, and whether the evaluations still improve.

An evaluation can name one of its figures with the attribute `best`. Only these figures are considered.

Invariant: everything is computed from the lines of metrics.jsonl. So a resumed run has the same best figures as the run
before the interruption.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...diagnostics.quantities import plural
from ...ir.evaluation import Evaluation


@dataclass(frozen=True)
class BestFigure:
    """The best value of the figure that an evaluation names with its attribute `best`.

    `iteration` is the number of iterations that had ended when the best value was measured. `since` is the number of
    evaluations after the evaluation with the best value.
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
        """A text with the figure's title, its value, and when the value was reached."""
        when = f"after {plural(self.iteration, 'iteration')}" if self.iteration else "before the training"
        return f"{self.name} {self.value:.3f} {when}"


def best_figures(evaluations: Iterable[Evaluation], lines: Sequence[Mapping[str, Any]]) -> list[BestFigure]:
    """Find, for each evaluation, the best value of the figure named by `best`.

    `best` is an attribute of an evaluation. `lines` are the metrics lines of the run. If several values are equally
    good, the first of these values is the best. A missing or non-finite value is never the best. The result leaves out
    evaluations without the attribute, and evaluations without a finite value.
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

    Training ends if the last `patience` evaluations have not improved the best figure. `patience` is an attribute of an
    evaluation.
    """
    exhausted = next((best for best in bests if 0 < best.evaluation.patience <= best.since), None)
    return (
        f"{plural(exhausted.since, 'evaluation')} gave nothing better than {exhausted.description}" if exhausted else ""
    )


def _is_finite(line: Mapping[str, Any], key: str) -> bool:
    value = line.get(key)
    return isinstance(value, int | float) and math.isfinite(value)
