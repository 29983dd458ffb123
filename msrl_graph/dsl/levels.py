"""Levels: the rows in which each column has a value.

Invariant: the source's rows are level 0. Each generation adds a level under the level that it reads, with `samples`
rows for each row. All other nodes stay on the deepest level that they read, except for columns whose type has `per`.
Levels form a tree; checks/levels.py reports nodes that read from two branches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..ir.attributes import GenerateAttributes
from ..ir.graph import Column, Node


@dataclass
class Levels:
    """The rows and the parent (`under`) of each level, and the level of each column."""

    rows: list[int]
    by_column: dict[str, int] = field(default_factory=dict)
    under: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])

    def add(self, node: Node, columns: Mapping[str, Column]) -> None:
        """Add a node; all nodes that write its columns must be added before."""
        level = max(
            (self.by_column.get(read_column, 0) for read_column in node.reads),
            key=lambda candidate: self.depths[candidate],
            default=0,
        )
        if node.verb == "generate":
            self.under.append(level)
            self.depths.append(self.depths[level] + 1)
            self.rows.append(self.rows[level] * GenerateAttributes.of(node).samples)
            level = len(self.rows) - 1
        for column in node.writes:
            self.by_column.setdefault(column, level)
        for column in node.writes:
            if column in columns and columns[column].per in self.by_column:
                self.by_column[column] = self.by_column[columns[column].per]


def compute_levels(count: int, nodes: Iterable[Node], columns: Mapping[str, Column]) -> Levels:
    """Compute the levels of nodes in dependency order, for a source of `count` rows."""
    row_levels = Levels([count])
    for node in nodes:
        row_levels.add(node, columns)
    # A column written before its `per` rows exist is an error; keep the declared level for its report.
    row_levels.by_column |= {
        column: row_levels.by_column[columns[column].per]
        for column in row_levels.by_column
        if column in columns and columns[column].per in row_levels.by_column
    }
    return row_levels
