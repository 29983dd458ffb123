"""Levels: which rows each column has a value in.

Invariant: the source's rows are level 0; each generation makes a level under that of the rows it generates from,
`samples` rows for each; all else stays on the deepest level that it reads, but for columns whose type says `per`.
Levels form a tree: checks/levels.py tells of what reads from two branches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..ir.attributes import GenerateAttributes
from ..ir.graph import Column, Node


@dataclass
class Levels:
    """`of` each column, the `rows` of each level, the level that each is `under`."""

    rows: list[int]
    of: dict[str, int] = field(default_factory=dict)
    under: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])

    def add(self, node: Node, columns: Mapping[str, Column]) -> None:
        """Takes a node whose reads were taken before."""
        level = max((self.of.get(c, 0) for c in node.reads), key=lambda n: self.depths[n], default=0)
        if node.verb == "generate":
            self.under.append(level)
            self.depths.append(self.depths[level] + 1)
            self.rows.append(self.rows[level] * GenerateAttributes.of(node).samples)
            level = len(self.rows) - 1
        for column in node.writes:
            self.of.setdefault(column, level)
        for column in node.writes:
            if column in columns and columns[column].per in self.of:
                self.of[column] = self.of[columns[column].per]


def levels(count: int, nodes: Iterable[Node], columns: Mapping[str, Column]) -> Levels:
    """Of nodes in dependency order, of a source of `count` rows."""
    found = Levels([count])
    for node in nodes:
        found.add(node, columns)
    # What is written before there is such a row is wrong, and is to be seen as it was declared.
    found.of |= {c: found.of[columns[c].per] for c in found.of if c in columns and columns[c].per in found.of}
    return found
