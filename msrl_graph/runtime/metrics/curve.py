"""The picture curve.png of a run.

Invariant: the curve shows numbers of metrics lines, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...ir.plan import Plan


def draw_curve(
    plan: Plan, lines: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]], path: Path
) -> None:
    """Draw the means of columns in iterations, and the figures of evaluations."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [
        graph_column.name for graph_column in plan.graph.columns if any(graph_column.name in line for line in lines)
    ]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    iterations = [line["iteration"] + 1 for line in lines]
    for name in names:
        axes.plot(
            iterations,
            [line.get(name, math.nan) for line in lines],
            linewidth=1,
            alpha=0.6,
            label=f"{name}, mean of the batch",
        )
    for evaluation in plan.deploy.evaluations:
        results = [result for result in evaluations if result["evaluation"] == evaluation.task]
        for column in evaluation.report:
            # A resumed run may report other columns than before.
            points = [(result["after_iterations"], result[column]) for result in results if column in result]
            if not points:
                continue
            axes.plot(*zip(*points, strict=True), marker="o", linewidth=2, label=evaluation.title(column))
            for point in (points[0], points[-1]):
                axes.annotate(f"{point[1]:.3f}", point, textcoords="offset points", xytext=(0, 8), ha="center")
    axes.set_xlabel("iterations")
    axes.set_title(plan.deploy.name)
    axes.margins(y=0.15)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
