"""Diagnostics: the compiler's messages to its user.

Invariant: a user's mistake is reported as a `Diagnostic` whose code is documented in the package `codes`, never as the
text of an exception. A `Fault` carries one or more diagnostics to the command line. A diagnostic's message is in lower
case, without a final period, and in the user's words. The diagnostic's field `help` says what the user can do.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, wraps
from pathlib import PurePath
from typing import Literal, ParamSpec, TypeVar

from . import codes
from .surface import show_on
from .terminal_text import SIGNS, make_printable

# Codes of faults of the machines, not of the program: for these, the exit status is 3.
MACHINE_FAULTS = frozenset({"no-resources", "host-differs", "port-taken"})
# Longest excerpt of a line, in characters.
LONGEST = 240
P = ParamSpec("P")
T = TypeVar("T")
Severity = Literal["error", "warning", "hint"]


@dataclass(frozen=True, order=True)
class Span:
    """A range of source text: lines and columns from 1, with an exclusive end.

    Every character counts as one column, even a tab or a wide character.
    """

    file: str
    line: int
    column: int
    end_line: int
    end_column: int

    @property
    def place(self) -> str:
        """The line and file of the span, for use in a sentence."""
        name = PurePath(self.file).name
        return f"line {self.line} of {name}" if name else f"line {self.line}"

    def extend_to(self, other: Span) -> Span:
        """Return the span from the start of this span to the end of `other`."""
        return Span(self.file, self.line, self.column, other.end_line, other.end_column)


NOWHERE = Span("", 0, 0, 0, 0)


@dataclass(frozen=True)
class Diagnostic:
    """A message: what is wrong, where, and what to do about it."""

    code: str
    message: str
    span: Span = NOWHERE
    help: str = ""
    severity: Severity = "error"
    related: tuple[tuple[Span, str], ...] = ()

    def __post_init__(self) -> None:
        if self.code not in codes.known():
            raise ValueError(f"undocumented code {self.code}")


class Fault(Exception):
    """The exception that ends a compilation or rejects a run; it has the diagnostics.

    If `text`, the rendered diagnostics, was set, `str(fault)` is `text`. Otherwise `str(fault)` is the code and message
    of each diagnostic.
    """

    text = ""

    def __init__(self, *diagnostics: Diagnostic) -> None:
        super().__init__("; ".join(f"[{diagnostic.code}] {diagnostic.message}" for diagnostic in diagnostics))
        self.diagnostics = diagnostics

    def __str__(self) -> str:
        return self.text or super().__str__()

    def __reduce__(self) -> tuple[type[Fault], tuple[Diagnostic, ...]]:
        return type(self), self.diagnostics  # for pickling between processes


def public(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function of the Python API.

    Messages name options as arguments of Python. The traceback of a Fault ends at the user's call. With MSRL_DEBUG=1
    the traceback also shows where the Fault was raised.
    """

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        __tracebackhide__ = True  # a notebook leaves this frame out
        try:
            with show_on("Python"):
                return function(*args, **kwargs)
        except Fault as fault:
            if os.environ.get("MSRL_DEBUG"):
                raise
            raise fault.with_traceback(None) from None

    return called


class ProgramWarning(UserWarning):
    """A warning about a program that compiles, for callers from Python.

    The text of the warning is the rendered diagnostic.
    """


def kind_of(value: object) -> str:
    """Return what a Python value is, in words, such as `None` or `an int`."""
    kind = type(value).__name__
    return "None" if value is None else f"{'an' if kind[:1].lower() in tuple('aeiou') else 'a'} {kind}"


def nearest(name: str, known: Iterable[str], lead: str = "did you mean") -> str:
    """Return help for an unknown name: the most similar name of `known`.

    `lead` is the text before the similar name. If no known name is similar, the help lists all known names, or is "" if
    there are more than 12 known names.
    """
    names = sorted(set(known))
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"{lead} `{close[0]}`?"
    # `910c` matches `ascend-910c` if all names that contain it begin with the shortest match.
    containing = [known_name for known_name in names if len(name) > 2 and name.lower() in known_name.lower()]
    if containing and all(known_name.startswith(containing[0]) for known_name in containing):
        return f"{lead} `{containing[0]}`?"
    if names and len(names) <= 12:
        return "known here: " + ", ".join(f"`{known_name}`" for known_name in names)
    return ""


