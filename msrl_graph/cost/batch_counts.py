"""The number of micro-batches of a node, for rows of equal length.

Invariant: if all rows have the assumed length, a run makes this number of micro-batches (analysis/row_packing.py).
Counts are those of one data-parallel group.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..analysis.row_packing import MicroBatchLimit
from ..ir.attributes import UpdateAttributes
from ..ir.plan import Plan
from ..ir.workload import micro_batches
from . import holdings


@dataclass(frozen=True)
class BatchCounts:
    """Numbers of micro-batches of an `infer` or `update` node.

    A step is an optimizer step, or a pass of an infer over all its rows.
    """

    plan: Plan
    node: str

    @cached_property
    def limit(self) -> MicroBatchLimit:
        return MicroBatchLimit.of(self.plan, self.node)

    @cached_property
    def step_rows(self) -> int:
        """The number of rows of a step."""
        node = self.plan.graph.node(self.node)
        rows = holdings.row_count(self.plan, self.node)
        step = min(rows, UpdateAttributes.of(node).step_rows(rows)) if node.verb == "update" else rows
        return min(holdings.group_rows(self.plan, self.node), -(-step // self.plan.placement(self.node).layout.dp))

    @cached_property
    def steps(self) -> int:
        """The number of steps of one pass over the rows of an iteration."""
        return -(-holdings.group_rows(self.plan, self.node) // self.step_rows)

    def count_in_step(self, length: float = 0) -> int:
        """Return the number of micro-batches of a step.

        All rows have `length` tokens; by default, the greatest length.
        """
        limit = self.limit
        size = limit.count_rows(length) if length and limit.tokens else limit.full_rows
        return micro_batches(self.step_rows, size, limit.layout)
