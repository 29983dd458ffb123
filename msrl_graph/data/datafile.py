"""The rows of a program's data, checked for the fields that the program reads.

Invariant: the compiler and a run read data through this module, so both report the same errors. A file is read from its
start, and only as far as rows are needed.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

from ..analysis.sequences import prompt_columns
from ..diagnostics import Diagnostic, Fault
from ..files import fix_commands
from ..ir.graph import Column, Graph
from ..ir.plan import DataSource
from . import fields, nested_fields, row_readers, templates
from .chat import are_messages
from .data_files import TEXT, DataFile, list_files
from .missing_fields import FieldTypes, find_close_field, list_fields, missing_field
from .row_readers import BadFile, BadRow, TextLimit

LOOKED = 100  # rows that `head` checks
CHARACTERS = 1 << 24  # the most that `head` reads
FORMS = 4  # most fields of an object that a message shows how to read
FILE = 40  # the number of a row has this many bits for its place in its file; the bits above are the file's index


class RowStream:
    """The rows of some data: an iterator of (number, row).

    A row contains the fields that the program reads. The keys are the names (or templates) that the program uses for
    the fields. The number of a row is the line number in a file of JSON lines or CSV, and the row number in all other
    files, counted from 1, plus the file's index times 2 ** `FILE`.

    `dropped` counts the rows that were left out because a field was absent or null, by column. The iterator raises
    Fault if a file is missing or empty, if a row is not an object, or if a row lacks a field.
    """

    def __init__(self, data: DataSource, characters: int = -1) -> None:
        self.data = data
        self.files = list_files(data)
        self.limit = TextLimit(characters)
        self.dropped: dict[str, int] = {}
        self.drops = data.options.missing == "omit"
        self.fields = [(column, name, templates.is_template(name)) for column, name in data.fields.items()]

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        empty = True
        for number, raw in self.raw_rows():
            empty = False
            if (row := self.parse(number, raw)) is not None:
                yield number, row
        if empty:
            raise _no_rows_fault(self.data)

    def raw_rows(self) -> Iterator[tuple[int, Any]]:
        """Yield each row that `skip` and `take` select, before it is parsed.

        A row is a line of text, or the row as its file has it.
        """
        options = self.data.options
        stop = options.skip + options.take if options.take else None
        return islice(self._all_rows(), options.skip, stop)

    def parse(self, number: int, raw: Any) -> dict[str, Any] | None:
        """Return the fields of a row that are read; None if the row is left out."""
        row = raw
        if isinstance(raw, str):
            try:
                row = row_readers.parse_line(number & ((1 << FILE) - 1), raw)
            except BadRow as error:
                raise self._row_fault(number >> FILE, error) from None
        if not isinstance(row, dict):
            raise bad_row(self.data, number, "is not an object", 'write one object a line: {"prompt": "...", ...}')
        return self._select(number, row)

    def _select(self, number: int, row: Mapping[str, Any]) -> dict[str, Any] | None:
        values: dict[str, Any] = {}
        lacking = []
        for column, name, is_template in self.fields:
            try:
                if name in row:
                    value = row[name]
                else:
                    value = templates.fill(name, row) if is_template else nested_fields.find(row, name)
            except nested_fields.Absent as absent:
                if self.drops:
                    self._count_drop(column)
                    return None
                place = row_place(self.data, number)
                first = number & ((1 << FILE) - 1) == 1
                lacking.append(missing_field(self.data, place, row, column, absent, first))
                continue
            except fields.Misfit as misfit:
                if self.drops and misfit.found.startswith("null "):
                    self._count_drop(column)
                    return None
                help = "a template inserts text and numbers"
                raise bad_row(self.data, number, f"has {misfit.found}, where {misfit.wanted}", help) from None
            if value is None and self.drops:
                self._count_drop(column)
                return None
            values[name] = value
        if lacking:
            raise Fault(*lacking)
        return values

    def _count_drop(self, column: str) -> None:
        self.dropped[column] = self.dropped.get(column, 0) + 1

    def _all_rows(self) -> Iterator[tuple[int, Any]]:
        for index, file in enumerate(self.files):
            with self.reporting(index):
                for number, row in self.file_rows(file):
                    yield (index << FILE) + number, row

    def file_rows(self, file: DataFile) -> Iterator[tuple[int, Any]]:
        """Yield each row of a file, as (number in the file, row), before it is parsed."""
        if file.format not in TEXT:
            yield from self._table_rows(file)
            return
        is_list = file.format == "json" and row_readers.is_list(file)
        with row_readers.open_text(file, self.limit) as text:
            if file.format == "csv":
                yield from row_readers.csv_rows(file, text)
            elif is_list:
                yield from row_readers.json_list(text)
            else:
                yield from row_readers.json_lines(text)

    def _table_rows(self, file: DataFile) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the rows of a Parquet or Arrow file, as (number, row)."""
        # One batch at a time, and only the fields that are read: a file may be larger than memory.
        with row_readers.open_table(file) as (schema, batches):
            names = check_schema(self.data, file, schema)
            decode = row_readers.JsonDecoder(schema)
            number = 0
            for batch in batches(row_readers.BATCH, names):
                for row in batch.to_pylist():
                    number += 1
                    yield number, convert_row(row, decode)

    @contextmanager
    def reporting(self, index: int) -> Iterator[None]:
        """Convert errors in the `with` block, which reads a file, into a Fault.

        `index` is the index of the file.
        """
        try:
            with _report_errors(self.data, self.files[index]):
                yield
        except BadRow as error:
            raise self._row_fault(index, error) from None
        except BadFile as error:
            message = f"the data file {self.files[index].path} {error}"
            raise Fault(Diagnostic("bad-data", message, self.data.span)) from None

    def _row_fault(self, index: int, error: BadRow) -> Fault:
        help = error.help or (fix_commands.lfs(str(self.files[index].path)) if error.number == 1 else "")
        return bad_row(self.data, (index << FILE) + error.number, str(error), help)


