"""Lowering of the params, columns and states that an algorithm declares.

Invariant: params, columns, states, workers and labels share one namespace. If a declaration has a mistake, its name
stays declared, so that statements that use the name report no further mistake.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import TypeVar

from ..diagnostics import Span, nearest
from ..ir.graph import ELEMENTS, Column, Dimension, Expr, State
from ..ir.kinds import COUNT
from . import ast
from .attributes import read_as, show_value
from .expressions import Names, Problems, evaluate, mistake

T = TypeVar("T")
UNKNOWN = "?"  # element of a column whose type is wrong; checks skip it


class Declarations:
    """The declarations of one algorithm.

    `names` is available after the params are evaluated.
    """

    def __init__(self, algorithm: ast.AlgorithmDecl, problems: Problems) -> None:
        self.algorithm = algorithm
        self.problems = problems
        # params, columns, states, workers and labels share one name space
        self.declared: dict[str, tuple[str, Span]] = {}
        self.params: dict[str, Expr | None] = {}
        self.columns: dict[str, Column] = {}
        self.states: dict[str, State] = {}
        self.doubled: set[str] = set()

    def _statements(self, kind: type[T]) -> Iterator[T]:
        return (statement for statement in self.algorithm.body if isinstance(statement, kind))

    @cached_property
    def _other_names(self) -> dict[str, str]:
        return {name: kind for name, (kind, _) in self.declared.items() if kind != "param"}

    @cached_property
    def names(self) -> Names:
        """The names that an expression can use; available after the params are evaluated."""
        return Names(self.params, self._other_names)

    @cached_property
    def _value_names(self) -> frozenset[str]:
        """The names that a call can take as arguments: columns and states."""
        return frozenset((*self.columns, *self.states))

    # Names

    def _declare(self) -> None:
        for statement in self.algorithm.body:
            match statement:
                case ast.ParamDecl():
                    self._declare_name(statement.name, "param")
                case ast.ColumnsDecl():
                    for column in statement.columns:
                        self._declare_name(column.name, "column")
                case ast.StateDecl():
                    self._declare_name(statement.column.name, "state")
                case ast.WorkerDecl():
                    self._declare_name(statement.name, "worker")
                case ast.NodeDecl(label=ast.Name() as label):
                    self._declare_name(label, "label")

    def _declare_name(self, name: ast.Name, kind: str) -> None:
        if name.text in self.declared:
            other, first = self.declared[name.text]
            note = ((first, f"the {other} `{name.text}` is declared here"),)
            self.doubled.add(name.text)
            self.problems.diagnostics += mistake(
                "duplicate-name", f"`{name.text}` is declared twice", name.span, related=note
            ).diagnostics
        else:
            self.declared[name.text] = (kind, name.span)

    def _owns_name(self, name: ast.Name, kind: str) -> bool:
        """Return whether this declaration of `name` is the first declaration of the name.

        `kind` is what the declaration declares: a column, a state, ….
        """
        return self.declared.get(name.text) == (kind, name.span)

    # Params and columns

    def _lower_columns(self) -> None:
        declared = [
            declaration
            for statement in self._statements(ast.ColumnsDecl)
            for declaration in statement.columns
            if self._owns_name(declaration.name, "column")
        ]
        for column in declared:
            self.columns[column.name.text] = Column(column.name.text, UNKNOWN, span=column.name.span)
            with self.problems.catching():
                dims = self._lower_dims(column)
                per = column.type.per.text if column.type.per else ""
                self.columns[column.name.text] = Column(
                    column.name.text, column.type.element.text, dims, span=column.name.span, per=per
                )
        for column in declared:
            seen = [column.name.text]
            while (dims := self.columns[seen[-1]].dims) and dims[0].like:
                if dims[0].like in seen:
                    message = f"`{column.name.text}` takes its length from itself"
                    self.problems.report(
                        "bad-value", message, column.type.span, "give one column a bound, as in `i32[<= 1024]`"
                    )
                    self.columns[column.name.text] = replace(self.columns[column.name.text], element=UNKNOWN, dims=())
                    break
                seen.append(dims[0].like)

    def _lower_dims(self, column: ast.ColumnDecl) -> tuple[Dimension, ...]:
        kind = column.type
        element = kind.element.text
        if element not in ELEMENTS:
            raise mistake(
                "unknown-name", f"no element type is called `{element}`", kind.element.span, nearest(element, ELEMENTS)
            )
        if kind.per and self.declared.get(kind.per.text, ("",))[0] != "column":
            known = [name for name, (declared_kind, _) in self.declared.items() if declared_kind == "column"]
            raise mistake(
                "unknown-column", f"no column is called `{kind.per.text}`", kind.per.span, nearest(kind.per.text, known)
            )
        if kind.per and kind.per.text == column.name.text:
            raise mistake("bad-value", f"`{column.name.text}` has itself as `per`", kind.per.span, "leave `per` out")
        if element == "json" and kind.dims:
            raise mistake("bad-value", f"a `{element}` has no dimensions", kind.dims[0].span)
        if element == "text" and (len(kind.dims) > 1 or not all(dimension.at_most for dimension in kind.dims)):
            raise mistake(
                "bad-value",
                "a `text` takes no dimension except a bound in tokens",
                kind.dims[0].span,
                "as in `text[<= 1024]`",
            )
        most, words = (3, "three") if element == "i16" else (2, "two")  # routes have layers and experts
        if len(kind.dims) > most:
            message = f"a column of `{element}` has at most {words} dimensions"
            raise mistake("bad-value", message, kind.dims[most].span, "use a column for each")
        for number, dim in zip(("second", "third"), kind.dims[1:], strict=False):
            if dim.at_most or self._is_column(dim.value):
                message = f"the {number} dimension is one number for all rows"
                raise mistake("bad-value", message, dim.span, "as in `f32[response, 64]`")
        if element == "bool" and kind.dims and (len(kind.dims) > 1 or not self._is_column(kind.dims[0].value)):
            raise mistake(
                "bad-value", "a mask takes the length of a column of tokens", kind.span, "as in `bool[response]`"
            )
        return tuple(self._lower_dim(dim) for dim in kind.dims)

    def _is_column(self, value: ast.Expr) -> bool:
        return isinstance(value, ast.NameExpr) and self.declared.get(value.text, ("",))[0] == "column"

    def _lower_dim(self, dim: ast.Dim) -> Dimension:
        value = dim.value
        if isinstance(value, ast.NameExpr) and not dim.at_most and value.text not in self.params:
            kind = self.declared.get(value.text, ("", value.span))[0]
            if kind == "column":
                return Dimension(like=value.text)
            if not kind:
                known = [
                    *self.params,
                    *(name for name, (other_kind, _) in self.declared.items() if other_kind == "column"),
                ]
                raise mistake("unknown-name", f"unknown name `{value.text}`", value.span, nearest(value.text, known))
        size = read_as(COUNT, "[…]", value, self.names).value
        assert isinstance(size, int)
        return Dimension(size, dim.at_most)

    def _lower_state(self, state: ast.StateDecl) -> None:
        name = state.column.name
        kind = state.column.type
        if not self._owns_name(name, "state"):
            return
        element = kind.element.text
        known = [known_element for known_element in ELEMENTS if known_element not in ("text", "json")]
        # A state with a mistake stays declared, so that nodes that read it report no further mistake.
        self.states[name.text] = State(name.text, UNKNOWN, Expr("number", 0), span=name.span)
        if element not in known:
            raise mistake(
                "unknown-name",
                f"a state is a number or a bool, not `{element}`",
                kind.element.span,
                nearest(element, known),
            )
        if kind.dims:
            raise mistake(
                "bad-value",
                "a state is one value and takes no dimensions",
                kind.dims[0].span,
                "`per COLUMN` gives one for each row",
            )
        if kind.per and kind.per.text not in self.columns:
            raise mistake(
                "unknown-column",
                f"no column is called `{kind.per.text}`",
                kind.per.span,
                nearest(kind.per.text, self.columns),
            )
        initial = evaluate(state.value, self.names)
        if initial.kind == "quantity":
            raise mistake(
                "bad-unit", f"the state `{name.text}` is a plain number, and this has a unit", state.value.span
            )
        if initial.kind != ("bool" if element == "bool" else "number"):
            expected = "true or false" if element == "bool" else "a number"
            raise mistake(
                "bad-value",
                f"the initial value of the state `{name.text}` is {expected}, not {show_value(initial)}",
                state.value.span,
            )
        per = kind.per.text if kind.per else ""
        self.states[name.text] = State(name.text, element, initial, per, name.span)
