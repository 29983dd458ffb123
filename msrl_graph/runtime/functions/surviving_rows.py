"""Which of some rows stay: of those whose environment or agent failed, and of these' groups, what the node says.

Invariant: a row that failed ends the run, or leaves the iteration and is counted and told; it never goes on as if
nothing had happened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...ir.attributes import GenerateAttributes
from ...ir.graph import Node
from ...ir.plan import Plan
from ...ir.rowsets import rowsets
from ..data.columns import Array, ColumnData, Verdicts
from ..process.task_report import Report, RunError
from .instances import Failure
from .user_traceback import blame


class SurvivingRows:
    """Of the `rows` of a node in an iteration, called by their positions, `fan` of which belong together. `failed` are
    those that failed, with when it was; `lost` those that leave, for their own failure or their group's."""

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
        """The rows that leave by it. Raises RunError where a failure ends the run."""
        if self.on_failure == "stop":
            raise RunError(self._blamed(position, failure, when, given))
        self.failed.setdefault(position, (failure, when))
        first = position
        size = 1
        if self.on_failure == "drop_group":
            first = position - position % self.fan
            size = self.fan
        self.lost[first : first + size] = True
        return range(first, first + size)

    def verdicts(self, report: Report, head: str) -> dict[str, Verdicts]:
        """Which rows stay, for the dock, where rows may fail; counts and tells of those that do not."""
        if not self.column:
            return {}
        report.count(f"{head}failed", len(self.failed), 0)
        for reason, number in sorted(Counter(failure.reason for failure, _ in self.failed.values()).items()):
            report.count(f"{head}failed/{reason}", number, 0)
        report.count(f"kept/{self.node.name}", float((~self.lost).sum()), len(self.rows))
        told = report.failed.setdefault(self.node.name, {})
        for position, (failure, when) in sorted(self.failed.items()):
            if failure.reason not in told:
                self._blamed(position, failure, when)  # all of it into the log
                told[failure.reason] = f"{self._where(position, when)}: {failure.told.reason}"
        return {self.column: Verdicts(self.rows, ColumnData((~self.lost).astype(np.int32)))}

    def _where(self, position: int, when: str) -> str:
        return f"row {self.rows[position]}{', ' if when else ''}{when}"

    def _blamed(self, position: int, failure: Failure, when: str, given: Mapping[str, Any] | None = None) -> str:
        where = f"{self._where(position, when)} of iteration {self.iteration}"
        return blame(self.node, failure.told, where, (given or {}).items())
