"""The rows of a data file, checked for the fields that a program reads.

Invariant: the compiler and a run read data files through this module, so both report the same errors. A file is read
from its start, and only as far as rows are needed. Heavy packages are imported only for the files that need them:
Parquet files, and files with columns of numbers.
"""

from __future__ import annotations

import difflib
import json
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..diagnostics import Diagnostic, Fault
from ..files import fix_commands
from ..ir.graph import Column, Graph
from ..ir.plan import DataSource
from . import fields, nested_fields
from .chat import are_messages

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

LOOKED = 100  # rows that `head` checks
CHARACTERS = 1 << 24  # the most that `head` reads
NAMED = 12  # most fields of a file that a message names
FORMS = 4  # most fields of an object that a message shows how to read


def rows(data: DataSource) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each row of a JSON lines or Parquet file, as (number, row).

    For JSON lines, the number is the line number. For Parquet, it is the row number. Both are counted from 1. A row
    contains the fields that the program reads. The keys are the names that the program uses for the fields. Raises
    Fault if the file is missing or empty, if a row is not an object, or if a row lacks a field.
    """
    empty = True
    with _report_errors(data):
        for row in _parquet(data) if is_parquet(data) else _objects(data):
            empty = False
            yield row
        if empty:
            raise _no_rows_fault(data)


def head(data: DataSource, most: int, graph: Graph) -> int:
    """Count the rows of a file, up to `most`, and check the first `LOOKED` rows.

    At most `CHARACTERS` characters of a JSON lines file are read. If the file's size in bytes is not below this number,
    the file may have more rows, and the result is `most`. Raises Fault for the same mistakes as `rows` and `take_row`.
    """
    with _report_errors(data):
        if is_parquet(data):
            with _open_parquet(data) as file:
                count: int = file.metadata.num_rows
            for number, row in islice(_parquet(data, LOOKED), LOOKED):
                take_row(row, number, data, graph)
        else:
            count = 0
            for number, line in _lines(data, CHARACTERS):
                count += 1
                if count <= LOOKED:
                    take_row(_object(data, number, line), number, data, graph)
                elif count >= most:
                    break
            if count < most and Path(data.path).stat().st_size >= CHARACTERS:
                return most
        if not count:
            raise _no_rows_fault(data)
    return min(count, most)


def take_row(row: Mapping[str, Any], number: int, data: DataSource, graph: Graph) -> dict[str, Any]:
    """Return a row's converted values in a dictionary from column names to values.

    `fields.take` converts the values. `number` is the number with which messages name the row. Raises Fault if a value
    does not fit the type of its column.
    """
    values = {}
    for column, name in data.fields.items():
        try:
            values[column] = fields.take(row[name], graph.column(column))
        except fields.Misfit as misfit:
            help = _suggest_read(row[name], graph.column(column), name)
            raise bad_row(data, number, f"has {misfit.found} in `{name}`, where {misfit.wanted}", help) from None
    return values


def _suggest_read(value: Any, column: Column, name: str) -> str:
    """Return a help text for an object or a list that does not fit its column.

    The help suggests nested fields to read, or a column of type `json`. `name` is the name of the field that has the
    value.
    """
    json_hint = "a column of type `json` takes any object or list as it is, for functions"
    if column.element == "json":
        return ""
    if not isinstance(value, Mapping) or not value:
        return json_hint if column.element == "text" and isinstance(value, Mapping | list) else ""
    fitting_fields = [field for field in nested_fields.names(value) if _fits(nested_fields.find(value, field), column)]
    near = _find_close_field("", column.name, dict.fromkeys(fitting_fields, False))
    forms = " or ".join(f'`{column.name} = "{name}.{field}"`' for field in ([near] if near else fitting_fields[:FORMS]))
    write = f"write {forms} to read a field of `{name}`; " if forms else ""
    return f"{write}{_list_fields(value, name)}" + (f"; {json_hint}" if column.element == "text" else "")


def _fits(value: Any, column: Column) -> bool:
    try:
        fields.take(value, column)
    except fields.Misfit:
        return False
    return True


def few_rows_warning(data: DataSource, has: str, prompts: int) -> Diagnostic:
    """Return the warning that a file has fewer rows than an iteration has prompts.

    `has` is a text about the number of rows in the file. `prompts` is the number of prompts in an iteration.
    """
    message = f"{data.path} has {has}, and an iteration begins with {prompts:,} prompts"
    help = "add rows, or take fewer prompts: now some rows occur several times in an iteration, in separate groups"
    return Diagnostic("few-rows", message, data.span, help, "warning")


def is_parquet(data: DataSource) -> bool:
    return Path(data.path).suffix == ".parquet"


def row_place(data: DataSource, number: int) -> str:
    return f"{'row' if is_parquet(data) else 'line'} {number} of {data.path}"


def bad_row(data: DataSource, number: int, problem: str, help: str = "") -> Fault:
    return Fault(Diagnostic("bad-data", f"{row_place(data, number)} {problem}", data.span, help))


@contextmanager
def _report_errors(data: DataSource) -> Iterator[None]:
    """Convert errors in the `with` block into a Fault.

    The position of the Fault is the line of the program that names the file.
    """
    try:
        # Opening a pipe would wait for a writer, and a pipe can be read only once.
        if not stat.S_ISREG(Path(data.path).stat().st_mode):
            raise OSError("it is not a regular file")
        yield
    except FileNotFoundError:
        raise Fault(Diagnostic("missing-file", f"there is no data file {data.path}", data.span)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise Fault(
            Diagnostic("missing-file", f"the data file {data.path} cannot be read: {error}", data.span)
        ) from None


def _no_rows_fault(data: DataSource) -> Fault:
    return Fault(Diagnostic("no-data", f"the data file {data.path} has no rows", data.span))


def _lines(data: DataSource, most: int = -1) -> Iterator[tuple[int, str]]:
    """Yield each non-blank line of a file, as (line number, line).

    If `most` is not negative, only the lines that end within the first `most` characters are yielded.
    """
    # Not splitlines: a JSON string may hold U+2028 and similar characters.
    with Path(data.path).open(encoding="utf-8") as file:
        number = 0
        while line := file.readline(most):
            number += 1
            if most >= 0 and not (most := most - len(line)):
                return
            if line.strip():
                yield number, line.rstrip("\n")


def _objects(data: DataSource) -> Iterator[tuple[int, dict[str, Any]]]:
    return ((number, _object(data, number, line)) for number, line in _lines(data))


def _object(data: DataSource, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        problem = f"is not JSON: {error.msg} at column {error.colno}"
        raise bad_row(data, number, problem, fix_commands.lfs(data.path) if number == 1 else "") from None
    except (ValueError, RecursionError) as error:  # a number of too many digits, too many brackets
        raise bad_row(data, number, f"cannot be read: {error}") from None
    if not isinstance(row, dict):
        raise bad_row(data, number, "is not an object", 'write one object a line: {"prompt": "...", ...}')
    return _select_fields(data, row_place(data, number), row)


@contextmanager
def _open_parquet(data: DataSource) -> Iterator[ParquetFile]:
    """Open a Parquet file, and check that it has the fields that the program reads.

    Raises Fault if the file is not a Parquet file, or if a field is missing or repeated.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(data.path) as file:
            types = _read_types(file.schema_arrow)
            _select_fields(data, f"the data file {data.path}", types)
            for column, name in data.fields.items():
                if repeated_field := next((repeated for repeated in types.several if _overlaps(name, repeated)), ""):
                    span = data.stated.get(column, data.span)
                    raise Fault(
                        Diagnostic("bad-data", f"the data file {data.path} has several fields `{repeated_field}`", span)
                    )
            yield file
    except pa.ArrowInvalid as error:
        problem = f"the data file {data.path} is not a Parquet file: {error}"
        raise Fault(Diagnostic("bad-data", problem, data.span, fix_commands.lfs(data.path))) from None


