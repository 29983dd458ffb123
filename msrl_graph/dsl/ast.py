"""The syntax tree of an `.rlg` file: one class for each rule of the grammar.

Invariant: names and numbers are as written. No name is resolved and no expression is evaluated. Every element of the
tree has its span in the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, TypeVar

from ..diagnostics import NOWHERE, Span

T = TypeVar("T")


@dataclass(frozen=True)
class Name:
    text: str
    span: Span


@dataclass(frozen=True)
class Ref:
    """A reference to a node or worker: `worker`, `worker.verb`, a label, or `source`."""

    text: str
    span: Span


@dataclass(frozen=True)
class Literal_:
    """A number, string or bool. `unit` is the unit of a quantity, as written."""

    kind: Literal["int", "float", "string", "bool", "quantity"]
    value: int | float | str | bool
    span: Span
    unit: str = ""


@dataclass(frozen=True)
class NameExpr:
    """An expression that is a single word, or `worker.verb`."""

    text: str
    span: Span


@dataclass(frozen=True)
class Call:
    """A call. If `quoted`, the call is of a user function: `"file.py:function"(…)`."""

    name: Name
    args: tuple[Arg, ...]
    span: Span
    quoted: bool = False


@dataclass(frozen=True)
class Arg:
    key: Name | None
    value: Expr
    span: Span


@dataclass(frozen=True)
class Binary:
    """A binary operation; `op` is + - * / // % or a comparison."""

    op: str
    left: Expr
    right: Expr
    span: Span


@dataclass(frozen=True)
class Neg:
    operand: Expr
    span: Span


@dataclass(frozen=True)
class List:
    items: tuple[Expr, ...]
    span: Span


Expr = Literal_ | NameExpr | Call | Binary | Neg | List


@dataclass(frozen=True)
class Attr:
    key: Name
    value: Expr
    span: Span


@dataclass(frozen=True)
class Dim:
    at_most: bool
    value: Expr
    span: Span


@dataclass(frozen=True)
class Type:
    element: Name
    dims: tuple[Dim, ...]
    per: Name | None
    span: Span


@dataclass(frozen=True)
class ColumnDecl:
    name: Name
    type: Type
    span: Span


@dataclass(frozen=True)
class ParamDecl:
    name: Name
    value: Expr
    span: Span


@dataclass(frozen=True)
class ColumnsDecl:
    columns: tuple[ColumnDecl, ...]
    span: Span


@dataclass(frozen=True)
class StateDecl:
    column: ColumnDecl
    value: Expr
    span: Span


@dataclass(frozen=True)
class WorkerDecl:
    name: Name
    kind: Name
    frozen: bool
    attrs: tuple[Attr, ...]
    span: Span


@dataclass(frozen=True)
class SourceDecl:
    count: Expr
    writes: tuple[Name, ...]
    attrs: tuple[Attr, ...]
    span: Span


@dataclass(frozen=True)
class NodeDecl:
    """A node statement, or a patch: a statement that changes an inherited node.

    - `reads`: the names in the parentheses. A patch has no parentheses, and its `reads` is None.
    - `head`: the span of the statement before its attributes.
    - `patched`: the keys of the attributes that patches have set.
    """

    label: Name | None
    worker: Name
    verb: Name
    reads: tuple[Name, ...] | None
    writes: tuple[Name, ...]
    attrs: tuple[Attr, ...]
    span: Span
    head: Span
    patched: tuple[str, ...] = ()

    @property
    def title(self) -> Span:
        """The span from the label, or from the worker if there is no label, to the verb."""
        return (self.label or self.worker).span.extend_to(self.verb.span)


@dataclass(frozen=True)
class EdgeDecl:
    """A chain of edges, such as `A -> B, C -> D`.

    `groups` are the lists of nodes between the arrows. A resharding edge has two lists.
    """

    kind: Literal["sample", "reshard"]
    groups: tuple[tuple[Ref, ...], ...]
    attrs: tuple[Attr, ...]
    span: Span


@dataclass(frozen=True)
class DropDecl:
    """A `drop` statement of an algorithm.

    A dropped attribute is written as `actor.update.mini_batch`.
    """

    target: Ref | EdgeDecl
    span: Span


AlgorithmStatement = ParamDecl | ColumnsDecl | StateDecl | WorkerDecl | SourceDecl | NodeDecl | DropDecl | EdgeDecl


@dataclass(frozen=True)
class ImportDecl:
    """`import NAME` for an algorithm of msrl_graph, or `import "file.rlg"`."""

    target: str
    is_file: bool
    span: Span


@dataclass(frozen=True)
class AlgorithmDecl:
    name: Name
    extends: Name | None
    body: tuple[AlgorithmStatement, ...]
    span: Span


