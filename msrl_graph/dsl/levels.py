"""Levels of the tree of rows, and the level at which each column has its values.

Invariant: the rows of the node `source` are level 0. Each generation adds a level below the level that it reads, with
`samples` rows for each row of the level that it reads. All other nodes write columns of the deepest level that they
read, unless the type of the column has `per`. Levels form a tree. checks/levels.py reports nodes that read from two
branches of this tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..ir.attributes import GenerateAttributes
from ..ir.graph import Column, Node


@dataclass
class Levels:
    """The levels of an algorithm.

    - `rows`: the number of rows of each level.
    - `by_column`: the level of each column.
    - `under`: the parent of each level, -1 for level 0.
    - `depths`: the depth of each level in the tree of levels.
    """

    rows: list[int]
    by_column: dict[str, int] = field(default_factory=dict)
    under: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])

    def add(self, node: Node, columns: Mapping[str, Column]) -> None:
        """Add the level of each column that a node writes.

        If the node is a generation, first adds the level that the generation creates. All nodes whose columns this node
        reads must be added before this node.
        """
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
    """Compute the level of each column.

    `count` is the number of rows that the node `source` writes. `nodes` must be in dependency order.
    """
    row_levels = Levels([count])
    for node in nodes:
        row_levels.add(node, columns)
    # A column that is written before the rows of its `per` exist is an error. The report uses the declared level.
    row_levels.by_column |= {
        column: row_levels.by_column[columns[column].per]
        for column in row_levels.by_column
        if column in columns and columns[column].per in row_levels.by_column
    }
    return row_levels