def _parquet(data: DataSource, batch_size: int = 65536) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a Parquet file, as (number, row).

    In a Parquet column, each struct has all fields of the column's type, and a field without a value is null. So fields
    that are null are removed from messages.
    """
    # One batch at a time, and only the fields that are read: a file may be larger than memory.
    with _open_parquet(data) as file:
        number = 0
        for batch in file.iter_batches(batch_size, columns=list(dict.fromkeys(data.fields.values()))):
            for row in batch.to_pylist():
                number += 1
                values = _select_fields(data, row_place(data, number), row)
                yield (
                    number,
                    {name: _drop_nulls(value) if are_messages(value) else value for name, value in values.items()},
                )


def _overlaps(field: str, other: str) -> bool:
    """Return whether two dotted names are the same, or one field is inside the other.

    For example, the field `a.b` is inside the field `a`.
    """
    return f"{field}.".startswith(f"{other}.") or other.startswith(f"{field}.")


class _Types(dict[str, Any]):
    """The fields of a Parquet file by name, each with its type as a text.

    The type of a struct is a nested `_Types`. `several` has the names that occur more than once.
    """

    several: tuple[str, ...] = ()


def _read_types(fields: Any) -> _Types:
    """Return the types of the fields of a schema, or of the fields of a struct type."""
    import pyarrow as pa

    types = _Types()
    for field in fields:
        if field.name in types:
            types.several += (field.name,)
        elif pa.types.is_struct(field.type):
            types[field.name] = inner = _read_types(field.type)
            types.several += tuple(f"{field.name}.{name}" for name in inner.several)
        else:
            types[field.name] = "list" if pa.types.is_nested(field.type) else str(field.type)
    return types


def _drop_nulls(value: Any) -> Any:
    """Return a copy of a value in which the null fields of all objects are removed."""
    if isinstance(value, dict):
        return {key: _drop_nulls(item) for key, item in value.items() if item is not None}
    return [_drop_nulls(item) for item in value] if isinstance(value, list) else value


def _select_fields(data: DataSource, place: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that the program reads from a row.

    `row` can also be the `_Types` of a schema; the result then has the types of the fields. `place` is a text that says
    where the row is. Raises Fault with a diagnostic for each missing field, at the position where the program names the
    field.
    """
    values: dict[str, Any] = {}
    lacking = []
    for column, name in data.fields.items():
        try:
            values[name] = nested_fields.find(row, name)
        except nested_fields.Absent as absent:
            lacking.append(_missing_field(data, place, row, column, absent))
    if lacking:
        raise Fault(*lacking)
    return values


