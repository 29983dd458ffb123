"""Row sets: the rows that each node works on, their numbers and their filters.

A row set is a set of rows of one level that were made together. After a `select`, which may repeat rows, the same level
has a second row set.

Invariant: the row sets of a graph are a tree. A generation makes a row set below the set from which it generates. A
`select` makes a row set below the set from which it selects. The numbers of the rows above a row follow from the row's
number, so no communication is needed. With N responses per prompt, response r belongs to prompt r // N. The k-th repeat
of row r is row r + k * (the largest possible number of rows). Rows that a filter drops leave gaps in the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from ..ir.attributes import CallAttributes, GenerateAttributes
from ..ir.graph import Graph, Node

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Rows = NDArray[np.int64]


REPEATS = 1024  # the most times that a `select` may repeat a row, or the number of rows if that is larger
NUMBERS = 1 << 62  # a limit for the numbers of rows: fewer repeats are possible after several `select`


@dataclass(frozen=True)
class Rowset:
    """A set of rows of a level.

    - `above`: the index of the set from which these rows were made; -1 for the rows of the source.
    - `fan`: the number of rows that the generation makes from each row of the set above.
    - `repeats`: whether a `select` chose the rows. Some rows may then be repeats of other rows.
    - `generation`: the generation that made the rows.
    """

    level: int
    above: int = -1
    fan: int = 1
    repeats: bool = False
    generation: str = ""


@dataclass(frozen=True)
class Sieve:
    """A node where rows leave the iteration.

    - `rows`: the set of the rows that enter this node. `remaining`: the set of the rows that remain. It is the same
      set, or a new set if the node may repeat rows.
    - `refill`: the maximum number of extra rounds of prompts that the filter may request.
    - `failures`: whether rows that fail at this node leave. The node is then a generation or a function, not a filter.
      Failed rows also leave in evaluations.
    - `generates`: whether the node is a generation.
    """

    node: str
    rows: int
    remaining: int
    refill: int = 0
    failures: bool = False
    generates: bool = False

    @property
    def column(self) -> str:
        """The name of the dock's column with the number of times that each row continues.

        A `select` can repeat a row, so that the row continues several times after this node.
        """
        return f"{self.node}.times"


@dataclass
class Rowsets:
    """The row sets of each column and node of a graph, as indices into `sets`.

    - `columns`: the set of each column's rows. `nodes`: the set that each node works on.
    - `units`: the set of the units that each node gets. With `per = prompt`, it is the set of prompts.
    - `sieves`: the nodes where rows leave the iteration, by name. A check makes sure that at most one of these nodes
      has `refill`.
    - `passed`: for each node, the sieves that its rows have passed before they reach the node, in the order of the
      graph.
    - `disjoint`: the nodes that would need two sets on different branches of the tree, each with these two sets. A
      check rejects such nodes.
    """

    sets: list[Rowset] = field(default_factory=lambda: [Rowset(0)])
    columns: dict[str, int] = field(default_factory=dict)
    nodes: dict[str, int] = field(default_factory=dict)
    units: dict[str, int] = field(default_factory=dict)
    sieves: dict[str, Sieve] = field(default_factory=dict)
    passed: dict[str, tuple[Sieve, ...]] = field(default_factory=dict)
    disjoint: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def refilling(self) -> Sieve | None:
        return next((sieve for sieve in self.sieves.values() if sieve.refill), None)

    def up(self, rows: int, level: int) -> int:
        """Return the nearest set of a level among the set `rows` and all sets above it.

        Sets are given by their indices. If none of these sets has the level, the result is 0, the set of the source.
        """
        return next((index for index in chain(self.sets, rows) if self.sets[index].level == level), 0)

    def add(self, graph: Graph, node: Node) -> None:
        """Add the row sets of a node; all nodes before the node must have been added."""
        before = {
            sieve.node: sieve
            for edge in graph.into(node.name)
            for sieve in (*self.passed.get(edge.src, ()), *self._sieve(edge.src))
        }
        passed = tuple(sieve for name, sieve in self.sieves.items() if name in before) if before else ()
        level = graph.level(node)
        needed = {self.columns[column] for column in node.reads if column in self.columns} | {0}
        needed |= {
            sieve.remaining
            for sieve in passed
            if sieve.remaining != sieve.rows and self._is_under(graph, level, self.sets[sieve.remaining].level)
        }
        rows = max(sorted(needed), key=lambda index: len(chain(self.sets, index)))
        for other in sorted(needed):
            if common(self.sets, rows, other) != other:
                self.disjoint.setdefault(node.name, (rows, other))
        self.nodes[node.name] = rows
        self.passed[node.name] = passed
        self.units[node.name] = self.up(rows, graph.unit_level(node))
        written = rows
        if node.verb == "generate":
            written = len(self.sets)
            self.sets.append(
                Rowset(graph.row_level(node), rows, GenerateAttributes.of(node).samples, generation=node.name)
            )
        for column in node.writes:
            self.columns[column] = written if node.verb == "generate" else self.up(rows, graph.column(column).level)
        attributes = CallAttributes.of(node)
        generates = node.verb == "generate"
        if node.filters and attributes.keep is None and attributes.select is None:
            self.sieves[node.name] = Sieve(node.name, written, written, failures=node.fails, generates=generates)
        elif node.filters:
            remaining = rows
            if attributes.select is not None:
                remaining = len(self.sets)
                self.sets.append(Rowset(level, rows, repeats=True))
            self.sieves[node.name] = Sieve(node.name, rows, remaining, attributes.refill)

    def _sieve(self, node: str) -> tuple[Sieve, ...]:
        return (self.sieves[node],) if node in self.sieves else ()

    def _is_under(self, graph: Graph, level: int, above: int) -> bool:
        return graph.common(level, above) == above


def rowsets(graph: Graph) -> Rowsets:
    """Return the row sets of a graph.

    The names of the graph must be resolved, and its sample edges must not form a cycle.
    """
    sets = Rowsets()
    for node in graph.nodes:
        sets.add(graph, node)
    return sets


def find_refill(graph: Graph) -> tuple[str, frozenset[str]]:
    """Return the filter with `refill`, and the nodes that work in rounds of prompts.

    These nodes are the filter and all nodes before the filter. In a graph without such a filter, the result is "" and
    an empty set.
    """
    filter = next((node.name for node in graph.nodes if CallAttributes.of(node).refill), "")
    return filter, frozenset((filter, *graph.flow.before(filter))) if filter else frozenset()


def nodes_upstream(graph: Graph, columns: Sequence[str]) -> set[str]:
    """Return the nodes that are needed to compute columns.

    These nodes are the writers of the columns and, recursively, the writers of the columns that these nodes read. The
    source is always included, since it also writes the values that states had when a row was drawn. A column without a
    writer, which a check rejects, needs no node.
    """
    needed = {source.name for source in graph.verb("source")}
    todo = [*columns]
    while todo:
        for node in graph.writers.get(todo.pop(), ()):
            if node.name not in needed:
                needed.add(node.name)
                todo += node.reads
    return needed


def chain(sets: Sequence[Rowset], rows: int) -> list[int]:
    """Return a set and all sets above it, the deepest first."""
    ancestors = [rows]
    while (above := sets[ancestors[-1]].above) >= 0:
        ancestors.append(above)
    return ancestors


def common(sets: Sequence[Rowset], one: int, other: int) -> int:
    """Return the deepest common ancestor of two sets; a set is its own ancestor."""
    above = {*chain(sets, one)}
    return next(index for index in chain(sets, other) if index in above)


class Numbers:
    """The numbering of rows in one iteration or one evaluation.

    - `prompts`: the number of prompts in all rounds.
    - `samples`: for each generation, the number of rows that it makes from each row that it reads. A generation that is
      left out has the number that the program states.
    - `size`: the maximum number of rows of each set; repeats of a row are not counted.
    - `space`: a bound for each set: the numbers of its rows are below this bound.
    - `repeats`: for each set, how often a `select` may repeat a row.
    """

    def __init__(self, sets: Sequence[Rowset], prompts: int, samples: Mapping[str, int] = MappingProxyType({})) -> None:
        self.sets = sets
        self.fans: list[int] = []
        self.size: list[int] = []
        self.space: list[int] = []
        self.repeats: list[int] = []
        for rows in sets:
            if rows.above < 0:
                sizes = (1, prompts, prompts)
            else:
                own = samples.get(rows.generation, rows.fan)
                size = self.size[rows.above]
                sizes = (own, size * own, self.space[rows.above] * (self.repeats[rows.above] if rows.repeats else own))
            for known, number in zip((self.fans, self.size, self.space), sizes, strict=True):
                known.append(number)
            self.repeats.append(min(max(self.size[-1], REPEATS), NUMBERS // max(self.space[-1], 1)))

    def above(self, rows: Rows, start: int, end: int) -> Rows:
        """Return, for rows of the set `start`, their ancestors in the set `end`.

        The set `start` must be below the set `end`, or the same set.
        """
        while start != end:
            rowset = self.sets[start]
            rows = rows % self.space[rowset.above] if rowset.repeats else rows // self.fans[start]
            start = rowset.above
        return rows
