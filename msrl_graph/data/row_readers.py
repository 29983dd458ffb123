"""Readers of data files: one for each format.

Invariant: a value is read as the file has it: no type is inferred from other rows, and no text becomes a date or a
number. (The readers of the library datasets infer types: they read "2024-01-01" as a date, the answer 3 as 3.0 if
another answer is 2.5, and "007" in a CSV file as 7.) At most one part of a file is in memory. Heavy packages are
imported only for the files that need them: Parquet, Arrow and `.zst`.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO

from .data_files import DataFile
from .fields import Cell

CHUNK = 1 << 16  # characters of a list of objects that are read at a time
BATCH = 1 << 14  # rows of an Arrow file that are converted at a time
_CSV_FIELD = 1 << 30  # the longest cell, in characters
# What the packages raise for a file that is damaged or is not what its name says.
DAMAGED = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)


_BLANKS = re.compile(r"[ \t\n\r]*")
_scan = json.JSONDecoder().scan_once  # type: ignore[attr-defined]  # parses a value at an index, without the blanks around it


class BadRow(ValueError):
    """An error in a row; `number` is the row's number in its file."""

    def __init__(self, number: int, problem: str, help: str = "") -> None:
        super().__init__(problem)
        self.number = number
        self.help = help


class BadFile(ValueError):
    """An error in a file as a whole."""


@dataclass
class TextLimit:
    """The number of characters that may still be read."""

    left: int = -1  # no limit
    reached: bool = field(default=False)


class Lines:
    """A text file that is read only up to a limit.

    The last line before the limit is left out if it is not complete.
    """

    def __init__(self, file: TextIO, limit: TextLimit) -> None:
        self.file = file
        self.limit = limit

    def read(self, size: int) -> str:
        if self.limit.left < 0:
            return self.file.read(size)
        text = self.file.read(min(size, self.limit.left))
        self.limit.left -= len(text)
        self.limit.reached = self.limit.left == 0
        return text

    def readline(self) -> str:
        if self.limit.left < 0:
            return self.file.readline()
        line = self.file.readline(self.limit.left)
        self.limit.left -= len(line)
        if not self.limit.left:
            self.limit.reached = True
            return ""
        return line

    def __iter__(self) -> Iterator[str]:
        while line := self.readline():
            yield line


@contextmanager
def open_text(file: DataFile, limit: TextLimit | None = None) -> Iterator[Lines]:
    """Open a text file, decompressed, without the byte-order mark at its beginning."""
    with open_bytes(file) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as text:
        yield Lines(text, limit or TextLimit())


def open_bytes(file: DataFile) -> Any:
    """Open a text file as bytes, decompressed."""
    openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    if file.compression == ".zst":
        import pyarrow as pa

        return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(file.path), "rb"), "zstd"))
    return openers[file.compression](file.path, "rb") if file.compression else file.path.open("rb")


def is_list(file: DataFile) -> bool:
    """Return whether a JSON file is one list of objects, not one object per line."""
    if ".json" not in file.path.suffixes[-2:]:
        return False
    with open_text(file) as text:
        while beginning := text.read(CHUNK):
            if beginning.strip():
                return beginning.lstrip().startswith("[")
    return False


