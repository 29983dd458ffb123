"""The rows of a data file as they are written, and whether they have the fields that are read.

Invariant: compiler and run read a file here, so both tell the same of a row. A file is read from its start, and no
further than rows are taken; nothing heavy is imported, except what reads Parquet and numbers where a file has them.
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

LOOKED = 100  # rows that `head` looks at
CHARACTERS = 1 << 24  # that `head` reads
NAMED = 12  # fields of a file that a message names
FORMS = 4  # fields of an object that a message says how to read


def rows(data: DataSource) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each row of a JSON lines file, or of a Parquet one, with its line (or its number, from 1): the fields that are
    read, by the name that the program gives. Raises Fault: a file that is missing or empty, a row that is no object or
    lacks a field."""
    empty = True
    with _told(data):
        for row in _parquet(data) if is_parquet(data) else _objects(data):
            empty = False
            yield row
        if empty:
            raise _empty(data)


def head(data: DataSource, most: int, graph: Graph) -> int:
    """Count the rows of a file, up to `most`, and check the first `LOOKED` of them.

    Raises Fault as `rows` and `take_row` do. A JSON lines file that is not at its end after `CHARACTERS` is taken to
    have `most` rows.
    """
    with _told(data):
        if is_parquet(data):
            with _opened(data) as file:
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
            raise _empty(data)
    return min(count, most)


def take_row(row: Mapping[str, Any], number: int, data: DataSource, graph: Graph) -> dict[str, Any]:
    """Return the values of a row by column, as `fields.take` has them. Raises Fault where one does not fit."""
    values = {}
    for column, name in data.fields.items():
        try:
            values[column] = fields.take(row[name], graph.column(column))
        except fields.Misfit as misfit:
            help = _instead(row[name], graph.column(column), name)
            raise bad(data, number, f"has {misfit.found} in `{name}`, where {misfit.wanted}", help) from None
    return values


def _instead(value: Any, column: Column, name: str) -> str:
    """Say what to read instead of an object or a list that does not fit its column."""
    whole = "a column of type `json` takes any object or list as it is, for functions"
    if column.element == "json":
        return ""
    if not isinstance(value, Mapping) or not value:
        return whole if column.element == "text" and isinstance(value, Mapping | list) else ""
    fit = [n for n in nested_fields.names(value) if _fits(nested_fields.find(value, n), column)]
    near = _close("", column.name, dict.fromkeys(fit, False))
    forms = " or ".join(f'`{column.name} = "{name}.{n}"`' for n in ([near] if near else fit[:FORMS]))
    write = f"write {forms} to read a field of `{name}`; " if forms else ""
    return f"{write}{_listed(value, name)}" + (f"; {whole}" if column.element == "text" else "")


def _fits(value: Any, column: Column) -> bool:
    try:
        fields.take(value, column)
    except fields.Misfit:
        return False
    return True


def few(data: DataSource, has: str, prompts: int) -> Diagnostic:
    """A file that `has` fewer rows than an iteration takes prompts."""
    message = f"{data.path} has {has}, and an iteration begins with {prompts:,} prompts"
    help = "give it more rows, or take fewer prompts: some come several times in an iteration, in groups of their own"
    return Diagnostic("few-rows", message, data.span, help, "warning")


def is_parquet(data: DataSource) -> bool:
    return Path(data.path).suffix == ".parquet"


def where(data: DataSource, number: int) -> str:
    return f"{'row' if is_parquet(data) else 'line'} {number} of {data.path}"


def bad(data: DataSource, number: int, what: str, help: str = "") -> Fault:
    return Fault(Diagnostic("bad-data", f"{where(data, number)} {what}", data.span, help))


