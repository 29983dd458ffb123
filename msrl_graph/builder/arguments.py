"""The arguments of a statement that is said in Python, to parts of a syntax tree.

Invariant: a part is one that `parse` could have given, with the span of what it was made of; what the grammar would not
take is a Fault, and so is any object whatever that has no place in a program.
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
from ..dsl.parse import MAX_DEPTH, parse_edge, parse_expr, parse_type
from ..dsl.syntax_errors import RESERVED
from ..ir.kinds import StringKind
from ..ir.options import STATEMENTS
from . import pickled_functions
from .callsite import CallArgument, CallSite, caller

Value = bool | SupportsIndex | float | str | Callable[..., object] | Sequence["Value"]
Names = str | Sequence[str]
T = TypeVar("T")

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
FUNCTION = re.compile(r'[^"\n]+\.py:\w+')
STRINGS = {
    (statement, key)
    for statement, said in STATEMENTS.items()
    for key, kind in said.kinds().items()
    if isinstance(kind, StringKind)
}


class Arguments:
    """The arguments of the call of a method, to parts of a syntax tree."""

    def __init__(self, *parameters: str) -> None:
        self.site: CallSite = caller(Path(__file__).parent.parent, parameters)

    @property
    def span(self) -> Span:
        """The place of the call."""
        return self.site.span

    def argument(self, name: str, index: int = 0) -> CallArgument:
        return self.site.argument(name, index)

    def key(self, name: str) -> ast.Name:
        return self.word(name, self.site.key(name))

    def string(self, value: object, wants: str, span: Span) -> str:
        """A str that a file can hold."""
        if not isinstance(value, str):
            self.refuse(value, wants, span)
        try:
            value.encode()
        except UnicodeEncodeError:
            self.fail("the str is no UTF-8 text: it holds half of a surrogate pair", span, code="bad-value")
        return value

    def flag(self, parameter: str, value: object) -> bool:
        if not isinstance(value, bool):
            self.refuse(value, f"`{parameter}` is True or False", self.argument(parameter).span)
        return value

    def word(self, text: str, span: Span) -> ast.Name:
        """A name, if it can be one."""
        self.string(text, "a name is a str", span)
        if text in RESERVED:
            self.fail(f"`{text}` is a reserved word", span, "choose another name")
        if not NAME.fullmatch(text):
            self.fail(f"`{text}` is not a name", span, "a name is letters, digits and `_`, and begins with no digit")
        return ast.Name(text, span)

    def name(self, parameter: str, text: str) -> ast.Name:
        part = self.argument(parameter)
        self.string(text, f"`{parameter}` is a str", part.span)
        return self.word(text, at(part, text, 0, len(text)))

    def _each(self, parameter: str, names: Names, index: int = 0) -> Iterator[tuple[str, Span]]:
        part = self.argument(parameter, index)
        wants = f"`{parameter}` takes names: a str with commas between them, or a list of str"
        if not isinstance(names, str | Sequence):
            self.refuse(names, wants, part.span)
        given = [(names, part)] if isinstance(names, str) else [(n, part.item(i)) for i, n in enumerate(names)]
        texts = [(self.string(text, wants, where.span), where) for text, where in given]
        if not any(text.replace(",", "").strip() for text, _ in texts):
            self.fail(f"`{parameter}` names nothing", part.span, "name at least one")
        for text, where in texts:
            for match in re.finditer(r"[^,]+", text) if text.strip() else ():
                name = match[0].strip()
                start = match.start() + len(match[0]) - len(match[0].lstrip())
                yield name, at(where, text, start, start + len(name))

    def names(self, parameter: str, names: Names) -> tuple[ast.Name, ...]:
        return tuple(self.word(text, span) for text, span in self._each(parameter, names))

    def refs(self, parameter: str, names: Names, index: int = 0) -> tuple[ast.Ref, ...]:
        return tuple(self.ref(text, span) for text, span in self._each(parameter, names, index))

    def ref(self, text: str, span: Span, parts: int = 2) -> ast.Ref:
        """A name of so many parts at most."""
        if text != "source":
            for word in text.split(".", parts - 1):
                self.word(word, span)
        return ast.Ref(text, span)

    def edge(self, parameter: str, value: object, kind: str = "") -> ast.EdgeDecl | None:
        """The edge of a str with an arrow, as it stands in a file; None for all else."""
        if not isinstance(value, str) or not ("->" in value or "=>" in value):
            return None
        part = self.argument(parameter)
        edge = self.text(self.string(value, "", part.span), part, parse_edge)
        if kind == "sample" != edge.kind:
            self.fail("a sample edge has `->`", edge.span, "the edge of `=>` is said by `reshard`")
        if kind == "reshard" != edge.kind:
            self.fail("a resharding edge has `=>`", edge.span, "the edge of `->` is said by `edge`")
        return edge

    def sample_edge(self, groups: Sequence[Names], attributes: Mapping[str, Value]) -> ast.EdgeDecl:
        """The edge of a text with arrows, or of the lists of states between them."""
        attrs = self.attrs(("sample edge",), attributes)
        if len(groups) == 1 and (edge := self.edge("groups", groups[0], "sample")):
            return replace(edge, attrs=(*edge.attrs, *attrs))
        if len(groups) < 2:
            help = 'name both, as in `edge("source -> actor.generate")`'
            self.fail("an edge leads from one state to another", self.span, help)
        ends = tuple(self.refs("groups", group, i) for i, group in enumerate(groups))
        return ast.EdgeDecl("sample", ends, attrs, self.span)

    def resharding_edge(self, src: Names, dst: Names | None, attributes: Mapping[str, Value]) -> ast.EdgeDecl:
        """The edge of a text with an arrow, or of its two ends."""
        attrs = self.attrs(("resharding edge",), attributes)
        if dst is None and (edge := self.edge("src", src, "reshard")):
            return replace(edge, attrs=(*edge.attrs, *attrs))
        if dst is None:
            help = 'name both, as in `reshard("actor.update => actor.generate")`'
            self.fail("weights go from one state to another", self.span, help)
        return ast.EdgeDecl("reshard", (self.refs("src", src), self.refs("dst", dst)), attrs, self.span)

    def attrs(
        self, statements: tuple[str, ...], values: Mapping[str, Value], quoted: bool = False
    ) -> tuple[ast.Attr, ...]:
        """The attributes; `quoted`: each value is a string, however the statement's table says it."""
        found = []
        for key, value in values.items():
            part = self.argument(key)
            string = quoted or any((s, key) in STRINGS for s in statements)
            found.append(ast.Attr(self.key(key), self.expr(value, part, string), self.site.key(key).to(part.span)))
        return tuple(found)

    def assignment(self, name: str, value: Value) -> tuple[ast.Name, ast.Expr, Span]:
        """Return the name, the value and the span of a keyword argument."""
        part = self.argument(name)
        return self.key(name), self.expr(value, part), self.site.key(name).to(part.span)

    def column(self, name: str, parameter: str, kind: str) -> ast.ColumnDecl:
        part = self.argument(parameter)
        return ast.ColumnDecl(self.key(name), self.type(kind, part), self.site.key(name).to(part.span))

    def type(self, kind: str, part: CallArgument) -> ast.Type:
        return self.text(self.string(kind, 'a column\'s type is a str, as in "f32"', part.span), part, parse_type)

    def path(self, parameter: str, value: str | os.PathLike[str]) -> ast.Literal_:
        span = self.argument(parameter).span
        text = os.fspath(value) if isinstance(value, os.PathLike) else value
        return ast.Literal_("string", self.string(text, f"`{parameter}` is a str or a Path", span), span)

    def range(self, parameter: str, value: int | tuple[int, int] | None) -> ast.Range | None:
        if value is None:
            return None
        span = self.argument(parameter).span
        pair = value if isinstance(value, tuple | list) else (value, value)
        ends = [n for v in pair if (n := _whole(v)) is not None]
        if len(ends) != 2 or len(pair) != 2:
            self.refuse(value, f"`{parameter}` takes a whole number, or a pair of them, the first and the last", span)
        first, last = (self.integer(n, span) for n in ends)
        if first < 0 or last < 0:
            self.fail(f"`{parameter}` are counted from 0", span, code="bad-value")
        return ast.Range(first, last, span)

    def integer(self, whole: int, span: Span) -> int:
        if abs(whole) >= 10**18:
            self.fail("the number is too large", span, code="bad-value")
        return whole

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
        if (whole := _whole(value)) is not None:
            return _signed(ast.Literal_("int", abs(self.integer(whole, span)), span), whole < 0)
        if isinstance(value, Real):
            number = _float(value)
            if not math.isfinite(number):
                self.fail(f"`{number}` is no number of the language", span, code="bad-value")
            return _signed(ast.Literal_("float", abs(number), span), math.copysign(1, number) < 0)
        if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
            return ast.List(tuple(self.expr(v, part.item(i), quoted, depth + 1) for i, v in enumerate(value)), span)
        if callable(value):
            return ast.Literal_("string", self._function(value, span), span)
        self.refuse(value, "a value is a number, a bool, a str, a list or a function", span)

    def _function(self, function: Callable[..., object], span: Span) -> str:
        """`file.py:name`, relative to the Python file where the call stands."""
        if (found := pickled_functions.home(function)) is None:
            if not isinstance(function, pickled_functions.Given):
                self.fail(
                    f"`{_named(function)}` is no function that is written in Python",
                    span,
                    "wrap it in one, or in a lambda",
                    "unknown-function",
                )
            try:
                found = pickled_functions.ship(function)
            except (TypeError, ValueError, OSError) as error:
                help = "define it by `def` at the top level of a file; what it needs, it can open or import there"
                what = (
                    f"`{_named(function)}` stands at the top level of no file, and cannot be kept by its value: {error}"
                )
                self.fail(what, span, help, "unknown-function")
        (path, name), folder = found, Path(span.file).resolve().parent
        return f"{path.relative_to(folder) if path.is_relative_to(folder) else path}:{name}"

    def text(self, value: str, part: CallArgument, read: Callable[[str, str], T]) -> T:
        """The tree of a text of the language, its spans where the text stands in the Python file."""
        try:
            found = read(value, part.span.file)
        except Fault as fault:
            (told,) = fault.diagnostics
            where = "" if part.shows(value) else f", in `{value}`"
            related = tuple((part.inside(value, span), note) for span, note in told.related)
            self._raise(
                Diagnostic(
                    told.code, told.message + where, part.inside(value, told.span), told.help, told.severity, related
                )
            )
        return ast.moved(found, lambda span: part.inside(value, span))

    def refuse(self, value: object, wants: str, span: Span) -> NoReturn:
        """What is not of the kind that belongs here."""
        self.fail(f"{wants}, not {kind_of(value)}", span, code="bad-value")

    def fail(self, message: str, span: Span, help: str = "", code: str = "syntax") -> NoReturn:
        self._raise(Diagnostic(code, message, span, help))

    def refuse_all(self, fault: Fault) -> NoReturn:
        """Raise a fault again, with the lines of Python that it is about."""
        (told,) = fault.diagnostics
        self._raise(told)

    def _raise(self, told: Diagnostic) -> NoReturn:
        fault = Fault(told)
        files = {told.span.file, *(span.file for span, _ in told.related)}
        fault.text = render(told, {file: "".join(linecache.getlines(file)) for file in files})
        raise fault from None


def at(part: CallArgument, text: str, start: int, end: int) -> Span:
    """Where characters of a text stand that an argument is."""

    def place(at: int) -> tuple[int, int]:
        return text.count("\n", 0, at) + 1, at - (text.rfind("\n", 0, at) + 1) + 1

    return part.inside(text, Span(part.span.file, *place(start), *place(end)))


def _signed(literal: ast.Literal_, negative: bool) -> ast.Expr:
    return ast.Neg(literal, literal.span) if negative else literal


def _whole(value: object) -> int | None:
    """A whole number, if it is one; an array says that it might be, until it is asked."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _float(value: Real) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _named(function: object) -> str:
    name = getattr(function, "__qualname__", "")
    return name if isinstance(name, str) and name else type(function).__name__
