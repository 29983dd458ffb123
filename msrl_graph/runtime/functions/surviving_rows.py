"""The rows that remain in an iteration when an environment or an agent fails.

Invariant: a failed row ends the run, or it leaves the iteration and is counted and reported. A failed row never
continues as if nothing had happened. The node's `on_failure` decides what happens to the row, and whether the row's
group leaves, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...analysis.rowsets import rowsets
from ...ir.attributes import GenerateAttributes
from ...ir.graph import Node
from ...ir.plan import Plan
from ..data.columns import Array, ColumnData, Verdicts
from ..process.task_report import Report, RunError
from .instances import Failure
from .user_traceback import describe_failure


class SurvivingRows:
    """The rows of a node in an iteration, with a record of the rows that are lost.

    - `rows`: the numbers of the rows. The methods identify a row by its position in this array.
    - `fan`: the number of consecutive rows that form a group.
    - `failed`: for each failed row, the failure, and a phrase that says when the row failed.
    - `lost`: which rows leave the iteration, because the row itself or another row of its group failed.
    """

    def __init__(self, node: Node, plan: Plan, rows: Array, fan: int, iteration: int) -> None:
        self.node = node
        self.rows = rows
        self.fan = fan
        self.iteration = iteration
        self.on_failure = GenerateAttributes.of(node).on_failure
        sieve = rowsets(plan.graph).sieves.get(node.name)
        self.column = sieve.column if sieve else ""
        self.failed: dict[int, tuple[Failure, str]] = {}
        self.lost = np.zeros(len(rows), bool)

    def fail(self, position: int, failure: Failure, when: str = "", given: Mapping[str, Any] | None = None) -> range:
        """Record a row's failure; return the positions of all rows that must leave.

        These rows leave the iteration: the failed row or, with `on_failure = drop_group`, all rows of its group. `when`
        says in words when the row failed. `given` are the arguments of the failed call. Raises RunError if a failure
        ends the run.
        """
        if self.on_failure == "stop":
            raise RunError(self._failure_message(position, failure, when, given))
        self.failed.setdefault(position, (failure, when))
        first = position
        size = 1
        if self.on_failure == "drop_group":
            first = position - position % self.fan
            size = self.fan
        self.lost[first : first + size] = True
        return range(first, first + size)

    def make_verdicts(self, report: Report, metric_prefix: str) -> dict[str, Verdicts]:
        """Return a dictionary with one column of the dock: the verdicts on the rows.

        The key is the name of the column. A verdict says whether a row remains or is lost. Lost rows are counted and
        reported in `report`. The metrics that count failed rows have names that begin with `metric_prefix`. Returns {}
        if a failure ends the run, because a run with this setting never loses rows.
        """
        if not self.column:
            return {}
        report.count(f"{metric_prefix}failed", len(self.failed), 0)
        for reason, count in sorted(Counter(failure.reason for failure, _ in self.failed.values()).items()):
            report.count(f"{metric_prefix}failed/{reason}", count, 0)
        report.count(f"kept/{self.node.name}", float((~self.lost).sum()), len(self.rows))
        messages = report.failed.setdefault(self.node.name, {})
        for position, (failure, when) in sorted(self.failed.items()):
            if failure.reason not in messages:
                self._failure_message(position, failure, when)  # write the full message to the log
                messages[failure.reason] = f"{self._describe_place(position, when)}: {failure.summary.reason}"
        return {self.column: Verdicts(self.rows, ColumnData((~self.lost).astype(np.int32)))}

    def _describe_place(self, position: int, when: str) -> str:
        return f"row {self.rows[position]}{', ' if when else ''}{when}"

    def _failure_message(
        self, position: int, failure: Failure, when: str, given: Mapping[str, Any] | None = None
    ) -> str:
        where = f"{self._describe_place(position, when)} of iteration {self.iteration}"
        return describe_failure(self.node, failure.summary, where, (given or {}).items())