def json_lines(text: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield each line that is not blank, as (line number, line)."""
    # Not splitlines: a JSON string may hold U+2028 and similar characters.
    for number, line in enumerate(text, 1):
        if line.strip():
            yield number, line.rstrip("\r\n")


def parse_line(number: int, line: str) -> Any:
    """Parse a line as JSON. Raises BadRow."""
    try:
        value, end = _scan(line, 0)
        if end == len(line):
            return value
    except (StopIteration, ValueError, RecursionError):  # blanks at an end, or an error
        pass
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise BadRow(number, f"is not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # a number of too many digits, too many brackets
        raise BadRow(number, f"cannot be read: {error}") from None


def json_list(text: Lines) -> Iterator[tuple[int, Any]]:
    """Yield each object of a JSON list, as (number of the item, item). Raises BadRow."""
    decoder = json.JSONDecoder()
    part = ""  # what is read and not yet parsed begins at `start`
    start = 0
    size = CHUNK

    def more() -> bool:
        nonlocal part, start, size
        added = text.read(size)
        part = part[start:] + added
        start = 0
        size *= 2
        return bool(added)

    def skip(mark: str) -> bool:
        """Skip blanks and one of the characters `mark`; return whether there was one."""
        nonlocal start
        start = _BLANKS.match(part, start).end()  # type: ignore[union-attr]  # it matches nothing, too
        while start == len(part) and more():
            start = _BLANKS.match(part, start).end()  # type: ignore[union-attr]
        found = part[start : start + 1] in (*mark,)
        start += found
        return found

    skip("[")
    number = 0
    while not skip("]"):
        number += 1
        if number > 1 and not skip(","):
            if text.limit.reached:
                return
            is_end = start == len(part)
            problem = "is the last row, and `]` is missing after it" if is_end else "is not followed by a comma or `]`"
            raise BadRow(number - 1, problem)
        skip("")
        size = CHUNK
        while True:
            try:
                item, end = decoder.raw_decode(part, start)
                break
            except json.JSONDecodeError as error:
                at_end = error.msg.startswith("Unterminated string") or error.pos >= len(part) - 16
                place = error.pos - start + 1
                if at_end and more():
                    continue
                if text.limit.reached:
                    return
                raise BadRow(number, f"is not JSON: {error.msg} at character {place} of the row") from None
            except (ValueError, RecursionError) as error:
                raise BadRow(number, f"cannot be read: {error}") from None
        start = end
        if not isinstance(item, dict):
            raise BadRow(number, "is not an object", 'write a list of objects: [{"prompt": "...", ...}, ...]')
        yield number, item
    skip("")
    if start < len(part) and not text.limit.reached:
        raise BadRow(number, "is followed by text after the end of the list")


def csv_rows(file: DataFile, text: Lines) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each row of a CSV file, as (number of its last line, row).

    All values are texts; an empty cell is None. The first row has the names of the fields. Raises BadRow and BadFile.
    """
    csv.field_size_limit(_CSV_FIELD)
    first = text.readline()
    separator = "\t" if ".tsv" in file.path.suffixes else next((mark for mark in ",;\t" if mark in first), ",")

    def lines() -> Iterator[str]:
        yield first
        yield from text

    reader = csv.reader(lines(), delimiter=separator, strict=True)
    header: list[str] = []
    try:
        for cells in reader:
            if not cells:
                continue
            if not header:
                header = cells
                if several := next((name for name in header if header.count(name) > 1), None):
                    raise BadFile(f"has several fields `{several}`")
                continue
            if len(cells) != len(header):
                help = "a cell with a separator or a line break is written between double quotes"
                problem = f"has {len(cells)} cells, and the first line names {len(header)} fields"
                raise BadRow(reader.line_num, problem, help)
            yield (
                reader.line_num,
                {name: Cell(cell) if cell else None for name, cell in zip(header, cells, strict=True)},
            )
    except csv.Error as error:
        if not text.limit.reached:
            raise BadRow(reader.line_num, f"is not CSV: {error}", 'write `""` for a double quote in a cell') from None


@contextmanager
def open_table(file: DataFile) -> Iterator[tuple[Any, Any]]:
    """Open a Parquet or Arrow file, as (schema, function that yields batches).

    The function takes the number of rows of a batch, and the names of the fields to read. Raises ArrowInvalid if the
    file is of another format.
    """
    import pyarrow as pa
    from pyarrow import parquet

    if file.format == "parquet":
        with parquet.ParquetFile(file.path) as table:
            yield table.schema_arrow, lambda size, names: table.iter_batches(size, columns=names)
        return
    with pa.memory_map(str(file.path)) as source:
        try:
            reader = pa.ipc.open_file(source)
            parts = (reader.get_batch(i) for i in range(reader.num_record_batches))
        except pa.ArrowInvalid:
            source.seek(0)
            parts = reader = pa.ipc.open_stream(source)

        def batches(size: int, names: list[str]) -> Iterator[Any]:
            top = [name for name in reader.schema.names if any(_reads(wanted, name) for wanted in names)]
            for part in parts:
                for start in range(0, part.num_rows, size):
                    yield part.select(top).slice(start, size)

        yield reader.schema, batches


def _reads(wanted: str, name: str) -> bool:
    """Return whether the dotted name `wanted` may be in the field `name`."""
    return f"{wanted}.".startswith(f"{name}.")


class JsonDecoder:
    """Decodes values that the library datasets stores as JSON texts.

    The library names the fields of its type `Json` in the metadata of a file. `needed` says whether there are any.
    """

    def __init__(self, schema: Any) -> None:
        try:
            features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
            decoders = {name: _decoder(feature) for name, feature in features.items()}
        except (KeyError, ValueError, TypeError, AttributeError):
            decoders = {}
        self.decoders = {name: decoder for name, decoder in decoders.items() if decoder is not None}
        self.needed = bool(self.decoders)

    def __call__(self, name: str, value: Any) -> Any:
        """Return the value of the field `name`, decoded."""
        return self.decoders[name](value) if name in self.decoders else value


def _decoder(feature: Any) -> Callable[[Any], Any] | None:
    """Return a function that decodes the values of a feature; None if none must be."""
    if isinstance(feature, dict) and feature.get("_type") == "Json":
        return lambda value: json.loads(value) if isinstance(value, str) else value
    if isinstance(feature, list) or (isinstance(feature, dict) and feature.get("_type") in ("List", "LargeList")):
        inner = _decoder(feature[0] if isinstance(feature, list) else feature.get("feature"))
        return inner and (lambda value: [inner(item) for item in value] if isinstance(value, list) else value)
    if isinstance(feature, dict) and "_type" not in feature:
        parts = {name: part for name, item in feature.items() if (part := _decoder(item)) is not None}
        return (lambda value: value and value | {name: parts[name](value[name]) for name in parts}) if parts else None
    return None
