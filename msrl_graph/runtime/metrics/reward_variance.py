"""How far what is written for rows differs among the responses to a prompt: where it does not, relative advantages are
0.

Invariant: a process tells of each prompt count, mean, sum of squared deviations, least and largest of the rows that it
had; merged they are those of all rows, whoever had which (Chan et al. 1979, "Updating formulae and a pairwise algorithm
for computing sample variances").
"""

from __future__ import annotations

import numpy as np

from ...ir.graph import Node
from ...ir.plan import Plan
from ...ir.rowsets import rowsets
from ..data.columns import Array
from ..dock.readers import readers
from ..process.task import Task
from ..process.task_report import Report


class ColumnMeans:
    """Counts the numbers that a plan's nodes write, one a row."""

    def __init__(self, plan: Plan) -> None:
        self.readers = {r.node: r for r in readers(plan)}
        self.sets = rowsets(plan.graph).columns

    def count(self, report: Report, node: Node, task: Task, name: str, rows: Array, values: Array) -> None:
        """What is finite of the values of some rows: their mean, and how far they differ."""
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
        least, most = (f.reduceat(own, starts) for f in (np.minimum, np.maximum))
        report.groups.setdefault(name, []).append(np.stack([units, counts, means, squares, least, most]))


def spreads(reports: list[Report]) -> dict[str, float]:
    """How far the numbers of each prompt's rows differ, by the column's NAME.

    NAME/std is the standard deviation (unbiased) among a prompt's rows, in the mean over prompts; NAME/flat the share
    of prompts whose rows all have the same number. Rewards [1, 0] and [1, 1] of two prompts give std 0.35 and flat
    0.5. Where no prompt has two rows, all rows count as one prompt's.
    """
    found: dict[str, float] = {}
    for name in sorted({name for report in reports for name in report.groups}):
        units, counts, means, squares, least, most = np.concatenate(
            [g for r in reports for g in r.groups.get(name, ())], axis=1
        )
        places, of = np.unique(units, return_inverse=True)
        if len(places) == counts.sum():
            places = places[:1]
            of = np.zeros_like(of)
        number = np.bincount(of, counts)
        mean = np.bincount(of, counts * means) / number
        whole = np.bincount(of, squares + counts * (means - mean[of]) ** 2)
        low = np.full(len(places), np.inf)
        high = np.full(len(places), -np.inf)
        np.minimum.at(low, of, least)
        np.maximum.at(high, of, most)
        several = number > 1
        if several.any():
            found[f"{name}/std"] = float(np.sqrt(whole[several] / (number[several] - 1)).mean())
            found[f"{name}/flat"] = float((low == high)[several].mean())
    return found
