"""The IR: what an algorithm is, apart from where it runs.

Invariant: a Graph is immutable, its names are resolved and its expressions evaluated as far as params reach; every part
knows the span that it came from. It is logical: one node a worker state, never one a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

from ..diagnostics import NOWHERE, Span
from .flow import Flow
from .views import GraphViews

Value = bool | int | float | str | None
ELEMENTS = {"i32": 4, "i64": 8, "f32": 4, "bf16": 2, "bool": 1, "text": 1, "json": 1}
KINDS = {
    "policy": ("generate", "infer", "update"),
    "value": ("infer", "update"),
    "reward_model": ("infer", "update"),
}


@dataclass(frozen=True)
class Expr:
    """An evaluated expression.

    `kind` is number, string, bool, quantity (value in bytes, bytes/s, FLOP/s or seconds; `unit` says which), word (an
    option word), column, state, call, list, neg or an operator sign. `value` is the literal or the name, `args` the
    operands, `keys` a call's argument names ("" for a positional one).
    """

    kind: str
    value: Value = None
    args: tuple[Expr, ...] = ()
    keys: tuple[str, ...] = ()
    unit: str = ""
    span: Span = NOWHERE

    def literal(self) -> Any:
        """The Python value of a literal, a word, or a list of them."""
        if self.kind == "list":
            return [a.literal() for a in self.args]
        return -self.args[0].literal() if self.kind == "neg" else self.value

    def calls(self) -> tuple[Expr, ...]:
        """The calls in an expression, itself perhaps; not those in their arguments."""
        return (self,) if self.kind == "call" else tuple(call for part in self.args for call in part.calls())

    def options(self) -> dict[str, Any]:
        """The options of a call, by name: its arguments but for the columns that they bind."""
        return {k: a.literal() for k, a in zip(self.keys, self.args, strict=True) if a.kind != "column"}

    def columns(self) -> dict[str, str]:
        """The columns that a call binds to parameters of other names, by parameter."""
        return {k: str(a.value) for k, a in zip(self.keys, self.args, strict=True) if a.kind == "column"}

    def __str__(self) -> str:
        if self.kind == "call":
            inner = (f"{k} = {a}" if k else str(a) for k, a in zip(self.keys, self.args, strict=True))
            return f"{self.value}({', '.join(inner)})"
        if self.kind == "list":
            return f"[{', '.join(map(str, self.args))}]"
        if self.kind == "neg":
            return f"-{self.args[0]}"
        if self.kind == "string":
            return f'"{self.value}"'
        if self.kind == "bool":
            return "true" if self.value else "false"
        if self.args:
            left, right = (
                f"({a})" if a.kind in ("+", "-") and self.kind not in ("+", "-") else str(a) for a in self.args
            )
            return f"{left} {self.kind} {right}"
        if isinstance(self.value, float):
            return f"{self.value:g}{self.unit and ' ' + self.unit}"
        return f"{self.value}{self.unit and ' ' + self.unit}"


@dataclass(frozen=True)
class Dimension:
    """A dimension of a column: `size` fixed, or at most `size` when ragged, or as long as column `like` of the same
    row."""

    size: int = 0
    ragged: bool = False
    like: str = ""


@dataclass(frozen=True)
class Column:
    """A field of a row of a level: 0 are the source's rows (prompts), each generation makes one more under that of its
    prompts. `per` names the column that has such a row's value, where the type says so."""

    name: str
    element: str
    dims: tuple[Dimension, ...] = ()
    level: int = 0
    span: Span = NOWHERE
    per: str = ""


@dataclass(frozen=True)
class State:
    """A value that outlives the iteration, `initial` at first; with `per`, one for each row of that column."""

    name: str
    element: str
    initial: Expr
    per: str = ""
    span: Span = NOWHERE


@dataclass(frozen=True)
class Worker:
    """One set of weights, or (kind `function`) a place where Python runs."""

    name: str
    kind: str
    frozen: bool = False
    model: str = ""
    span: Span = NOWHERE
    follows: str = ""  # the worker whose weights a frozen one takes over, after `every` so many-th iteration
    every: int = 1
    decay: float = 0.0

    def due(self, number: int) -> bool:
        """Return whether its weights change after iteration `number`."""
        return bool(self.follows) and (number + 1) % self.every == 0

    @property
    def following(self) -> str:
        """What it follows, and how, in words; "" for none."""
        if not self.follows:
            return ""
        how = f" every {self.every} iterations" if self.every > 1 else ""
        return f"follows {self.follows}{how}" + (f", decay {self.decay:g}" if self.decay else "")