def _missing_field(
    data: DataSource, place: str, row: Mapping[str, Any], column: str, absent: nested_fields.Absent
) -> Diagnostic:
    """Return the diagnostic for a field that a column reads, but a row does not have.

    `place` is a text that says where the row is. `absent` is the error of the search for the field.
    """
    stated = data.stated.get(column)
    if not isinstance(absent.found, Mapping):
        kind = absent.found if isinstance(row, _Types) else fields.type_name(type(absent.found))
        message = f"{place} has {kind} in `{absent.inside}`, where an object with the field `{absent.part}` belongs"
        help = f"give each row an object in `{absent.inside}`, or leave such rows out"
        if kind != "null":
            help = f"only an object, in Parquet a struct, has fields: `{absent.inside}` is not one"
        return Diagnostic("bad-data", message, stated or data.span, help)
    listed = _list_fields(absent.found, absent.inside)
    used_fields = data.fields.values()
    near = _find_close_field(
        data.fields[column],
        column,
        {field: is_object for field, is_object in nested_fields.names(row).items() if field not in used_fields},
    )
    guess = f"did you mean `{near}`? " if stated else f'write `{{ {column} = "{near}" }}`; '
    inside = f" in `{absent.inside}`" if absent.inside else ""
    message = f"{place} has no field `{absent.part}`{inside}, which the column `{column}` reads"
    return Diagnostic("bad-data", message, stated or data.span, f"{guess}{listed}" if near else listed)


def _list_fields(present: Mapping[str, Any], name: str) -> str:
    """List the fields of an object as text, for a message.

    `present` is the object, and `name` is its dotted name; "" means that the object is the row itself.
    """
    first = ", ".join(f"`{key}`" for key in islice(present, NAMED)) or "none"
    subject = f"the fields of `{name}`" if name else "its fields"
    return f"{subject} are {first}" + (f" and {len(present) - NAMED:,} more" if len(present) > NAMED else "")


def _find_close_field(name: str, column: str, candidates: Mapping[str, bool]) -> str:
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
