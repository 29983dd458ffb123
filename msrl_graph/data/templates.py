"""Templates of a column's text, such as `"Question: {question}"`.

Invariant: a field's name in a program is a template if it contains a brace. `{{` and `}}` are braces of the text. A
template only inserts values; it computes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from string import Formatter
from typing import Any

from . import nested_fields
from .fields import Misfit, type_name


def is_template(name: str) -> bool:
    return "{" in name or "}" in name


def find_mistake(template: str) -> str:
    """Return what is wrong with a template, for a message; "" if nothing is."""
    if not is_template(template):
        return ""
    try:
        parts = [*Formatter().parse(template)]
    except ValueError as error:
        return f"is not complete: {str(error).lower()}"
    if any(field == "" for _, field, _, _ in parts):
        return "has braces without the name of a field"
    if any(form or conversion for _, _, form, conversion in parts):
        return "formats a field: only the value itself is inserted"
    return ""


@cache
def read_fields(name: str) -> tuple[str, ...]:
    """Return the fields that a column reads: of its template, or the field itself."""
    if not is_template(name):
        return (name,)
    return tuple(dict.fromkeys(field for _, field in _parts(name) if field))


def fill(template: str, row: Mapping[str, Any]) -> str:
    """Insert the fields of a row into a template.

    Raises Absent if the row lacks a field, and Misfit if a value is neither text nor a number.
    """
    text = ""
    for literal, field in _parts(template):
        text += literal
        if field:
            text += _as_text(nested_fields.find(row, field), field)
    return text


def _as_text(value: Any, field: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Misfit(f"{type_name(type(value))} in `{field}`", "text or a number belongs")
    return str(value).removesuffix(".0")  # many libraries make floats of integers if a row has none


@cache
def _parts(template: str) -> tuple[tuple[str, str], ...]:
    return tuple((literal, field or "") for literal, field, _, _ in Formatter().parse(template))
