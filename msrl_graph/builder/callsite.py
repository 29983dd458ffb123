"""Where a call stands in its Python file, to the character, so that a mistake in an argument is underlined as one in a
text is.

Invariant: there is always a span. Where the source is not at hand, or an argument is not written out (a variable,
`**attributes`), it is that of the smallest part around it that can be found: the element, the argument, the call, the
line.
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
    """A stretch of a call: an argument, or an element of one. `node` is None where nothing smaller can be told apart in
    it."""

    span: Span
    source: _Source
    node: ast.expr | None = None

    def item(self, index: int) -> CallArgument:
        """An element of a list or tuple that is written out, else the whole."""
        if not isinstance(self.node, ast.List | ast.Tuple) or any(isinstance(e, ast.Starred) for e in self.node.elts):
            return self
        return self.source.part(self.node.elts[index])

    def inside(self, value: str, span: Span) -> Span:
        """The span in the Python file of a span in the text `value` that this argument is; the whole where it is not
        written out."""
        if (quote := self._quote(value)) is None:
            return self.span

        def place(line: int, column: int) -> tuple[int, int]:
            return (self.span.line + line - 1, column if line > 1 else self.span.column + len(quote) + column - 1)

        return Span(self.span.file, *place(span.line, span.column), *place(span.end_line, span.end_column))

    def shows(self, value: str) -> bool:
        """Whether the text stands in the file as it is."""
        return self._quote(value) is not None

    def _quote(self, value: str) -> str | None:
        if not isinstance(self.node, ast.Constant) or not isinstance(self.node.value, str):
            return None
        written = self.source.text(self.span)
        return next((q for q in QUOTES if written == f"{q}{value}{q}"), None)


class CallSite:
    """A call: its span, and the parts of it that are arguments. `parameters` are the names of those that may be given
    by position."""

    def __init__(self, source: _Source, span: Span, call: ast.Call | None, parameters: tuple[str, ...]) -> None:
        self.span = span
        self._source = source
        self._call = call
        self._parameters = parameters

    def argument(self, name: str, index: int = 0) -> CallArgument:
        """The argument of that name; `index` counts those of a parameter such as `*groups`."""
        if self._call is not None:
            for keyword in self._call.keywords:
                if keyword.arg == name:
                    return self._source.part(keyword.value)
            at = self._parameters.index(name) + index if name in self._parameters else len(self._call.args)
            if at < len(self._call.args) and not any(isinstance(a, ast.Starred) for a in self._call.args[: at + 1]):
                return self._source.part(self._call.args[at])
        return CallArgument(self.span, self._source)

    def key(self, name: str) -> Span:
        """The name of an argument that is given by name."""
        for keyword in self._call.keywords if self._call is not None else ():
            if keyword.arg == name:
                start = self._source.span(keyword)
                return Span(start.file, start.line, start.column, start.line, start.column + len(name))
        return self.span


def caller(inner: Path, parameters: tuple[str, ...]) -> CallSite:
    """The call that led out of the user's code into the files under the folder `inner`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and inner in Path(frame.f_code.co_filename).parents:
        frame = frame.f_back
    file = frame.f_code.co_filename
    source = _Source(file, tuple(line.rstrip("\n") for line in linecache.getlines(file, frame.f_globals)))
    # The end of a call is its own; where a chain of calls begins depends on Python's version.
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
        """Python counts bytes, we count characters."""
        return len(self.lines[line - 1].encode()[:offset].decode(errors="replace")) + 1

    def text(self, span: Span) -> str:
        lines = list(self.lines[span.line - 1 : span.end_line])
        lines[-1] = lines[-1][: span.end_column - 1]
        lines[0] = lines[0][span.column - 1 :]
        return "\n".join(lines)


@lru_cache(maxsize=16)
def _calls(lines: tuple[str, ...]) -> dict[tuple[int, int], ast.Call]:
    """The calls of a file by where they end."""
    try:
        tree = ast.parse("\n".join(lines))
    except (SyntaxError, ValueError, RecursionError):
        return {}
    return {(n.end_lineno or 0, n.end_col_offset or 0): n for n in ast.walk(tree) if isinstance(n, ast.Call)}
