"""The rows of some data: read, checked, tokenized and assigned to iterations.

Invariant: the row at a position (data_order.py) is a function of the seed; if rows are drawn by weight, it also depends
on the iteration and the weights. A row that cannot be used is either reported with its number before the run starts, or
left out and counted. The same rows in the same order give the same data in every file format, whether they are in
memory or in mapped files.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ... import noise
from ...data.data_files import list_files
from ...data.datafile import RowStream, RowTaker, row_place
from ...diagnostics import Diagnostic, Fault
from ...ir.plan import DataSource, Plan
from ..process import shipped_files
from . import data_order, row_store, text_blocks
from .columns import DTYPES, Array, ColumnData, ragged
from .row_batch import LateColumnError, RowBatch, RowReading
from .row_store import RowWriter, StoredRows

BATCH = 1 << 14  # rows that become columns at a time; more rows than that are stored in files
_TOKENIZER = 1 << 26  # bytes; larger files of a model's folder have no tokenizer


class Dataset:
    """The usable rows of some data, numbered from 0 in the order of the files.

    A row is left out if a column is longer than its bound, or if a column that a model reads has no token. `left_out`
    is the number of left-out rows by column; a row counts only for the first column that is too long or empty.
    `dropped` is the number of rows that were left out because a field was missing, by column. `too_long` is the number
    of rows in `left_out`, and `reason` is a text with all reasons.
    """

    def __init__(self, data: DataSource, plan: Plan, tokenizer: Any = None) -> None:
        self.data = data
        self.graph = plan.graph
        self.weighted = noise.RandomStream(plan.deploy.run.seed, "weighted", data.name)
        self.reading = RowReading(data, plan, tokenizer)
        self.tokens = self.reading.tokens
        self.responses = self.reading.responses
        stored = _load(self.reading)
        self.columns = stored.columns
        self.lines = stored.lines
        self.usable = stored.usable
        self.left_out = stored.left_out
        self.dropped = stored.dropped
        self.late = stored.late
        self.row_count = len(stored.lines) + sum(stored.dropped.values())
        if not len(self.usable):
            message = f"no row of {data.path} is short enough to be used"
            raise Fault(Diagnostic("no-data", message, data.span, self.reason))
        self.order = data_order.RowOrder(noise.RandomStream(plan.deploy.run.seed, "order", data.name), len(self))

    @property
    def too_long(self) -> int:
        return sum(self.left_out.values())

    @property
    def excluded(self) -> int:
        """The number of rows that are not used, for any reason."""
        return self.too_long + sum(self.dropped.values())

    @property
    def reason(self) -> str:
        """The reasons why rows are left out, for a message."""
        long = [
            f"`{column}` is empty or longer than {self.graph.bound(column):,} (rows: {count:,})"
            for column, count in self.left_out.items()
        ]
        missing = [
            f"`{self.data.fields[column]}` is missing (rows: {count:,})" for column, count in self.dropped.items()
        ]
        return ", ".join([*long, *missing])

    def __len__(self) -> int:
        return len(self.usable)

    def locate(self, index: int) -> str:
        """Describe, for a message, where a usable row is in its file."""
        return row_place(self.data, int(self.lines[self.usable[index]]))

    def indices(self, position: int, count: int) -> Array:
        """Return `count` row indices from `position` on; each pass has a new random order."""
        return self.order.take(position, count)

    def draw(self, weights: Array, iteration: int, position: int, count: int) -> Array:
        """Draw rows by weight: `count` rows of an iteration, from `position` on.

        `weights` has one number per usable row, finite and not negative. data_order.draw_rows describes the result.
        """
        return data_order.draw_rows(self.weighted, iteration, weights, position, count)

    def take(self, indices: Array) -> dict[str, ColumnData]:
        """Return the columns of these rows, in this order."""
        rows = self.usable[indices]
        return {name: self._encode(name, column.take(rows)) for name, column in self.columns.items()}

    def column(self, name: str) -> ColumnData:
        """Return a column of all usable rows."""
        return self._encode(name, self.columns[name].take(self.usable))

    def _encode(self, name: str, column: ColumnData) -> ColumnData:
        if name not in self.late:
            return column
        ids = self.tokens.encode([column.text(row) for row in range(len(column))])
        return ragged(ids, DTYPES[self.graph.column(name).element])

    def rows(self, position: int, count: int) -> dict[str, ColumnData]:
        """Return the columns of the rows with the indices `indices(position, count)`."""
        return self.take(self.indices(position, count))

    def all(self) -> dict[str, ColumnData]:
        return self.take(np.arange(len(self)))


def _load(reading: RowReading) -> StoredRows:
    """Read all rows: into memory if they are one batch, else into files.

    Raises Fault.
    """
    numbers = _Numbers(reading)
    stream = RowStream(reading.data)
    first = dict(islice(numbers.take_rows(stream), BATCH + 1))
    if len(first) > BATCH:
        return row_store.load(_key(reading), lambda folder: _store(reading, folder), reading.data.span)
    if not first:
        dropped = ", ".join(f"`{column}`: {count:,}" for column, count in stream.dropped.items())
        message = f"each row of {reading.data.path} lacks a value, so `missing = omit` leaves no row ({dropped})"
        raise Fault(Diagnostic("no-data", message, reading.data.span))
    for column, lines in numbers.find_whole_columns().items():
        for line in lines:
            first[line][column] = first[line][column].removesuffix(".0")
    batch = RowBatch(reading, [*first], [*first.values()])
    return StoredRows(batch.columns, np.array(batch.lines), np.flatnonzero(batch.keep), batch.left_out, stream.dropped)


def _store(reading: RowReading, folder: Path) -> None:
    """Write all rows of some data into the files of a folder, batch by batch."""
    late = reading.find_late_columns()
    whole = dict[str, list[int]]()
    while True:
        numbers = _Numbers(reading, whole)
        stream = RowStream(reading.data)
        left_out: dict[str, int] = {}
        with RowWriter(folder, [*reading.data.fields]) as writer:
            try:
                for batch in _batches(reading, stream, numbers, late):
                    writer.add(batch.columns, np.array(batch.lines), batch.keep)
                    for name, count in batch.left_out.items():
                        left_out[name] = left_out.get(name, 0) + count
            except LateColumnError as error:
                late.remove(str(error))
                continue
            if (found := numbers.find_whole_columns()).keys() == whole.keys():
                writer.finish(left_out, stream.dropped, frozenset(late))
                return
            whole = found


def _batches(reading: RowReading, stream: RowStream, numbers: _Numbers, late: Collection[str]) -> Iterator[RowBatch]:
    """Yield all rows of some data, many at a time if they are plain text."""
    blocks = text_blocks.read_blocks(reading, stream, late)
    for block in blocks or ():
        if block.columns is not None:
            yield RowBatch(reading, block.numbers, [], late, block.columns)
            continue
        parsed = (
            (number, stream.parse(number, raw)) for number, raw in zip(block.numbers.tolist(), block.raw, strict=True)
        )
        part = dict(numbers.take_rows((number, row) for number, row in parsed if row is not None))
        if part:
            yield RowBatch(reading, [*part], [*part.values()], late)
    rows = numbers.take_rows(stream) if blocks is None else iter(())
    while part := dict(islice(rows, BATCH)):
        yield RowBatch(reading, [*part], [*part.values()], late)


def _key(reading: RowReading) -> str:
    """Return a digest of all that decides the columns of some data."""
    data = reading.data
    graph = reading.graph
    files = []
    for file in list_files(data):
        status = file.path.stat()
        # A change of a file changes its ctime, even if a program sets its mtime back.
        files.append((str(file.path.absolute()), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino))
    folders = {reading.tokens.folder, *(folder for readers in reading.readers.values() for folder in readers)}
    models = {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for folder in sorted(folders)
        for file in sorted(shipped_files.find_copy(folder).glob("*"))
        if file.suffix in (".json", ".jinja", ".model", ".txt") and file.stat().st_size < _TOKENIZER
    }
    columns = [(graph.column(name), graph.bound(name), sorted(reading.readers[name])) for name in data.fields]
    versions = [importlib.metadata.version(package) for package in ("msrl_graph", "tokenizers", "transformers")]
    settings = (data.fields, data.options, reading.responses, reading.preceding, reading.vocabularies)
    return row_store.key(files, models, columns, versions, *settings)


class _Numbers:
    """Converts rows, and finds the text columns that have floats, such as 3.0.

    If an integer is missing in a column of integers, many libraries convert the column to floats. If all floats of a
    column are whole numbers, they are written as integers. This is known only after the last row; `whole` has the
    columns of which it is known.
    """

    def __init__(self, reading: RowReading, whole: Collection[str] = ()) -> None:
        graph = reading.graph
        self.taker = RowTaker(reading.data, graph)
        self.whole = whole
        self.fields = {
            column: name for column, name in reading.data.fields.items() if graph.column(column).element == "text"
        }
        self.floats: dict[str, list[int]] = {}
        self.broken = set[str]()

    def take_rows(self, rows: Iterable[tuple[int, dict[str, Any]]]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the converted values of each row, as (number of the row, values)."""
        for number, row in rows:
            values = self.taker.take(row, number)
            for column, name in self.fields.items():
                if isinstance(value := row[name], float):
                    if len(lines := self.floats.setdefault(column, [])) <= BATCH:
                        lines.append(number)
                    if not value.is_integer():
                        self.broken.add(column)
                    if column in self.whole:
                        values[column] = values[column].removesuffix(".0")
            yield number, values

    def find_whole_columns(self) -> dict[str, list[int]]:
        """Return each column whose floats are all whole, and lines of such floats."""
        return {column: lines for column, lines in self.floats.items() if column not in self.broken}
