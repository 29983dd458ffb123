"""A syntax tree as indented text.

Invariant: each element of the tree has one line, with its contents and its position (`line:column`).
"""

from __future__ import annotations

from dataclasses import fields

from ..diagnostics import Span
from .ast import File, Literal_, Name, NameExpr, Ref, word


def show(file: File) -> str:
    """Return the tree as indented text.

    Each element of the tree has one line, with its contents and its position (`line:column`).
    """
    return "\n".join(_lines(file, "", 0)) + "\n"


def _lines(part: object, label: str, depth: int) -> list[str]:
    lead = "  " * depth + (f"{label}: " if label else "")
    if isinstance(part, Name | Ref | NameExpr):
        return [f"{lead}{word(part)} {part.text} {_at(part.span)}"]
    if isinstance(part, Literal_):
        value = f'"{part.value}"' if part.kind == "string" else str(part.value).lower()
        return [f"{lead}{part.kind} {value}{part.unit and ' ' + part.unit} {_at(part.span)}"]
    if isinstance(part, tuple):
        return [line for item in part for line in _lines(item, label, depth)]
    plain = []
    nested = list[str]()
    for field in fields(part):  # type: ignore[arg-type]
        value = getattr(part, field.name)
        if isinstance(value, str | bool | int):
            plain.append(f"{field.name}={value}")
        elif isinstance(value, tuple) or not (value is None or isinstance(value, Span)):
            nested += _lines(value, field.name, depth + 1)
    return [" ".join([f"{lead}{word(part)}", *plain, _at(part.span)]), *nested]  # type: ignore[attr-defined]


def _at(span: Span) -> str:
    return f"{span.line}:{span.column}-{span.end_line}:{span.end_column}"