class WithAttributes:
    """A part of a graph with `attributes`, as the program states them. Their typed values are a declaration's:
    `Update.of(node)`."""

    attributes: dict[str, Expr]
    span: Span

    def stated(self, key: str) -> Expr | None:
        """The expression that is stated for an attribute, for messages of it; None where it has its default."""
        return self.attributes.get(key)

    def at(self, key: str) -> Span:
        """Where an attribute stands; where that is not known, the part itself."""
        expr = self.stated(key)
        return expr.span if expr is not None and expr.span.line else self.span

    @cached_property
    def views(self) -> dict[type, Any]:
        return {}  # what each declaration made of the attributes (attribute_schema.py)


@dataclass(frozen=True)
class Node(WithAttributes):
    """A node of the graph: a worker state, such as `actor.generate`.

    - `per`: what it sees at once: a row, the batch, or the name of a column whose rows stay together, as `prompt`.
    - `states`: the states that it reads, with the values that the iteration before left. `gives`: where it
      gives next values of states, all that it writes, columns and states, in order.
    - Of an update: `whole`: a term of its loss needs all rows of the mini-batch at once; `scores`: the columns of
      tokens of which terms take the score of each row.
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

    @property
    def sets(self) -> tuple[str, ...]:
        """The states whose next value it gives."""
        return tuple(name for name in self.gives if name not in self.writes)

    @property
    def weighs(self) -> tuple[str, ...]:
        """Of the source, its columns that rows are drawn by."""
        call = self.stated("weights")
        return () if call is None else tuple(name for name in self.writes if name in call.columns().values())

    @property
    def filters(self) -> bool:
        """Whether rows leave the iteration here: it is a filter, or rows leave that fail, or whose responses are to
        go on in the next one."""
        return "keep" in self.attributes or "select" in self.attributes or self.fails or self.cuts

    @property
    def cuts(self) -> bool:
        """Whether it is a generation whose responses may go on in the next iteration."""
        said = self.stated("partial")
        return said is not None and float(said.literal()) > 0

    @property
    def fails(self) -> bool:
        """Whether rows that fail leave it."""
        said = self.stated("on_failure")
        return said is not None and said.value != "stop"


@dataclass(frozen=True)
class Edge(WithAttributes):
    """`kind` sample: rows go from `src` to `dst`; reshard: the weights of src's worker go to `dst`."""

    kind: Literal["sample", "reshard"]
    src: str
    dst: str
    attributes: dict[str, Expr] = field(default_factory=dict)
    span: Span = NOWHERE