def convert_row(row: Mapping[str, Any], decode: row_readers.JsonDecoder) -> dict[str, Any]:
    """Return a row of a Parquet or Arrow file as JSON has it.

    In such a file, each struct has all fields of the column's type, and a field without a value is null. So fields that
    are null are removed from messages.
    """
    return {name: _drop_nulls(decode(name, value)) for name, value in row.items()}


def check_schema(data: DataSource, file: DataFile, schema: Any) -> list[str]:
    """Check the fields of a Parquet or Arrow file; return those that are read.

    Raises Fault if a field is missing or repeated.
    """
    types = _read_types(schema)
    names: list[str] = []
    lacking = []
    for column, template in data.fields.items():
        for name in templates.read_fields(template):
            names.append(name)
            try:
                nested_fields.find(types, name)
            except nested_fields.Absent as absent:
                lacking.append(missing_field(data, f"the data file {file.path}", types, column, absent))
                break
            if repeated := next((several for several in types.several if _overlaps(name, several)), ""):
                message = f"the data file {file.path} has several fields `{repeated}`"
                raise Fault(Diagnostic("bad-data", message, data.stated.get(column, data.span)))
    if lacking:
        raise Fault(*lacking)
    return list(dict.fromkeys(names))


def head(data: DataSource, most: int, graph: Graph) -> int:
    """Count the rows of some data, up to `most`, and check the first `LOOKED` rows.

    At most `CHARACTERS` characters of text are read. If there may be more rows after them, the result is `most`. Raises
    Fault for the same mistakes as `RowStream` and `RowTaker`.
    """
    stream = RowStream(data, CHARACTERS)
    taker = RowTaker(data, graph)
    count = 0
    for number, raw in stream.raw_rows():
        count += 1
        if count <= LOOKED:
            if (row := stream.parse(number, raw)) is not None:
                taker.take(row, number)
        elif count >= most:
            break
    if count < most and stream.limit.reached:
        return most
    if not count:
        raise _no_rows_fault(data)
    return min(count, most)


class RowTaker:
    """Converts the rows of some data for the columns that read them."""

    def __init__(self, data: DataSource, graph: Graph) -> None:
        self.data = data
        self.columns = [(graph.column(column), name) for column, name in data.fields.items()]
        options = data.options
        self.prompts = prompt_columns(graph) if options.system or options.chat is not None else frozenset[str]()

    def take(self, row: Mapping[str, Any], number: int) -> dict[str, Any]:
        """Return a row's converted values in a dictionary from column names to values.

        `fields.take` converts the values. `number` is the number with which messages name the row. Raises Fault if a
        value does not fit the type of its column.
        """
        values = {}
        for column, name in self.columns:
            try:
                value = fields.take(row[name], column)
                if column.name in self.prompts:
                    value = fields.as_prompt(value, self.data.options.system, column.element == "text")
            except fields.Misfit as misfit:
                help = _suggest_read(row[name], column, name)
                problem = f"has {misfit.found} in `{name}`, where {misfit.wanted}"
                raise bad_row(self.data, number, problem, help) from None
            values[column.name] = value
        return values


