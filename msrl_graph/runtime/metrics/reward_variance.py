"""Spread of a column's numbers among the responses to a prompt.

If all responses to a prompt have the same number, group-relative advantages are 0.

Invariant: for each prompt, a process reports the count, mean, sum of squared deviations, minimum and maximum over the
prompt's rows in this process. The reports of all processes are merged into the same five figures over all rows of the
prompt. The result does not depend on how the rows were distributed (Chan et al. 1979, "Updating formulae and a pairwise
algorithm for computing sample variances").
"""

from __future__ import annotations

import numpy as np

from ...analysis.rowsets import rowsets
from ...ir.graph import Node
from ...ir.plan import Plan
from ..data.columns import Array
from ..dock.readers import list_node_reads
from ..process.task import Task
from ..process.task_report import Report


class ColumnMeans:
    """Means and spreads of columns that have one number per row."""

    def __init__(self, plan: Plan) -> None:
        self.readers = {reader.node: reader for reader in list_node_reads(plan)}
        self.sets = rowsets(plan.graph).columns

    def count(self, report: Report, node: Node, task: Task, name: str, rows: Array, values: Array) -> None:
        """Add the mean and the spread of a column's finite values to a report.

        `name` is the name of the column, `rows` are row numbers, and `values` are the values of these rows.
        """
        finite = np.isfinite(values)
        if not finite.any():
            return
        values = values[finite].astype(np.float64)
        report.count(name, float(values.sum()), len(values))
        if not task.trains or not self.sets[name]:
            return
        prompts = self.readers[node.name].numbers(task).above(np.asarray(rows)[finite], self.sets[name], 0)
        order = np.argsort(prompts, kind="stable")
        units, starts, counts = np.unique(prompts[order], return_index=True, return_counts=True)
        own = values[order]
        means = np.add.reduceat(own, starts) / counts
        squares = np.add.reduceat((own - np.repeat(means, counts)) ** 2, starts)
        least, most = (function.reduceat(own, starts) for function in (np.minimum, np.maximum))
        report.groups.setdefault(name, []).append(np.stack([units, counts, means, squares, least, most]))


def prompt_spreads(reports: list[Report]) -> dict[str, float]:
    """Return two metrics for each column: how much the rows of a prompt differ.

    - `NAME/std`: the unbiased standard deviation among the rows of a prompt, averaged over the prompts.
    - `NAME/flat`: the fraction of the prompts whose rows all have the same number.

    NAME is the column. For example, rewards [1, 0] and [1, 1] of two prompts give std 0.35 and flat 0.5. Prompts with
    only one row do not count. If all prompts have only one row, all rows count as the rows of one prompt.
    """
    figures: dict[str, float] = {}
    for name in sorted({name for report in reports for name in report.groups}):
        units, counts, means, squares, least, most = np.concatenate(
            [group for report in reports for group in report.groups.get(name, ())], axis=1
        )
        places, prompt_index = np.unique(units, return_inverse=True)
        if len(places) == counts.sum():
            places = places[:1]
            prompt_index = np.zeros_like(prompt_index)
        number = np.bincount(prompt_index, counts)
        mean = np.bincount(prompt_index, counts * means) / number
        total_squares = np.bincount(prompt_index, squares + counts * (means - mean[prompt_index]) ** 2)
        low = np.full(len(places), np.inf)
        high = np.full(len(places), -np.inf)
        np.minimum.at(low, prompt_index, least)
        np.maximum.at(high, prompt_index, most)
        several = number > 1
        if several.any():
            figures[f"{name}/std"] = float(np.sqrt(total_squares[several] / (number[several] - 1)).mean())
            figures[f"{name}/flat"] = float((low == high)[several].mean())
    return figures