@dataclass(frozen=True, repr=False)
class Graph(GraphViews):
    """An algorithm: nodes in dependency order, the source first (a node with verb `source`)."""

    name: str
    params: dict[str, Value]
    columns: tuple[Column, ...]
    workers: tuple[Worker, ...]
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    rows: tuple[
        int, ...
    ]  # rows an iteration at each level: (prompts, responses), and more where there are more generations
    span: Span = NOWHERE
    states: tuple[State, ...] = ()
    under: tuple[int, ...] = (-1, 0)  # the level above each: several may lie side by side under one

    def __getstate__(self) -> dict[str, Any]:
        """What a pickle holds: nothing that was worked out, some of which is known by the ids of objects."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def worked_out(self) -> dict[tuple[Any, ...], Any]:
        return {}  # of plans of it, by what was asked: a planner asks thousands the same

    @cached_property
    def _index(self) -> tuple[dict[str, Node], dict[str, Column], dict[str, Worker], dict[str, Node]]:
        return (
            {n.name: n for n in self.nodes},
            {c.name: c for c in self.columns},
            {w.name: w for w in self.workers},
            {c: n for n in self.nodes for c in n.writes},
        )

    def node(self, name: str) -> Node:
        return self._index[0][name]

    def column(self, name: str) -> Column:
        return self._index[1][name]

    def worker(self, name: str) -> Worker:
        return self._index[2][name]

    def writer(self, column: str) -> Node:
        """The node that writes a column."""
        return self._index[3][column]

    @cached_property
    def writers(self) -> dict[str, list[Node]]:
        """The nodes that write each column, in the order of the text: one, as a check sees to."""
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            for column in node.writes:
                found.setdefault(column, []).append(node)
        return {
            column: sorted(nodes, key=lambda n: n.span) if len(nodes) > 1 else nodes for column, nodes in found.items()
        }

    @cached_property
    def weighty(self) -> tuple[str, ...]:
        """The workers whose weights change in a run: those that are trained, then those that follow them."""
        trained = [n.worker for n in self.verb("update")]
        return tuple(dict.fromkeys([*trained, *(w.name for w in self.workers if w.follows and self.sharing(w.name))]))

    def sharing(self, worker: str) -> tuple[Node, ...]:
        """The nodes that compute with the weights that a worker keeps: its updates first, then its infers, in the order
        of the text."""
        return self._sharing.get(worker, ())

    @cached_property
    def _sharing(self) -> dict[str, tuple[Node, ...]]:
        found = {w: [n for n in nodes if n.verb in ("infer", "update")] for w, nodes in self._groups[1].items()}
        return {w: tuple(sorted(some, key=lambda n: (n.verb != "update", n.span))) for w, some in found.items()}

    @cached_property
    def _groups(self) -> tuple[dict[str, tuple[Node, ...]], dict[str, tuple[Node, ...]]]:
        verbs = dict[str, list[Node]]()
        workers = dict[str, list[Node]]()
        for node in self.nodes:
            verbs.setdefault(node.verb, []).append(node)
            workers.setdefault(node.worker, []).append(node)
        return {k: tuple(v) for k, v in verbs.items()}, {k: tuple(v) for k, v in workers.items()}

    def verb(self, verb: str) -> tuple[Node, ...]:
        return self._groups[0].get(verb, ())

    def of(self, worker: str) -> tuple[Node, ...]:
        """The nodes of a worker."""
        return self._groups[1].get(worker, ())

    @cached_property
    def _kinds(self) -> dict[str, tuple[Edge, ...]]:
        return {kind: tuple(e for e in self.edges if e.kind == kind) for kind in ("sample", "reshard")}

    @cached_property
    def _ends(self) -> tuple[dict[str, list[Edge]], dict[str, list[Edge]]]:
        into = dict[str, list[Edge]]()
        out = dict[str, list[Edge]]()
        for edge in self.samples():
            into.setdefault(edge.dst, []).append(edge)
            out.setdefault(edge.src, []).append(edge)
        return into, out

    def samples(self) -> tuple[Edge, ...]:
        return self._kinds["sample"]

    def into(self, node: str) -> Sequence[Edge]:
        """The sample edges that lead to a node."""
        return self._ends[0].get(node, ())

    def out_of(self, node: str) -> Sequence[Edge]:
        """The sample edges that begin at a node."""
        return self._ends[1].get(node, ())

    def reshards(self) -> tuple[Edge, ...]:
        return self._kinds["reshard"]

    @cached_property
    def _levels(self) -> dict[str, int]:
        levels = {c.name: c.level for c in self.columns}
        # There are few levels, however many columns.
        return {n.name: max(dict.fromkeys(levels[c] for c in n.reads), key=self.depth, default=0) for n in self.nodes}

    def level(self, node: Node) -> int:
        """The level of the rows that a node works on: the deepest that it reads (the source's own is 0)."""
        return self._levels[node.name]

    def depth(self, level: int) -> int:
        """How many levels lie above one."""
        return 0 if level == 0 else 1 + self.depth(self.under[level])

    def made(self, level: int) -> str:
        """The column that stands for the rows of a level: the tokens that were generated, or the first of the
        source."""
        found = [
            c for n in self.verb("generate" if level else "source") for c in n.writes if self.column(c).level == level
        ]
        return next((c for c in found if self.column(c).element == "i32"), found[0] if found else "row")

    def common(self, one: int, other: int) -> int:
        """The deepest level that is one of two, or above it, and one of the other's likewise."""
        while one != other:
            one, other = (self.under[one], other) if self.depth(one) >= self.depth(other) else (one, self.under[other])
        return one

    def fan(self, level: int, above: int = 0) -> int:
        """Rows of a level under each row of one above it, before filters."""
        return max(1, self.rows[level] // max(1, self.rows[above]))

    def row_level(self, node: Node) -> int:
        """The level of the rows that a node makes: a generation's own, else that of the rows that it works on."""
        return max([self.level(node), *(self.column(c).level for c in node.writes)], key=self.depth)

    def unit_level(self, node: Node) -> int:
        """The level of what a node is handed at once: its scope's column's, else its rows'."""
        return self.column(node.per).level if node.per not in ("row", "batch") else self.level(node)

    @cached_property
    def optional(self) -> frozenset[str]:
        """The columns that a row may have no value of: numbers that no node reads, which are there for their mean."""
        read = {c for n in self.nodes for c in (*n.reads, *n.weighs)}
        return frozenset(
            c.name for c in self.columns if c.element in ("f32", "bf16") and not c.dims and c.name not in read
        )

    def bound(self, column: str) -> int:
        """The most elements that a row of the column can hold (text and json count as the bound of a prompt: unknown,
        0)."""
        total = 1
        for dim in self.column(column).dims:
            total *= self.bound(dim.like) if dim.like else dim.size
        return total

    def row_bytes(self, column: str) -> int:
        """The most bytes that a row of the column can hold."""
        return self.bound(column) * ELEMENTS[self.column(column).element]

    @cached_property
    def column_bytes(self) -> dict[str, int]:
        """The bytes of each column in an iteration, at its bound."""
        # Text has no bound, and `row_bytes` of a scalar text column is one byte: unknown counts as nothing.
        sized = (c for c in self.columns if c.element not in ("text", "json"))
        return {c.name: 0 for c in self.columns} | {c.name: self.row_bytes(c.name) * self.rows[c.level] for c in sized}

    @cached_property
    def flow(self) -> Flow:
        """Who comes after whom along the sample edges, and what each edge carries."""
        return Flow(self)
