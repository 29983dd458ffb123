"""The location of a call and of its arguments in the Python file, for diagnostics.

Invariant: there is always a span. If the source file is not available, or an argument is not written in the call (a
variable, `**attributes`), the span covers the smallest enclosing part that can be found: the element of a list, the
argument, the call or the line.
"""

from __future__ import annotations

import ast
import linecache
import sys
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from ..diagnostics import Span

QUOTES = ('"""', "'''", '"', "'")


@dataclass(frozen=True)
class CallArgument:
    """An argument of a call, or an element of a list or tuple that is an argument.

    `node` is the Python syntax tree of the argument. If the argument cannot be found in the source, `node` is None, and
    `span` is the span of the call.
    """

    span: Span
    source: _Source
    node: ast.expr | None = None

    def item(self, index: int) -> CallArgument:
        """Return an element of this argument, or this argument if no element can be found.

        The elements can be found if the argument is written as a list or tuple, without `*`.
        """
        if not isinstance(self.node, ast.List | ast.Tuple) or any(
            isinstance(element, ast.Starred) for element in self.node.elts
        ):
            return self
        return self.source.part(self.node.elts[index])

    def inside(self, value: str, span: Span) -> Span:
        """Map a span in the text `value` of this argument to a span in the Python file.

        Returns the argument's span if the text is not a string literal in the file.
        """
        if (quote := self._quote(value)) is None:
            return self.span

        def place(line: int, column: int) -> tuple[int, int]:
            return (self.span.line + line - 1, column if line > 1 else self.span.column + len(quote) + column - 1)

        return Span(self.span.file, *place(span.line, span.column), *place(span.end_line, span.end_column))

    def shows(self, value: str) -> bool:
        """Return whether the argument is written as the string literal `value`.

        Returns False if the literal in the Python file has escapes.
        """
        return self._quote(value) is not None

    def _quote(self, value: str) -> str | None:
        if not isinstance(self.node, ast.Constant) or not isinstance(self.node.value, str):
            return None
        written = self.source.text(self.span)
        return next((quote for quote in QUOTES if written == f"{quote}{value}{quote}"), None)


class CallSite:
    """A call in the Python file: its span and its arguments.

    `parameters` are the names of the parameters that can be positional.
    """

    def __init__(self, source: _Source, span: Span, call: ast.Call | None, parameters: tuple[str, ...]) -> None:
        self.span = span
        self._source = source
        self._call = call
        self._parameters = parameters

    def argument(self, name: str, index: int = 0) -> CallArgument:
        """Return the argument for the parameter `name`.

        If several arguments belong to the parameter, as for `*groups`, `index` selects one of these arguments.
        """
        if self._call is not None:
            for keyword in self._call.keywords:
                if keyword.arg == name:
                    return self._source.part(keyword.value)
            position = self._parameters.index(name) + index if name in self._parameters else len(self._call.args)
            if position < len(self._call.args) and not any(
                isinstance(arg, ast.Starred) for arg in self._call.args[: position + 1]
            ):
                return self._source.part(self._call.args[position])
        return CallArgument(self.span, self._source)

    def key(self, name: str) -> Span:
        """Return the span of a keyword argument's name, or of the call if none is found."""
        for keyword in self._call.keywords if self._call is not None else ():
            if keyword.arg == name:
                start = self._source.span(keyword)
                return Span(start.file, start.line, start.column, start.line, start.column + len(name))
        return self.span


def caller(inner: Path, parameters: tuple[str, ...]) -> CallSite:
    """Return the call by which the user's code entered code in the folder `inner`.

    `parameters` are the names of the parameters that can be positional.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and inner in Path(frame.f_code.co_filename).parents:
        frame = frame.f_back
    file = frame.f_code.co_filename
    source = _Source(file, tuple(line.rstrip("\n") for line in linecache.getlines(file, frame.f_globals)))
    # The end of a call is unambiguous; the start of a chain of calls depends on Python's version.
    line, end_line, _, end = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    call = None if end_line is None or end is None else _calls(source.lines).get((end_line, end))
    if call is not None:
        return CallSite(source, source.span(call), call, parameters)
    line = line or frame.f_lineno
    text = source.lines[line - 1] if line <= len(source.lines) else ""
    return CallSite(
        source, Span(file, line, len(text) - len(text.lstrip()) + 1, line, len(text.rstrip()) + 1), None, parameters
    )


@dataclass(frozen=True)
class _Source:
    file: str
    lines: tuple[str, ...]

    def part(self, node: ast.expr) -> CallArgument:
        return CallArgument(self.span(node), self, node)

    def span(self, node: Any) -> Span:
        start = self._column(node.lineno, node.col_offset)
        end = self._column(node.end_lineno, node.end_col_offset)
        return Span(self.file, node.lineno, start, node.end_lineno, end)

    def _column(self, line: int, offset: int) -> int:
        """Return the column of a byte offset in a line; columns are counted in characters."""
        return len(self.lines[line - 1].encode()[:offset].decode(errors="replace")) + 1

    def text(self, span: Span) -> str:
        lines = list(self.lines[span.line - 1 : span.end_line])
        lines[-1] = lines[-1][: span.end_column - 1]
        lines[0] = lines[0][span.column - 1 :]
        return "\n".join(lines)


@lru_cache(maxsize=16)
def _calls(lines: tuple[str, ...]) -> dict[tuple[int, int], ast.Call]:
    """Return the calls in a file, by the line and column at which each call ends."""
    try:
        tree = ast.parse("\n".join(lines))
    except (SyntaxError, ValueError, RecursionError):
        return {}
    return {
        (node.end_lineno or 0, node.end_col_offset or 0): node for node in ast.walk(tree) if isinstance(node, ast.Call)
    }