@contextmanager
def _told(data: DataSource) -> Iterator[None]:
    """What goes wrong with the file, told at its line in the program."""
    try:
        # To open a pipe is to wait for a writer, and it can be read only once.
        if not stat.S_ISREG(Path(data.path).stat().st_mode):
            raise OSError("it is not a regular file")
        yield
    except FileNotFoundError:
        raise Fault(Diagnostic("missing-file", f"there is no data file {data.path}", data.span)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise Fault(
            Diagnostic("missing-file", f"the data file {data.path} cannot be read: {error}", data.span)
        ) from None


def _empty(data: DataSource) -> Fault:
    return Fault(Diagnostic("no-data", f"the data file {data.path} has no rows", data.span))


def _lines(data: DataSource, most: int = -1) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers; those that end within the first `most` characters, where that
    is not negative."""
    # Not splitlines: a JSON string may hold U+2028 and its like.
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
        what = f"is not JSON: {error.msg} at column {error.colno}"
        raise bad(data, number, what, fix_commands.lfs(data.path) if number == 1 else "") from None
    except (ValueError, RecursionError) as error:  # a number of too many digits, too many brackets
        raise bad(data, number, f"cannot be read: {error}") from None
    if not isinstance(row, dict):
        raise bad(data, number, "is not an object", 'write one object a line: {"prompt": "...", ...}')
    return _fields(data, where(data, number), row)


@contextmanager
def _opened(data: DataSource) -> Iterator[ParquetFile]:
    """A Parquet file that has the fields."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(data.path) as file:
            there = _types(file.schema_arrow)
            _fields(data, f"the data file {data.path}", there)
            for column, name in data.fields.items():
                if twice := next((t for t in there.several if _overlap(name, t)), ""):
                    span = data.stated.get(column, data.span)
                    raise Fault(Diagnostic("bad-data", f"the data file {data.path} has several fields `{twice}`", span))
            yield file
    except pa.ArrowInvalid as error:
        what = f"the data file {data.path} is not a Parquet file: {error}"
        raise Fault(Diagnostic("bad-data", what, data.span, fix_commands.lfs(data.path))) from None


def _parquet(data: DataSource, batch_size: int = 65536) -> Iterator[tuple[int, dict[str, Any]]]:
    """Messages come without the fields that are null: Arrow gives all structs of a column the fields of each."""
    # A part at a time, and of it the fields that are read: a file may hold more than memory does.
    with _opened(data) as file:
        number = 0
        for batch in file.iter_batches(batch_size, columns=list(dict.fromkeys(data.fields.values()))):
            for row in batch.to_pylist():
                number += 1
                found = _fields(data, where(data, number), row)
                yield number, {name: _stated(value) if are_messages(value) else value for name, value in found.items()}


def _overlap(field: str, other: str) -> bool:
    """Whether one of two fields is the other, or a part of it."""
    return f"{field}.".startswith(f"{other}.") or other.startswith(f"{field}.")


class _Types(dict[str, Any]):
    """The fields of a Parquet file by name, each with its type in words, or as such a dict where it is a struct;
    `several` are those of which there is more than one."""

    several: tuple[str, ...] = ()


def _types(fields: Any) -> _Types:
    """Return the fields of a schema or of a type that is a struct."""
    import pyarrow as pa

    found = _Types()
    for field in fields:
        if field.name in found:
            found.several += (field.name,)
        elif pa.types.is_struct(field.type):
            found[field.name] = inner = _types(field.type)
            found.several += tuple(f"{field.name}.{name}" for name in inner.several)
        else:
            found[field.name] = "list" if pa.types.is_nested(field.type) else str(field.type)
    return found


def _stated(value: Any) -> Any:
    """A value without the fields that are null, however deep."""
    if isinstance(value, dict):
        return {key: _stated(item) for key, item in value.items() if item is not None}
    return [_stated(item) for item in value] if isinstance(value, list) else value


def _fields(data: DataSource, what: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a row that are read, or of a schema their types. Raises Fault for those that are not there,
    each told where the program states it."""
    found: dict[str, Any] = {}
    lacking = []
    for column, name in data.fields.items():
        try:
            found[name] = nested_fields.find(row, name)
        except nested_fields.Absent as absent:
            lacking.append(_lacks(data, what, row, column, absent))
    if lacking:
        raise Fault(*lacking)
    return found


def _lacks(
    data: DataSource, what: str, row: Mapping[str, Any], column: str, absent: nested_fields.Absent
) -> Diagnostic:
    """A field that a column reads and a row does not have."""
    stated = data.stated.get(column)
    if not isinstance(absent.found, Mapping):
        found = absent.found if isinstance(row, _Types) else fields.called(type(absent.found))
        message = f"{what} has {found} in `{absent.inside}`, where an object with the field `{absent.part}` belongs"
        help = f"give each row an object in `{absent.inside}`, or leave such rows out"
        if found != "null":
            help = f"only an object, in Parquet a struct, has fields: `{absent.inside}` is not one"
        return Diagnostic("bad-data", message, stated or data.span, help)
    listed = _listed(absent.found, absent.inside)
    used = data.fields.values()
    near = _close(data.fields[column], column, {n: o for n, o in nested_fields.names(row).items() if n not in used})
    guess = f"did you mean `{near}`? " if stated else f'write `{{ {column} = "{near}" }}`; '
    inside = f" in `{absent.inside}`" if absent.inside else ""
    message = f"{what} has no field `{absent.part}`{inside}, which the column `{column}` reads"
    return Diagnostic("bad-data", message, stated or data.span, f"{guess}{listed}" if near else listed)


def _listed(there: Mapping[str, Any], name: str) -> str:
    """The fields of an object `name`, or of a row (""), in words."""
    first = ", ".join(f"`{k}`" for k in islice(there, NAMED)) or "none"
    whose = f"the fields of `{name}`" if name else "its fields"
    return f"{whose} are {first}" + (f" and {len(there) - NAMED:,} more" if len(there) > NAMED else "")


def _close(name: str, column: str, there: Mapping[str, bool]) -> str:
    """The field that is likely meant, by dotted name and whether it is an object: one that is written nearly as the one
    that is not there, or as the column. Of fields of objects the last part counts too; an object itself is meant only
    where it is written nearly so."""
    written = {n: n for n, is_object in there.items() if not is_object}
    for field in list(written):
        written.setdefault(field.rpartition(".")[2], field)
    for word, least, of in ((name, 0.8, written | {n: n for n in there}), (column, 0.6, written), (name, 0.6, written)):
        if found := difflib.get_close_matches(word, of, n=1, cutoff=least):
            return of[found[0]]
    return ""