def _suggest_read(value: Any, column: Column, name: str) -> str:
    """Return a help text for a value that does not fit its column.

    For an object or a list, the help suggests nested fields to read, or a column of type `json`. `name` is the name of
    the field that has the value.
    """
    json_hint = "a column of type `json` takes any object or list as it is, for functions"
    if value is None:
        return "to leave such rows out, write `missing = omit`"
    if column.element == "json":
        return ""
    if not isinstance(value, Mapping) or not value:
        return json_hint if column.element == "text" and isinstance(value, Mapping | list) else ""
    fitting_fields = [field for field in nested_fields.names(value) if _fits(nested_fields.find(value, field), column)]
    near = find_close_field("", column.name, dict.fromkeys(fitting_fields, False))
    forms = " or ".join(f'`{column.name} = "{name}.{field}"`' for field in ([near] if near else fitting_fields[:FORMS]))
    write = f"write {forms} to read a field of `{name}`; " if forms else ""
    return f"{write}{list_fields(value, name)}" + (f"; {json_hint}" if column.element == "text" else "")


def _fits(value: Any, column: Column) -> bool:
    try:
        fields.take(value, column)
    except fields.Misfit:
        return False
    return True


def few_rows_warning(data: DataSource, has: str, prompts: int) -> Diagnostic:
    """Return the warning that data have fewer rows than an iteration has prompts.

    `has` is a text about the number of rows. `prompts` is the number of prompts in an iteration.
    """
    message = f"{title(data)} has {has}, and an iteration begins with {prompts:,} prompts"
    help = "add rows, or take fewer prompts: now some rows occur several times in an iteration, in separate groups"
    return Diagnostic("few-rows", message, data.span, help, "warning")


def title(data: DataSource) -> str:
    """Return the name of data for messages: the path, or the name of a mixture."""
    return data.path or f"the mixture `{data.name}`"


def row_place(data: DataSource, number: int) -> str:
    """Describe where a row is, by the number that `RowStream` gives it."""
    file = list_files(data)[number >> FILE]
    is_line = file.format == "csv" or (file.format == "json" and not row_readers.is_list(file))
    return f"{'line' if is_line else 'row'} {number & ((1 << FILE) - 1)} of {file.path}"


def bad_row(data: DataSource, number: int, problem: str, help: str = "") -> Fault:
    return Fault(Diagnostic("bad-data", f"{row_place(data, number)} {problem}", data.span, help))


@contextmanager
def _report_errors(data: DataSource, file: DataFile) -> Iterator[None]:
    """Convert errors about a file in the `with` block into a Fault.

    The position of the Fault is the line of the program that names the file.
    """
    try:
        # Opening a pipe would wait for a writer, and a pipe can be read only once.
        if not stat.S_ISREG(file.path.stat().st_mode):
            raise OSError("it is not a regular file")
        yield
    except FileNotFoundError:
        raise Fault(Diagnostic("missing-file", f"there is no data file {file.path}", data.span)) from None
    except (OSError, UnicodeDecodeError, *row_readers.DAMAGED) as error:
        message = f"the data file {file.path} cannot be read: {error}"
        help = "write it in UTF-8: `iconv -f ENCODING -t UTF-8`" if isinstance(error, UnicodeDecodeError) else ""
        raise Fault(Diagnostic("missing-file", message, data.span, help)) from None
    except ValueError as error:
        if type(error).__name__ != "ArrowInvalid":  # pyarrow is imported only for the files that need it
            raise
        kind = {"parquet": "a Parquet file", "arrow": "an Arrow file"}.get(file.format, "compressed text")
        message = f"the data file {file.path} is not {kind}: {error}"
        raise Fault(Diagnostic("bad-data", message, data.span, fix_commands.lfs(str(file.path)))) from None


def _no_rows_fault(data: DataSource) -> Fault:
    few = " after `skip`" if data.options.skip else ""
    return Fault(Diagnostic("no-data", f"the data file {data.path} has no rows{few}", data.span))


def _overlaps(field: str, other: str) -> bool:
    """Return whether two dotted names are the same, or one field is inside the other.

    For example, the field `a.b` is inside the field `a`.
    """
    return f"{field}.".startswith(f"{other}.") or other.startswith(f"{field}.")


def _read_types(fields: Any) -> FieldTypes:
    """Return the types of the fields of a schema, or of the fields of a struct type."""
    import pyarrow as pa

    types = FieldTypes()
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
    """Return a value in which the null fields of all messages are removed."""
    if are_messages(value):
        return _without_nulls(value)
    return {key: _drop_nulls(item) for key, item in value.items()} if isinstance(value, dict) else value


def _without_nulls(value: Any) -> Any:
    """Return a copy of a value in which the null fields of all objects are removed."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