@dataclass(frozen=True)
class ClusterDecl:
    name: Name
    attrs: tuple[Attr, ...]
    span: Span


@dataclass(frozen=True)
class SetDecl:
    name: Name
    value: Expr
    span: Span


@dataclass(frozen=True)
class ModelDecl:
    name: Name
    target: Literal_
    attrs: tuple[Attr, ...]
    span: Span


@dataclass(frozen=True)
class DataDecl:
    name: Name
    target: Expr
    attrs: tuple[Attr, ...]
    span: Span


@dataclass(frozen=True)
class LayoutDecl:
    nodes: tuple[Ref, ...]
    attrs: tuple[Attr, ...]
    span: Span


@dataclass(frozen=True)
class EngineDecl:
    nodes: tuple[Ref, ...]
    name: Name
    attrs: tuple[Attr, ...]
    span: Span


@dataclass(frozen=True)
class Range:
    """`first..last`. The range includes both numbers."""

    first: int
    last: int
    span: Span


@dataclass(frozen=True)
class PlaceDecl:
    targets: tuple[Ref, ...]
    together: bool
    nodes: Range | None
    devices: Range | None
    span: Span


@dataclass(frozen=True)
class ApartDecl:
    targets: tuple[Ref, ...]
    span: Span


@dataclass(frozen=True)
class OptionsDecl:
    """A statement `dock { … }`, `reshard { … }` or `run { … }`."""

    kind: Literal["dock", "reshard", "run"]
    attrs: tuple[Attr, ...]
    span: Span


@dataclass(frozen=True)
class EvaluateDecl:
    name: Name
    attrs: tuple[Attr, ...]
    span: Span


@dataclass(frozen=True)
class UndoDecl:
    """A deploy's `drop` statement, which removes statements of the extended deploy.

    - `kind`: the keyword of the removed statements, or `edge`.
    - `names`: the nodes or names that the removed statements apply to.
    """

    kind: str
    names: tuple[Ref, ...]
    edge: EdgeDecl | None
    span: Span


DeployStatement = (
    SetDecl
    | ModelDecl
    | DataDecl
    | LayoutDecl
    | EngineDecl
    | PlaceDecl
    | ApartDecl
    | OptionsDecl
    | EvaluateDecl
    | UndoDecl
    | EdgeDecl
)


@dataclass(frozen=True)
class DeployDecl:
    """A deploy.

    In a deploy that `extends` another deploy, `alias` is the name of this deploy, `algorithm` is None, and `cluster` is
    optional (variants.py).
    """

    algorithm: Name | None
    cluster: Name | None
    alias: Name | None
    body: tuple[DeployStatement, ...]
    span: Span
    extends: Name | None = None

    @property
    def name(self) -> Name:
        named = self.alias or self.algorithm
        assert named is not None
        return named

    @property
    def head(self) -> Span:
        """The span of the names before the braces."""
        first, last = (self.alias, self.extends) if self.extends else (self.algorithm, self.alias or self.cluster)
        assert first is not None and last is not None
        return first.span.extend_to(last.span)


Item = ImportDecl | AlgorithmDecl | ClusterDecl | DeployDecl


@dataclass(frozen=True)
class File:
    path: str
    items: tuple[Item, ...]
    span: Span


def map_spans(part: T, place: Callable[[Span], Span]) -> T:
    """Return a copy of a tree with every span replaced by `place(span)`."""

    def walk(value: Any) -> Any:
        if isinstance(value, Span):
            return place(value)
        if isinstance(value, tuple):
            return tuple(walk(item) for item in value)
        if not is_dataclass(value) or isinstance(value, type):
            return value
        return type(value)(**{field.name: walk(getattr(value, field.name)) for field in fields(value)})

    moved: T = walk(part)
    return moved


_WORDLESS = frozenset({Span, Name, Ref, Literal_, str, bool, int, float, type(None)})


def words(part: Any) -> Iterator[str]:
    """Yield the text of each NameExpr in a tree, in the order of the program's text."""
    unvisited = [part]  # iterative: a large program has a million parts
    while unvisited:
        value = unvisited.pop()
        if isinstance(value, NameExpr):
            yield value.text
        elif isinstance(value, tuple):
            unvisited.extend(reversed(value))
        elif type(value) not in _WORDLESS:
            unvisited.extend(reversed(vars(value).values()))


def same_tree(first: File, second: File) -> bool:
    """Return whether two trees are equal; their spans are not compared."""
    return map_spans(first.items, lambda _: NOWHERE) == map_spans(second.items, lambda _: NOWHERE)


def word(part: object) -> str:
    """Return the kind of a tree element: `Node` for a NodeDecl, `Call` for a Call."""
    return type(part).__name__.removesuffix("Decl")