def render(diagnostic: Diagnostic, sources: Mapping[str, str], style: str = "full") -> str:
    """Return a diagnostic as text.

    `sources` maps the name of each file to its text. The rendered diagnostic quotes the wrong line of a file from this
    text. `style` is `full`, or `concise` for one line.
    """
    title = f"{diagnostic.severity}[{diagnostic.code}]: {diagnostic.message}"
    span = diagnostic.span
    if style == "concise":
        where = f"{span.file}:{span.line}:{span.column}: " if span.line else ""
        return make_printable(where + title + (f" (help: {diagnostic.help})" if diagnostic.help else ""))
    margin = " " * len(str(max([span.line, *(related_span.line for related_span, _ in diagnostic.related)])))
    lines = [title]
    if span.line:
        lines += _excerpt(span, sources, margin)
    for other, note in diagnostic.related:
        lines += [f"{margin} = note: {note}", *_excerpt(other, sources, margin)]
    if diagnostic.help:
        indent = "\n" + " " * (len(margin) + 9)
        lines.append(f"{margin} = help: {diagnostic.help.replace(chr(10), indent)}")
    return make_printable("\n".join(lines))


def _excerpt(span: Span, sources: Mapping[str, str], margin: str) -> list[str]:
    lines = [f"{margin}--> {span.file}:{span.line}:{span.column}"]
    text = _lines(sources.get(span.file, ""))
    if span.line <= len(text) and span.file in sources:
        source = text[span.line - 1].rstrip("\r")
        start = span.column - 1
        end = span.end_column - 1 if span.end_line == span.line else len(source)
        part, start, end = _cut_line(source.translate(SIGNS), start, end)
        under = _padding(part[:start]) + (_padding(part[start:end], "^") or "^")
        number = str(span.line).rjust(len(margin))
        lines += [f"{margin} |", f"{number} | {part}", f"{margin} | {under}"]
    return lines


@lru_cache(maxsize=8)
def _lines(text: str) -> list[str]:
    """Return the lines of a text.

    The result is cached, because several diagnostics can be about the same text.
    """
    return text.split("\n")


def _cut_line(line: str, start: int, end: int) -> tuple[str, int, int]:
    """Return the part of a line to show, and where `start` and `end` are in that part.

    If a line is longer than `LONGEST`, only a part near `start` is shown.
    """
    if len(line) <= LONGEST:
        return line, start, end
    first = max(0, min(start - LONGEST // 4, len(line) - LONGEST))
    last = min(len(line), first + LONGEST)
    before = "…" if first else ""
    part = before + line[first:last] + ("…" if last < len(line) else "")
    return part, start - first + len(before), min(end, last) - first + len(before)


def _padding(text: str, sign: str = " ") -> str:
    """Repeat `sign` until the result is as wide on a terminal as the text.

    Tabs are kept, so that an underline is aligned in any terminal. A wide character becomes two signs, and a combining
    character becomes none.
    """
    if text.isascii():
        return sign * len(text) if "\t" not in text else "\t".join(sign * len(part) for part in text.split("\t"))
    from rich.cells import cell_len

    return "\t".join(sign * cell_len(part) for part in text.split("\t"))


def render_json(diagnostics: Iterable[Diagnostic]) -> str:
    """Return diagnostics as a JSON list.

    Each item has the fields code, severity, message, span, help and related. In a span, lines and columns begin with 1,
    and the end is exclusive.
    """

    def place(span: Span) -> dict[str, object] | None:
        if not span.line:
            return None
        return {
            "file": span.file,
            "start": {"line": span.line, "column": span.column},
            "end": {"line": span.end_line, "column": span.end_column},
        }

    return json.dumps(
        [
            {
                "code": diagnostic.code,
                "severity": diagnostic.severity,
                "message": diagnostic.message,
                "span": place(diagnostic.span),
                "help": diagnostic.help,
                "related": [
                    {"span": place(related_span), "message": note} for related_span, note in diagnostic.related
                ],
            }
            for diagnostic in diagnostics
        ],
        indent=2,
    )
