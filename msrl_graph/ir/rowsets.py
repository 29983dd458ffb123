"""rowsets: the rows that nodes work on, which of them belong to which, and which filters they have passed.

Invariant: the sets of a graph are a tree: a generation makes one under that of the rows it generates from, a `select`
one under that of the rows it chooses from. A row's number tells the rows above it, so that nobody has to be asked:
response r of fan N belongs to prompt r // N, and the k-th repeat of row r is row r + k * (as many rows as there can
be). Rows that a filter drops leave gaps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from .attributes import CallAttributes, GenerateAttributes
from .graph import Graph, Node

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Rows = NDArray[np.int64]


REPEATS = 1024  # a `select` may let a row go on so often, or as often as there are rows where these are more
NUMBERS = 1 << 62  # below this is every row's number: fewer repeats where many `select` follow each other


@dataclass(frozen=True)
class Rowset:
    """Rows of a level. `above` is the set that they came from (-1: they are the source's), `fan` how many a
    `generation` makes of each of those; `repeats`: a `select` chose them, so that some may be repeats of others."""

    level: int
    above: int = -1
    fan: int = 1
    repeats: bool = False
    generation: str = ""


@dataclass(frozen=True)
class Sieve:
    """A filter: the set that it chooses from, and that of the rows which it leaves, the same one unless rows may
    repeat; `refill`: how many more rounds of prompts it may ask for. `failures`: it is no filter, but a generation or
    a function which rows that fail leave, in evaluations too; `generates`: it is a generation.
    """

    node: str
    rows: int
    left: int
    refill: int = 0
    failures: bool = False
    generates: bool = False

    @property
    def column(self) -> str:
        """The dock's name for how often each row goes on."""
        return f"{self.node}.times"


@dataclass
class Rowsets:
    """Which rows each column and node of a graph is about, as indices into `sets`.

    - `nodes`: the set that a node works on; `units`: the set of what it is handed at once, with `per = prompt` that
      of prompts.
    - `sieves`: the graph's filters; `passed`: those before each node, in the order of the graph. At most one is
      `refilling`, as a check sees to.
    - `apart`: nodes that would need rows of two sets of which neither lies above the other, with the two. A check
      refuses them.
    """

    sets: list[Rowset] = field(default_factory=lambda: [Rowset(0)])
    columns: dict[str, int] = field(default_factory=dict)
    nodes: dict[str, int] = field(default_factory=dict)
    units: dict[str, int] = field(default_factory=dict)
    sieves: dict[str, Sieve] = field(default_factory=dict)
    passed: dict[str, tuple[Sieve, ...]] = field(default_factory=dict)
    apart: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def refilling(self) -> Sieve | None:
        return next((s for s in self.sieves.values() if s.refill), None)

    def up(self, rows: int, level: int) -> int:
        """The deepest set of a level that is, or is above, a set; the source's where there is none."""
        return next((s for s in chain(self.sets, rows) if self.sets[s].level == level), 0)

    def add(self, graph: Graph, node: Node) -> None:
        """Takes a node whose predecessors were taken before."""
        before = {s.node: s for e in graph.into(node.name) for s in (*self.passed.get(e.src, ()), *self._sieve(e.src))}
        passed = tuple(s for name, s in self.sieves.items() if name in before) if before else ()
        level = graph.level(node)
        needed = {self.columns[c] for c in node.reads if c in self.columns} | {0}
        needed |= {s.left for s in passed if s.left != s.rows and self._under(graph, level, self.sets[s.left].level)}
        rows = max(sorted(needed), key=lambda s: len(chain(self.sets, s)))
        for other in sorted(needed):
            if common(self.sets, rows, other) != other:
                self.apart.setdefault(node.name, (rows, other))
        self.nodes[node.name] = rows
        self.passed[node.name] = passed
        self.units[node.name] = self.up(rows, graph.unit_level(node))
        made = rows
        if node.verb == "generate":
            made = len(self.sets)
            self.sets.append(
                Rowset(graph.row_level(node), rows, GenerateAttributes.of(node).samples, generation=node.name)
            )
        for column in node.writes:
            self.columns[column] = made if node.verb == "generate" else self.up(rows, graph.column(column).level)
        said = CallAttributes.of(node)
        generates = node.verb == "generate"
        if node.filters and said.keep is None and said.select is None:
            self.sieves[node.name] = Sieve(node.name, made, made, failures=node.fails, generates=generates)
        elif node.filters:
            left = rows
            if said.select is not None:
                left = len(self.sets)
                self.sets.append(Rowset(level, rows, repeats=True))
            self.sieves[node.name] = Sieve(node.name, rows, left, said.refill)

    def _sieve(self, node: str) -> tuple[Sieve, ...]:
        return (self.sieves[node],) if node in self.sieves else ()

    def _under(self, graph: Graph, level: int, above: int) -> bool:
        return graph.common(level, above) == above


def rowsets(graph: Graph) -> Rowsets:
    """Of a graph whose names are resolved and whose sample edges make no cycle."""
    found = Rowsets()
    for node in graph.nodes:
        found.add(graph, node)
    return found


def looping(graph: Graph) -> tuple[str, frozenset[str]]:
    """The filter that refills, and it with all nodes before it: those that work round by round of prompts; "" and none
    without one."""
    filter = next((n.name for n in graph.nodes if CallAttributes.of(n).refill), "")
    return filter, frozenset((filter, *graph.flow.before(filter))) if filter else frozenset()


def upstream(graph: Graph, columns: Sequence[str]) -> set[str]:
    """The nodes that columns need: their writers, and the writers of what those read; and the source, which gives the
    states of a row. A column that nobody writes, which a check refuses, needs none."""
    needed = {n.name for n in graph.verb("source")}
    todo = [*columns]
    while todo:
        for node in graph.writers.get(todo.pop(), ()):
            if node.name not in needed:
                needed.add(node.name)
                todo += node.reads
    return needed


def chain(sets: Sequence[Rowset], rows: int) -> list[int]:
    """A set and all above it, the deepest first."""
    found = [rows]
    while (above := sets[found[-1]].above) >= 0:
        found.append(above)
    return found


def common(sets: Sequence[Rowset], one: int, other: int) -> int:
    """The deepest set that is, or is above, both of two."""
    above = {*chain(sets, one)}
    return next(s for s in chain(sets, other) if s in above)


class Numbers:
    """How the rows of one pass over a graph are numbered: of so many prompts, all rounds of them.

    `samples` is how many rows a generation makes of each, where these are not as many as the program says. `size` are
    the rows that each set can have, repeats aside, and its numbers are below `space`; a `select` may let a row of a set
    go on `repeats` times.
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
        """The row of set `end` that each row of set `start`, which is under it, came from."""
        while start != end:
            found = self.sets[start]
            rows = rows % self.space[found.above] if found.repeats else rows // self.fans[start]
            start = found.above
        return rows
