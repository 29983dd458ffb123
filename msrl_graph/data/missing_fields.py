"""Diagnostics for fields that a program reads, but a row or a file does not have.

Invariant: a diagnostic names the place, the column and the field, and lists the fields that are there.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from itertools import islice
from typing import Any

from ..diagnostics import Diagnostic
from ..ir.plan import DataSource
from . import fields, nested_fields
from .templates import read_fields

NAMED = 12  # most fields of a file that a message names


class FieldTypes(dict[str, Any]):
    """The fields of a Parquet or Arrow file by name, each with its type as a text.

    The type of a struct is a nested `FieldTypes`. `several` has the names that occur more than once.
    """

    several: tuple[str, ...] = ()


def missing_field(
    data: DataSource, place: str, row: Mapping[str, Any], column: str, absent: nested_fields.Absent, first: bool = True
) -> Diagnostic:
    """Return the diagnostic for a field that a column reads, but a row does not have.

    `row` can also be the `FieldTypes` of a file. `place` is a text that says where the row is. `absent` is the error of
    the search for the field. `first` is false if other rows have the field.
    """
    stated = data.stated.get(column)
    if not isinstance(absent.found, Mapping):
        kind = absent.found if isinstance(row, FieldTypes) else fields.type_name(type(absent.found))
        message = f"{place} has {kind} in `{absent.inside}`, where an object with the field `{absent.part}` belongs"
        help = f"give each row an object in `{absent.inside}`, or leave such rows out: `missing = omit`"
        if kind != "null":
            help = f"only an object, in Parquet a struct, has fields: `{absent.inside}` is not one"
        return Diagnostic("bad-data", message, stated or data.span, help)
    listed = list_fields(absent.found, absent.inside)
    if not first:
        listed = f"{listed}; to leave such rows out, write `missing = omit`"
    used_fields = {field for name in data.fields.values() for field in read_fields(name)}
    near = find_close_field(
        f"{absent.inside}.{absent.part}" if absent.inside else absent.part,
        column,
        {field: is_object for field, is_object in nested_fields.names(row).items() if field not in used_fields},
    )
    guess = f"did you mean `{near}`? " if stated else f'write `{{ {column} = "{near}" }}`; '
    inside = f" in `{absent.inside}`" if absent.inside else ""
    message = f"{place} has no field `{absent.part}`{inside}, which the column `{column}` reads"
    return Diagnostic("bad-data", message, stated or data.span, f"{guess}{listed}" if near else listed)


def list_fields(present: Mapping[str, Any], name: str) -> str:
    """List the fields of an object as text, for a message.

    `present` is the object, and `name` is its dotted name; "" means that the object is the row itself.
    """
    first = ", ".join(f"`{key}`" for key in islice(present, NAMED)) or "none"
    subject = f"the fields of `{name}`" if name else "its fields"
    return f"{subject} are {first}" + (f" and {len(present) - NAMED:,} more" if len(present) > NAMED else "")


def find_close_field(name: str, column: str, candidates: Mapping[str, bool]) -> str:
    """Return the field that the user probably means instead of `name`, or "".

    `name` is the missing field, and `column` is the column that reads the field. `candidates` maps each dotted field
    name to True if the field is an object. A field matches if its name is close to the missing name or to the name of
    the column. A nested field also matches if the last part of its name is close to one of the two names. An object
    matches only by its full name.
    """
    written = {candidate: candidate for candidate, is_object in candidates.items() if not is_object}
    for field in list(written):
        written.setdefault(field.rpartition(".")[2], field)
    for word, least, choices in (
        (name, 0.8, written | {candidate: candidate for candidate in candidates}),
        (column, 0.6, written),
        (name, 0.6, written),
    ):
        if matches := difflib.get_close_matches(word, choices, n=1, cutoff=least):
            return choices[matches[0]]
    return ""
