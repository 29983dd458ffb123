"""Columns of text, made of many rows at a time.

Invariant: a block has the rows and values that RowStream and RowTaker would give, or is given up. Arrow parses the text
of many rows in one call; it is used only if each column reads a text that is not converted, and never infers a type.
What is not plain text (a null, a number, messages, an error) is given up, and its rows are then read one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from ...data import row_readers, templates
from ...data.data_files import DataFile
from ...data.datafile import FILE, RowStream, check_schema, convert_row
from ...data.fields import Cell
from .columns import Array, ColumnData, texts
from .row_batch import RowReading

BYTES = 4 << 20  # of JSON lines in a block
ROWS = 1 << 14  # of other text


@dataclass(frozen=True)
class TextBlock:
    """Some rows: their numbers, and either their columns or the rows.

    The rows are as RowStream gives them before it parses them.
    """

    numbers: Array
    columns: dict[str, ColumnData] | None
    raw: list[Any]


def read_blocks(reading: RowReading, stream: RowStream, late: Collection[str]) -> Iterator[TextBlock] | None:
    """Yield all rows of some data as blocks; None if its rows must be read one by one."""
    data = reading.data
    options = data.options
    is_plain = not (options.skip or options.take or options.system or options.chat is not None) and all(
        "." not in name
        and not templates.is_template(name)
        and (
            column in late or (reading.graph.column(column).element == "text" and not reading.graph.column(column).dims)
        )
        for column, name in data.fields.items()
    )
    return _blocks(reading, stream, late) if is_plain else None


def _blocks(reading: RowReading, stream: RowStream, late: Collection[str]) -> Iterator[TextBlock]:
    for index, file in enumerate(stream.files):
        with stream.reporting(index):
            if file.format == "csv" or (file.format == "json" and row_readers.is_list(file)):
                rows = stream.file_rows(file)
                while part := [*islice(rows, ROWS)]:
                    numbers = (index << FILE) + np.array([number for number, _ in part])
                    found = [row for _, row in part]
                    yield TextBlock(numbers, _columns_of_rows(reading, found, late), found)
                continue
            parts = _line_blocks(reading, file) if file.format == "json" else _table_blocks(reading, file)
            for numbers, table, raw in parts:
                columns = _columns(reading, table, late) if table is not None else None
                yield TextBlock((index << FILE) + numbers, columns, raw() if columns is None else [])


def _line_blocks(reading: RowReading, file: DataFile) -> Iterator[tuple[Array, Any, Any]]:
    """Yield parts of a file: (line numbers, table, function for the lines).

    The table is None if Arrow cannot parse the part.
    """
    import pyarrow as pa
    from pyarrow import json

    schema = pa.schema([(name, pa.string()) for name in dict.fromkeys(reading.data.fields.values())])
    how = json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    first = 1
    with row_readers.open_bytes(file) as source:
        while block := source.read(BYTES):
            block += source.readline() if not block.endswith(b"\n") else b""
            block = block.removeprefix(b"\xef\xbb\xbf") if first == 1 else block
            lines = block.split(b"\n")
            numbers = np.array([number for number, line in enumerate(lines, first) if line.strip()], np.int64)
            table = None
            if len(numbers):
                try:
                    table = json.read_json(pa.BufferReader(block), json.ReadOptions(block_size=len(block) + 1), how)
                    table.validate(full=True)
                except pa.ArrowInvalid:
                    table = None

                def raw(lines: list[bytes] = lines) -> list[str]:
                    return [line.decode("utf-8").rstrip("\r") for line in lines if line.strip()]

                yield numbers, table if table is not None and len(table) == len(numbers) else None, raw
            first += len(lines) - block.endswith(b"\n")


def _table_blocks(reading: RowReading, file: DataFile) -> Iterator[tuple[Array, Any, Any]]:
    """Yield parts of a Parquet or Arrow file: (numbers, table, function for rows)."""
    first = 1
    with row_readers.open_table(file) as (schema, batches):
        names = check_schema(reading.data, file, schema)
        decode = row_readers.JsonDecoder(schema)
        for batch in batches(row_readers.BATCH, names):

            def raw(batch: Any = batch) -> list[Any]:
                return [convert_row(row, decode) for row in batch.to_pylist()]

            yield np.arange(first, first + batch.num_rows), None if decode.needed else batch, raw
            first += batch.num_rows


def _columns_of_rows(
    reading: RowReading, rows: list[dict[str, Any]], late: Collection[str]
) -> dict[str, ColumnData] | None:
    """Return the columns of rows of texts; None if a value is not plain text."""
    columns = {}
    for column, name in reading.data.fields.items():
        values: list[Any] = [row.get(name) for row in rows]
        if not {*map(type, values)} <= {str, Cell}:
            return None
        if column in late and any(value[:1] in "[ \t\n\r" for value in values):  # may be messages, or empty
            return None
        try:
            columns[column] = texts(values)
        except UnicodeEncodeError:  # half a character
            return None
    return columns


def _columns(reading: RowReading, table: Any, late: Collection[str]) -> dict[str, ColumnData] | None:
    """Return the columns of a table of texts; None if a value is not plain text."""
    import pyarrow as pa
    from pyarrow import compute

    columns = {}
    for column, name in reading.data.fields.items():
        values = table.column(name)
        if isinstance(values, pa.ChunkedArray):
            values = values.combine_chunks()
        if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)) or values.null_count:
            return None
        # A text in a column of tokens may be JSON of messages.
        if column in late and compute.any(compute.match_substring_regex(values, r"^\s*\[")).as_py():
            return None
        values = values.cast(pa.large_string())
        _, offsets, content = values.buffers()
        bounds = np.frombuffer(offsets, np.int64)[values.offset : values.offset + len(values) + 1]
        text = np.frombuffer(content or b"", np.uint8)[bounds[0] : bounds[-1]]
        columns[column] = ColumnData(text, bounds - bounds[0])
    return columns
