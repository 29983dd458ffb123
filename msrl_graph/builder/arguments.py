"""Conversion of the arguments of Python API calls to nodes of a syntax tree.

Invariant: each syntax tree node is one that `parse` could have returned. A node has the span that its argument has in
the Python file. A text that the grammar rejects raises a Fault. An object that cannot occur in a program also raises a
Fault.
"""

from __future__ import annotations

import linecache
import math
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import NoReturn, SupportsIndex, TypeVar

from ..diagnostics import Diagnostic, Fault, Span, kind_of, render
from ..dsl import ast
from ..dsl.data_sources import MIX
from ..dsl.parse import MAX_DEPTH, parse_edge, parse_expr, parse_type
from ..dsl.syntax_errors import RESERVED
from ..ir.data_options import DataOptions
from ..ir.kinds import StringKind
from ..ir.statements import STATEMENTS
from . import pickled_functions
from .callsite import CallArgument, CallSite, caller

Value = bool | SupportsIndex | float | str | Callable[..., object] | Sequence["Value"]
Names = str | Sequence[str]
T = TypeVar("T")

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
FUNCTION = re.compile(r'[^"\n]+\.py:\w+')
STRINGS = {
    (statement, key)
    for statement, options in STATEMENTS.items()
    for key, kind in options.kinds().items()
    if isinstance(kind, StringKind)
}


