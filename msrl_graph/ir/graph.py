"""The graph of an algorithm, independent of its placement.

Invariant: a Graph is immutable, its names are resolved, and each param in its expressions is replaced by its value.
Each node, edge, column, state and worker has its span, the range of text in the program that declares it. The graph is
logical: it has one node per worker state, never one node per rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

from ..diagnostics import NOWHERE, Span
from .expr import Expr as Expr
from .expr import OptionValue as OptionValue
from .expr import Value as Value
from .flow import Flow
from .views import GraphViews
from .worker import Worker as Worker

ELEMENTS = {"i16": 2, "i32": 4, "i64": 8, "f32": 4, "bf16": 2, "bool": 1, "text": 1, "json": 1}
KINDS = {
    "policy": ("generate", "infer", "update"),
    "value": ("infer", "update"),
    "reward_model": ("infer", "update"),
}


@dataclass(frozen=True)
class Dimension:
    """A dimension of a column.

    The length of the dimension is `size`. With `ragged`, it is at most `size`. With `like`, it is the length of the
    column `like` in the same row.
    """

    size: int = 0
    ragged: bool = False
    like: str = ""


@dataclass(frozen=True)
class Column:
    """A field that all rows of one level have.

    Level 0 has the rows of the source (prompts). Each generation adds a level below the level of its prompts. `per` is
    the name after the word `per` in the type. For example, a column of the type `f32 per prompt` has one value for each
    prompt.
    """

    name: str
    element: str
    dims: tuple[Dimension, ...] = ()
    level: int = 0
    span: Span = NOWHERE
    per: str = ""


@dataclass(frozen=True)
class State:
    """A value that the algorithm keeps from one iteration to the next.

    With `per`, there is one value for each row of the column `per`.
    """

    name: str
    element: str
    initial: Expr
    per: str = ""
    span: Span = NOWHERE


class WithAttributes:
    """A node or an edge with its attributes, as the program states them.

    `attributes` has expressions. For typed values, use a class of attributes.py: `UpdateAttributes.of(node)`.
    """

    attributes: dict[str, Expr]
    span: Span

    def stated(self, key: str) -> Expr | None:
        """Return the stated expression of an attribute; None if no expression is stated."""
        return self.attributes.get(key)

    def span_of(self, key: str) -> Span:
        """Return the span of an attribute; if unknown, the span of the node or edge."""
        expr = self.stated(key)
        return expr.span if expr is not None and expr.span.line else self.span

    @cached_property
    def views(self) -> dict[type, Any]:
        return {}  # the typed values of each declaration (attribute_schema.py)


@dataclass(frozen=True)
class Node(WithAttributes):
    """A node of the graph: a worker state, such as `actor.generate`.

    - `per`: the rows that one call gets. `row` means one row, `batch` all rows, and the name of a column, such as
      `prompt`, all rows below one row of that column.
    - `states`: the states whose values from the previous iteration the node reads.
    - `gives`: if the node sets states, all columns and states that it writes, in the order of the program.
    - `whole` (of an update): whether a term of its loss needs all rows of the mini-batch at once.
    - `scores` (of an update): the token columns for which a term of its loss uses one score per row.
    - `base_of`: the frozen worker that the program names, if the node computes with the weights of `worker` without
      their adapter (analysis/shared_bases.py).
    """

    name: str
    worker: str
    verb: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    per: str = "row"
    attributes: dict[str, Expr] = field(default_factory=dict)
    span: Span = NOWHERE
    states: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()
    whole: bool = False
    scores: tuple[str, ...] = ()
    base_of: str = ""

    @property
    def named_worker(self) -> str:
        """The worker that the program names."""
        return self.base_of or self.worker

    @property
    def sets(self) -> tuple[str, ...]:
        """The states that the node sets."""
        return tuple(name for name in self.gives if name not in self.writes)

    @property
    def weight_columns(self) -> tuple[str, ...]:
        """The columns from which the sampling weights of the source are computed."""
        call = self.stated("weights")
        return () if call is None else tuple(name for name in self.writes if name in call.columns().values())

    @property
    def filters(self) -> bool:
        """Whether rows may leave the iteration at this node.

        Rows leave at a filter, at a node that drops failed rows, and at a generation whose responses may continue in
        the next iteration.
        """
        return "keep" in self.attributes or "select" in self.attributes or self.fails or self.cuts

    @property
    def cuts(self) -> bool:
        """Whether responses of this generation may continue in the next iteration."""
        stated = self.stated("partial")
        return stated is not None and float(stated.literal()) > 0

    @property
    def fails(self) -> bool:
        """Whether a row that fails at this node is dropped, instead of ending the run."""
        stated = self.stated("on_failure")
        return stated is not None and stated.value != "stop"


@dataclass(frozen=True)
class Edge(WithAttributes):
    """An edge from `src` to `dst`.

    An edge of the kind `sample` sends rows. An edge of the kind `reshard` sends the weights of the worker of `src`.
    """

    kind: Literal["sample", "reshard"]
    src: str
    dst: str
    attributes: dict[str, Expr] = field(default_factory=dict)
    span: Span = NOWHERE


@dataclass(frozen=True, repr=False)
class Graph(GraphViews):
    """An algorithm; its nodes are in dependency order, the source first."""

    name: str
    params: dict[str, Value]
    columns: tuple[Column, ...]
    workers: tuple[Worker, ...]
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    rows: tuple[
        int, ...
    ]  # rows per iteration at each level: (prompts, responses), and more if there are more generations
    span: Span = NOWHERE
    states: tuple[State, ...] = ()
    under: tuple[int, ...] = (-1, 0)  # the level above each level; several levels may be under the same one

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields to pickle, except caches, which may use ids of objects."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def worked_out(self) -> dict[tuple[Any, ...], Any]:
        return {}  # results about plans of the graph, by query: a planner asks the same for thousands of plans

    @cached_property
    def _index(self) -> tuple[dict[str, Node], dict[str, Column], dict[str, Worker], dict[str, Node]]:
        return (
            {node.name: node for node in self.nodes},
            {column.name: column for column in self.columns},
            {worker.name: worker for worker in self.workers},
            {column: node for node in self.nodes for column in node.writes},
        )

    def node(self, name: str) -> Node:
        return self._index[0][name]

    def column(self, name: str) -> Column:
        return self._index[1][name]

    def worker(self, name: str) -> Worker:
        return self._index[2][name]

    def writer(self, column: str) -> Node:
        """Return the node that writes a column."""
        return self._index[3][column]

    @cached_property
    def writers(self) -> dict[str, list[Node]]:
        """The writers of each column, in program order: one writer in a checked graph."""
        writers: dict[str, list[Node]] = {}
        for node in self.nodes:
            for column in node.writes:
                writers.setdefault(column, []).append(node)
        return {
            column: sorted(nodes, key=lambda writer: writer.span) if len(nodes) > 1 else nodes
            for column, nodes in writers.items()
        }

    @cached_property
    def changing_workers(self) -> tuple[str, ...]:
        """The workers whose weights change in a run: trained workers, then followers."""
        trained = [node.worker for node in self.verb("update")]
        return tuple(
            dict.fromkeys(
                [*trained, *(worker.name for worker in self.workers if worker.follows and self.sharing(worker.name))]
            )
        )

    def sharing(self, worker: str) -> tuple[Node, ...]:
        """Return the nodes that share the weights of a worker.

        The updates of the worker are first, then its infers. Updates and infers are in program order.
        """
        return self._sharing.get(worker, ())

    @cached_property
    def _sharing(self) -> dict[str, tuple[Node, ...]]:
        sharing = {
            worker: [node for node in nodes if node.verb in ("infer", "update")]
            for worker, nodes in self._groups[1].items()
        }
        return {
            worker: tuple(sorted(members, key=lambda node: (node.verb != "update", node.span)))
            for worker, members in sharing.items()
        }

    @cached_property
    def _groups(self) -> tuple[dict[str, tuple[Node, ...]], dict[str, tuple[Node, ...]]]:
        verbs = dict[str, list[Node]]()
        workers = dict[str, list[Node]]()
        for node in self.nodes:
            verbs.setdefault(node.verb, []).append(node)
            workers.setdefault(node.worker, []).append(node)
        return {key: tuple(nodes) for key, nodes in verbs.items()}, {
            key: tuple(nodes) for key, nodes in workers.items()
        }

    def verb(self, verb: str) -> tuple[Node, ...]:
        return self._groups[0].get(verb, ())

    def nodes_of(self, worker: str) -> tuple[Node, ...]:
        """Return the nodes of a worker."""
        return self._groups[1].get(worker, ())

    @cached_property
    def _edges_by_kind(self) -> dict[str, tuple[Edge, ...]]:
        return {kind: tuple(edge for edge in self.edges if edge.kind == kind) for kind in ("sample", "reshard")}

    @cached_property
    def _ends(self) -> tuple[dict[str, list[Edge]], dict[str, list[Edge]]]:
        into = dict[str, list[Edge]]()
        out = dict[str, list[Edge]]()
        for edge in self.samples():
            into.setdefault(edge.dst, []).append(edge)
            out.setdefault(edge.src, []).append(edge)
        return into, out

    def samples(self) -> tuple[Edge, ...]:
        return self._edges_by_kind["sample"]

    def into(self, node: str) -> Sequence[Edge]:
        """Return the sample edges that lead to a node."""
        return self._ends[0].get(node, ())

    def out_of(self, node: str) -> Sequence[Edge]:
        """Return the sample edges that begin at a node."""
        return self._ends[1].get(node, ())

    def reshards(self) -> tuple[Edge, ...]:
        return self._edges_by_kind["reshard"]

    @cached_property
    def _levels(self) -> dict[str, int]:
        levels = {column.name: column.level for column in self.columns}
        # There are few levels, however many columns.
        return {
            node.name: max(dict.fromkeys(levels[column] for column in node.reads), key=self.depth, default=0)
            for node in self.nodes
        }

    def level(self, node: Node) -> int:
        """Return the level of a node's rows: the deepest level that it reads (source: 0)."""
        return self._levels[node.name]

    def depth(self, level: int) -> int:
        """Return the number of levels above a level."""
        return 0 if level == 0 else 1 + self.depth(self.under[level])

    def row_column(self, level: int) -> str:
        """Return the column whose name is used as a name for the rows of a level.

        It is the first column of tokens that a node writes at this level. If no column of tokens is written at this
        level, it is the first column of any type that is written at this level.
        """
        columns = [
            column
            for node in self.verb("generate" if level else "source")
            for column in node.writes
            if self.column(column).level == level
        ]
        return next(
            (column for column in columns if self.column(column).element == "i32"), columns[0] if columns else "row"
        )

    def common(self, one: int, other: int) -> int:
        """Return the deepest common ancestor of two levels; a level is its own ancestor."""
        while one != other:
            one, other = (self.under[one], other) if self.depth(one) >= self.depth(other) else (one, self.under[other])
        return one

    def fan(self, level: int, above: int = 0) -> int:
        """Return the number of rows of `level` below each row of `above`, before filters."""
        return max(1, self.rows[level] // max(1, self.rows[above]))

    def row_level(self, node: Node) -> int:
        """Return the level of the rows that a node makes.

        For a generation, it is the level of the responses. For other nodes, it is the level of the rows that they read.
        """
        return max([self.level(node), *(self.column(column).level for column in node.writes)], key=self.depth)

    def unit_level(self, node: Node) -> int:
        """Return the level of the column that `per` names; if none, of the node's rows."""
        return self.column(node.per).level if node.per not in ("row", "batch") else self.level(node)

    @cached_property
    def optional(self) -> frozenset[str]:
        """The columns in which values may be missing: single numbers that no node reads.

        A run uses such a column only to report the column's mean.
        """
        read = {column for node in self.nodes for column in (*node.reads, *node.weight_columns)}
        return frozenset(
            column.name
            for column in self.columns
            if column.element in ("f32", "bf16") and not column.dims and column.name not in read
        )

    def bound(self, column: str) -> int:
        """Return the maximum number of elements of a column in one row.

        Text and json have no maximum. For such a column, the result is the product of its declared dimensions.
        """
        total = 1
        for dim in self.column(column).dims:
            total *= self.bound(dim.like) if dim.like else dim.size
        return total

    def row_bytes(self, column: str) -> int:
        """Return the maximum number of bytes of a column in one row."""
        return self.bound(column) * ELEMENTS[self.column(column).element]

    @cached_property
    def column_bytes(self) -> dict[str, int]:
        """The maximum bytes of each column in an iteration; 0 for text and json."""
        # Text has no bound, and `row_bytes` of a scalar text column would be one byte: unknown sizes count as 0.
        sized = (column for column in self.columns if column.element not in ("text", "json"))
        return {column.name: 0 for column in self.columns} | {
            column.name: self.row_bytes(column.name) * self.rows[column.level] for column in sized
        }

    @cached_property
    def flow(self) -> Flow:
        """The order of nodes along sample edges, and the columns that each edge carries."""
        return Flow(self)