class Arguments:
    """The arguments of a method call, as nodes of a syntax tree.

    Each method converts a value. If the language does not accept the value, the method raises a Fault, located in the
    Python file.
    """

    def __init__(self, *parameters: str) -> None:
        self.site: CallSite = caller(Path(__file__).parent.parent, parameters)

    @property
    def span(self) -> Span:
        """The span of the call in the Python file."""
        return self.site.span

    def argument(self, name: str, index: int = 0) -> CallArgument:
        return self.site.argument(name, index)

    def key(self, name: str) -> ast.Name:
        return self.word(name, self.site.key(name))

    def string(self, value: object, wants: str, span: Span) -> str:
        """Return a value as a str that can be written to an `.rlg` file.

        Raises Fault for other types (`wants` says what is expected), and for a str that UTF-8 cannot encode.
        """
        if not isinstance(value, str):
            self.refuse(value, wants, span)
        try:
            value.encode()
        except UnicodeEncodeError:
            self.fail("the str is not UTF-8 text: it contains half of a surrogate pair", span, code="bad-value")
        return value

    def flag(self, parameter: str, value: object) -> bool:
        if not isinstance(value, bool):
            self.refuse(value, f"`{parameter}` is True or False", self.argument(parameter).span)
        return value

    def word(self, text: str, span: Span) -> ast.Name:
        """Return a text as a name. Raises Fault if the text cannot be a name."""
        self.string(text, "a name is a str", span)
        if text in RESERVED:
            self.fail(f"`{text}` is a reserved word", span, "choose another name")
        if not NAME.fullmatch(text):
            self.fail(
                f"`{text}` is not a name", span, "a name is letters, digits and `_`, and does not begin with a digit"
            )
        return ast.Name(text, span)

    def name(self, parameter: str, text: str) -> ast.Name:
        part = self.argument(parameter)
        self.string(text, f"`{parameter}` is a str", part.span)
        return self.word(text, text_span(part, text, 0, len(text)))

    def _split_names(self, parameter: str, names: Names, index: int = 0) -> Iterator[tuple[str, Span]]:
        part = self.argument(parameter, index)
        wants = f"`{parameter}` takes names: a str with commas between them, or a list of str"
        if not isinstance(names, str | Sequence):
            self.refuse(names, wants, part.span)
        parts = (
            [(names, part)]
            if isinstance(names, str)
            else [(listed, part.item(position)) for position, listed in enumerate(names)]
        )
        texts = [(self.string(text, wants, where.span), where) for text, where in parts]
        if not any(text.replace(",", "").strip() for text, _ in texts):
            self.fail(f"`{parameter}` is empty", part.span, "name at least one")
        for text, where in texts:
            for match in re.finditer(r"[^,]+", text) if text.strip() else ():
                name = match[0].strip()
                start = match.start() + len(match[0]) - len(match[0].lstrip())
                yield name, text_span(where, text, start, start + len(name))

    def names(self, parameter: str, names: Names) -> tuple[ast.Name, ...]:
        return tuple(self.word(text, span) for text, span in self._split_names(parameter, names))

    def refs(self, parameter: str, names: Names, index: int = 0) -> tuple[ast.Ref, ...]:
        return tuple(self.ref(text, span) for text, span in self._split_names(parameter, names, index))

    def ref(self, text: str, span: Span, parts: int = 2) -> ast.Ref:
        """Return a reference of at most `parts` names with dots between them."""
        if text != "source":
            for word in text.split(".", parts - 1):
                self.word(word, span)
        return ast.Ref(text, span)

    def edge(self, parameter: str, value: object, kind: str = "") -> ast.EdgeDecl | None:
        """Return the edge that a str with an arrow describes; None for any other value.

        `kind` (`sample` or `reshard`) is the kind of edge that is expected; the other kind raises a Fault.
        """
        if not isinstance(value, str) or not ("->" in value or "=>" in value):
            return None
        part = self.argument(parameter)
        edge = self.text(self.string(value, "", part.span), part, parse_edge)
        if kind == "sample" != edge.kind:
            self.fail("a sample edge has `->`", edge.span, "use `reshard` for an edge with `=>`")
        if kind == "reshard" != edge.kind:
            self.fail("a resharding edge has `=>`", edge.span, "use `edge` for an edge with `->`")
        return edge

    def sample_edge(self, groups: Sequence[Names], attributes: Mapping[str, Value]) -> ast.EdgeDecl:
        """Return the sample edge that the items of `groups` describe.

        `groups` is either a single text with arrows, or several lists of nodes. From each list of nodes, an arrow leads
        to the next list.
        """
        attrs = self.attrs(("sample edge",), attributes)
        if len(groups) == 1 and (edge := self.edge("groups", groups[0], "sample")):
            return replace(edge, attrs=(*edge.attrs, *attrs))
        if len(groups) < 2:
            help = 'name both, as in `edge("source -> actor.generate")`'
            self.fail("an edge needs two ends", self.span, help)
        ends = tuple(self.refs("groups", group, position) for position, group in enumerate(groups))
        return ast.EdgeDecl("sample", ends, attrs, self.span)

    def resharding_edge(self, src: Names, dst: Names | None, attributes: Mapping[str, Value]) -> ast.EdgeDecl:
        """Return the resharding edge from `src` to `dst`.

        If `dst` is None, `src` is a text such as `A => B`, with both ends of the edge.
        """
        attrs = self.attrs(("resharding edge",), attributes)
        if dst is None and (edge := self.edge("src", src, "reshard")):
            return replace(edge, attrs=(*edge.attrs, *attrs))
        if dst is None:
            help = 'name both, as in `reshard("actor.update => actor.generate")`'
            self.fail("a resharding edge needs two ends", self.span, help)
        return ast.EdgeDecl("reshard", (self.refs("src", src), self.refs("dst", dst)), attrs, self.span)

    def attrs(
        self, statements: tuple[str, ...], values: Mapping[str, Value], quoted: bool = False
    ) -> tuple[ast.Attr, ...]:
        """Return keyword arguments as attributes of a statement.

        `statements` are the kinds of statement that may declare the attributes. With `quoted`, each str becomes a
        quoted string of the language. Without `quoted`, a str becomes a quoted string only if the attribute is declared
        as a string. Every other str is parsed as an expression.
        """
        attributes = []
        for key, value in values.items():
            part = self.argument(key)
            string = quoted or any((statement, key) in STRINGS for statement in statements)
            attributes.append(
                ast.Attr(self.key(key), self.expr(value, part, string), self.site.key(key).extend_to(part.span))
            )
        return tuple(attributes)

    def assignment(self, name: str, value: Value) -> tuple[ast.Name, ast.Expr, Span]:
        """Return the name, the value and the span of a keyword argument."""
        part = self.argument(name)
        return self.key(name), self.expr(value, part), self.site.key(name).extend_to(part.span)

    def column(self, name: str, parameter: str, kind: str) -> ast.ColumnDecl:
        part = self.argument(parameter)
        return ast.ColumnDecl(self.key(name), self.type(kind, part), self.site.key(name).extend_to(part.span))

    def type(self, kind: str, part: CallArgument) -> ast.Type:
        return self.text(self.string(kind, 'a column\'s type is a str, as in "f32"', part.span), part, parse_type)

    def path(self, parameter: str, value: str | os.PathLike[str]) -> ast.Literal_:
        span = self.argument(parameter).span
        text = os.fspath(value) if isinstance(value, os.PathLike) else value
        return ast.Literal_("string", self.string(text, f"`{parameter}` is a str or a Path", span), span)

    def data_attrs(self, values: Mapping[str, Value]) -> tuple[ast.Attr, ...]:
        """Return keyword arguments as attributes of `data`; names of fields are strings."""
        options = DataOptions.declared()
        return tuple(
            attr
            for key, value in values.items()
            for attr in self.attrs(("data",), {key: value}, quoted=key not in options)
        )

    def data_target(self, parameter: str, value: str | os.PathLike[str] | Mapping[str, int]) -> ast.Expr:
        """Return the path of data, or a mixture, given as a mapping to weights."""
        if not isinstance(value, Mapping):
            return self.path(parameter, value)
        part = self.argument(parameter)
        args = tuple(
            ast.Arg(self.name(parameter, name), self.expr(weight, part), part.span) for name, weight in value.items()
        )
        return ast.Call(ast.Name(MIX, part.span), args, part.span)

    def range(self, parameter: str, value: int | tuple[int, int] | None) -> ast.Range | None:
        if value is None:
            return None
        span = self.argument(parameter).span
        pair = value if isinstance(value, tuple | list) else (value, value)
        ends = [number for item in pair if (number := _as_integer(item)) is not None]
        if len(ends) != 2 or len(pair) != 2:
            self.refuse(value, f"`{parameter}` takes a whole number, or a pair with the first and the last", span)
        first, last = (self.integer(end, span) for end in ends)
        if first < 0 or last < 0:
            self.fail(f"`{parameter}` are counted from 0", span, code="bad-value")
        return ast.Range(first, last, span)

    def integer(self, number: int, span: Span) -> int:
        if abs(number) >= 10**18:
            self.fail("the number is too large", span, code="bad-value")
        return number

    def expr(self, value: Value, part: CallArgument, quoted: bool = False, depth: int = 0) -> ast.Expr:
        span = part.span
        if depth > MAX_DEPTH:
            self.fail("the list is nested too deeply", span, code="bad-value")
        if isinstance(value, str):
            self.string(value, "", span)
            if quoted or FUNCTION.fullmatch(value):
                return ast.Literal_("string", value, span)
            return self.text(value, part, parse_expr)
        if isinstance(value, bool):
            return ast.Literal_("bool", value, span)
        if (integer := _as_integer(value)) is not None:
            return _signed(ast.Literal_("int", abs(self.integer(integer, span)), span), integer < 0)
        if isinstance(value, Real):
            number = _as_float(value)
            if not math.isfinite(number):
                self.fail(f"`{number}` is not a number of the language", span, code="bad-value")
            return _signed(ast.Literal_("float", abs(number), span), math.copysign(1, number) < 0)
        if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
            return ast.List(
                tuple(self.expr(item, part.item(position), quoted, depth + 1) for position, item in enumerate(value)),
                span,
            )
        if callable(value):
            return ast.Literal_("string", self._locate_function(value, span), span)
        self.refuse(value, "a value is a number, a bool, a str, a list or a function", span)

    def _locate_function(self, function: Callable[..., object], span: Span) -> str:
        """Return `file.py:name` of a function, relative to the folder of the Python file.

        A function that is not at the top level of a file is pickled first.
        """
        if (home := pickled_functions.find_home(function)) is None:
            if not isinstance(function, pickled_functions.Given):
                self.fail(
                    f"`{_display_name(function)}` is not a function written in Python",
                    span,
                    "wrap it in one, or in a lambda",
                    "unknown-function",
                )
            try:
                home = pickled_functions.ship(function)
            except (TypeError, ValueError, OSError) as error:
                help = "define it with `def` at the top level of a file; it can open or import what it needs there"
                message = (
                    f"`{_display_name(function)}` is not at the top level of a file and cannot be pickled: {error}"
                )
                self.fail(message, span, help, "unknown-function")
        path, name = home
        folder = Path(span.file).resolve().parent
        return f"{path.relative_to(folder) if path.is_relative_to(folder) else path}:{name}"

    def text(self, value: str, part: CallArgument, read: Callable[[str, str], T]) -> T:
        """Parse a text of the language with the function `read`, such as `parse_expr`.

        The spans of the result are in the Python file. `part` is the argument that has the text.
        """
        try:
            tree = read(value, part.span.file)
        except Fault as fault:
            (diagnostic,) = fault.diagnostics
            where = "" if part.shows(value) else f", in `{value}`"
            related = tuple((part.inside(value, span), note) for span, note in diagnostic.related)
            self._raise_rendered(
                Diagnostic(
                    diagnostic.code,
                    diagnostic.message + where,
                    part.inside(value, diagnostic.span),
                    diagnostic.help,
                    diagnostic.severity,
                    related,
                )
            )
        return ast.map_spans(tree, lambda span: part.inside(value, span))

    def refuse(self, value: object, wants: str, span: Span) -> NoReturn:
        """Raise a Fault for a value of the wrong type; `wants` says what is expected."""
        self.fail(f"{wants}, not {kind_of(value)}", span, code="bad-value")

    def fail(self, message: str, span: Span, help: str = "", code: str = "syntax") -> NoReturn:
        self._raise_rendered(Diagnostic(code, message, span, help))

    def reraise(self, fault: Fault) -> NoReturn:
        """Raise a Fault again, with a text that shows the lines of the Python file."""
        (diagnostic,) = fault.diagnostics
        self._raise_rendered(diagnostic)

    def _raise_rendered(self, diagnostic: Diagnostic) -> NoReturn:
        fault = Fault(diagnostic)
        files = {diagnostic.span.file, *(span.file for span, _ in diagnostic.related)}
        fault.text = render(diagnostic, {file: "".join(linecache.getlines(file)) for file in files})
        raise fault from None


def text_span(part: CallArgument, text: str, start: int, end: int) -> Span:
    """Return the place of `text[start:end]` in the Python file, as a span.

    `part` is the argument that contains `text`.
    """

    def place(offset: int) -> tuple[int, int]:
        return text.count("\n", 0, offset) + 1, offset - (text.rfind("\n", 0, offset) + 1) + 1

    return part.inside(text, Span(part.span.file, *place(start), *place(end)))


def _signed(literal: ast.Literal_, negative: bool) -> ast.Expr:
    return ast.Neg(literal, literal.span) if negative else literal


def _as_integer(value: object) -> int | None:
    """Return a value as a whole number; None if the value is not a whole number.

    The result is also None if the method `__index__` of the value raises TypeError, as for an array.
    """
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _as_float(value: Real) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _display_name(function: object) -> str:
    name = getattr(function, "__qualname__", "")
    return name if isinstance(name, str) and name else type(function).__name__
