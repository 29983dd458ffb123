"""The rows of a data file: read, checked, tokenized and assigned to iterations.

Invariant: the row at a position (data_order.py) is a function of the seed; if rows are drawn by weight, it also depends
on the iteration and the weights. A row that cannot be used is either reported with its number before the run starts, or
left out and counted. The same rows in the same order give the same data in every file format.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ... import noise
from ...analysis.sequences import (
    columns_before,
    is_tokens,
    nodes_with_weights,
    responses,
    sequences,
    source_worker,
    token_columns,
)
from ...data import datafile, fields
from ...data.chat import Messages, messages
from ...data.datafile import bad_row, row_place, take_row
from ...diagnostics import Diagnostic, Fault
from ...ir.graph import Graph
from ...ir.plan import DataSource, Plan
from . import data_order
from .columns import DTYPES, Array, ColumnData, ragged, texts
from .numerics import rows_outside_vocabulary, vocabulary_size
from .rendering import BadMessages
from .token_pieces import BadPieceError
from .tokens import Tokens

PREVIEW_ROWS = 1000  # the number of rows that are tokenised before a run starts


@dataclass(frozen=True)
class DatasetPreview:
    """What is known about a data file before a run.

    The file has `rows` rows, and the first `examined` of them were examined. `left_out` rows are left out because of
    `reason`, and `controls` rows contain control tokens; `example` is the first such token, with its place.
    """

    rows: int
    examined: int = 0
    left_out: int = 0
    reason: str = ""
    controls: int = 0
    example: str = ""

    def __str__(self) -> str:
        """Describe how many rows are left out, and why; return "" if no row is left out."""
        return f"{self.left_out:,} of {self._examined} rows are left out: {self.reason}" if self.left_out else ""

    @property
    def _examined(self) -> str:
        return f"the first {self.examined:,}" if self.examined < self.rows else f"{self.rows:,}"

    def warnings(self, data: DataSource, prompts: int) -> Iterator[Diagnostic]:
        """Yield warnings on left-out rows, control tokens, and fewer rows than `prompts`."""
        if 2 * self.left_out > self.examined:
            help = "raise the bounds, or use other data: the run trains only on the remaining rows"
            yield Diagnostic("bad-data", f"{data.path}: {self}", data.span, help, "warning")
        if self.controls:
            subject = f"{self.controls:,} of {self._examined} rows of {data.path} contain control tokens in their text"
            message = f"{subject}, such as {self.example}: the model reads the token, not its letters"
            help = "ignore this if it is intended, as in prompts that a chat template has rendered"
            yield Diagnostic("bad-data", message, data.span, f"{help}; otherwise change the text", "warning")
        usable = self.rows - self.left_out  # an upper bound if not all rows were examined
        if usable < prompts:
            bound = "at most " if self.examined < self.rows else ""
            yield datafile.few_rows_warning(data, f"{bound}{usable:,} usable rows", prompts)


def check(data: DataSource, plan: Plan) -> DatasetPreview:
    """Examine a data file and return a preview of it.

    Raises Fault if the file cannot be read, if one of the first rows cannot be used, or if all rows are too long.
    """
    rows = read(data, plan.graph)
    try:
        first = dict(islice(rows.items(), PREVIEW_ROWS))
        dataset = Dataset(data, plan, rows=first)
    except Fault as fault:
        if len(rows) <= PREVIEW_ROWS or fault.diagnostics[0].code != "no-data":
            raise
        first = rows
        dataset = Dataset(data, plan, rows=rows)
    controls = [*_find_control_tokens(dataset, first)]
    return DatasetPreview(
        len(rows), len(first), dataset.too_long, dataset.reason, len(controls), controls[0] if controls else ""
    )


def _find_control_tokens(dataset: Dataset, rows: Mapping[int, dict[str, Any]]) -> Iterator[str]:
    """Yield the first control token of each row, and where in the file the token is.

    Only text that a model reads is searched. The token that ends a response is not reported.
    """
    added = dataset.tokens.tokenizer.get_added_tokens_decoder().values()
    if not (names := [re.escape(token.content) for token in added if token.special and token.content]):
        return
    control = re.compile("|".join(sorted(names, key=len, reverse=True)))
    read_columns = token_columns(dataset.graph)
    for line, row in rows.items():
        for column in [name for name in row if name in read_columns]:
            texts = [text for text in _strings(row[column]) if text]
            if column in dataset.responses:
                texts = [dataset.tokens.strip_end_token(text) for text in texts]
            if match := next((match for match in map(control.search, texts) if match), None):
                yield f"`{match[0]}` in `{dataset.data.fields[column]}` of {row_place(dataset.data, line)}"
                break


def _strings(value: Any) -> Iterator[str]:
    """Yield all texts in a field's value, which is a text or contains messages."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)


def read(data: DataSource, graph: Graph) -> dict[int, dict[str, Any]]:
    """Read the rows of a JSON lines or Parquet file.

    Returns, for each line number (in Parquet: row number, from 1), the values by column. Raises Fault if the file is
    missing or empty, or if a row cannot be used.
    """
    path = Path(data.path)
    if path.suffix not in (".jsonl", ".json", ".parquet"):
        message = f"`{path.suffix}` data cannot be read"
        raise Fault(
            Diagnostic("bad-value", message, data.span, "write it as JSON lines (.jsonl), or as Parquet (.parquet)")
        )
    rows = dict[int, dict[str, Any]]()
    numbers = _Numbers(data, graph)
    for number, row in datafile.rows(data):
        rows[number] = take_row(row, number, data, graph)
        numbers.add_row(number, row)
    for column, lines in numbers.find_whole_columns():
        for line in lines:
            rows[line][column] = rows[line][column].removesuffix(".0")
    return rows


class _Numbers:
    """The rows in which a text column has a float, such as 3.0, instead of text.

    If an integer is missing in a column of integers, many libraries convert the column to floats. If all floats of a
    column are whole numbers, `read` writes them as integers.
    """

    def __init__(self, data: DataSource, graph: Graph) -> None:
        self.fields = {column: name for column, name in data.fields.items() if graph.column(column).element == "text"}
        self.floats: dict[str, list[int]] = {column: [] for column in self.fields}
        self.broken = set[str]()

    def add_row(self, number: int, row: Mapping[str, Any]) -> None:
        for column, name in self.fields.items():
            if isinstance(value := row[name], float):
                self.floats[column].append(number)
                if not value.is_integer():
                    self.broken.add(column)

    def find_whole_columns(self) -> Iterator[tuple[str, list[int]]]:
        """Yield each column whose floats are all whole numbers, and its floats' lines."""
        yield from ((column, lines) for column, lines in self.floats.items() if column not in self.broken)


class Dataset:
    """The usable rows of a data file, numbered from 0 in the file's order.

    A row is left out if a column is longer than its bound, or if a column that a model reads has no token. `left_out`
    is the number of left-out rows by column; a row counts only for the first column that is too long or empty.
    `too_long` is the number of all left-out rows, and `reason` is a text with the reasons. `rows` is the result of
    `read`, if the caller has already read the file.
    """

    def __init__(
        self, data: DataSource, plan: Plan, tokenizer: Any = None, rows: Mapping[int, dict[str, Any]] | None = None
    ) -> None:
        worker = source_worker(plan.graph)
        assert worker is not None
        self.data = data
        self.graph = plan.graph
        self.order = noise.RandomStream(plan.deploy.run.seed, "order", data.name)
        self.weighted = noise.RandomStream(plan.deploy.run.seed, "weighted", data.name)
        self.tokens = Tokens(plan.deploy.models[worker.model].path, tokenizer)
        self.responses = responses(plan.graph)
        self.preceding = columns_before(plan.graph)
        rows = rows or read(data, plan.graph)
        self.lines = list(rows)
        # The lines with a text that is too long, of which only a prefix was encoded.
        self.cut = set[int]()
        self.columns = {name: self._build_column(name, list(rows.values())) for name in data.fields}
        self._check_lengths()
        self.left_out: dict[str, int] = {}
        keep = np.ones(len(rows), bool)
        for name in data.fields:
            fits = self._find_fitting_rows(name, plan)
            if excluded := int((keep & ~fits).sum()):
                self.left_out[name] = excluded
            keep &= fits
        self.usable = np.flatnonzero(keep)
        if not len(self.usable):
            message = f"no row of {data.path} is short enough to be used"
            raise Fault(Diagnostic("no-data", message, data.span, self.reason))
        for name, column in self.columns.items():
            if is_tokens(plan.graph, name) and (size := vocabulary_size(plan, name)):
                self._check_vocabulary(name, column, size)

    @property
    def too_long(self) -> int:
        return sum(self.left_out.values())

    @property
    def reason(self) -> str:
        """The reasons why rows are left out, for a message."""
        return ", ".join(
            f"`{column}` is empty or longer than {self.graph.bound(column):,} (rows: {count:,})"
            for column, count in self.left_out.items()
        )

    def _build_column(self, name: str, rows: list[dict[str, Any]]) -> ColumnData:
        column = self.graph.column(name)
        values = [row[name] for row in rows]
        if column.element in ("text", "json"):
            return texts(values)
        if not fields.holds_tokens(column):
            return ragged(values, DTYPES[column.element]) if column.dims else ColumnData(np.concatenate(values))
        written = [i for i, value in enumerate(values) if not isinstance(value, np.ndarray)]
        encoded = self._encode_texts(name, [rows[i] for i in written], [self.lines[i] for i in written])
        for i, ids in zip(written, encoded, strict=True):
            values[i] = ids
        if name in self.responses:
            values = self.tokens.append_end_tokens(values)
        return ragged(values, DTYPES[column.element])

    def _encode_texts(self, name: str, rows: list[dict[str, Any]], lines: list[int]) -> list[Array]:
        """Encode a column's texts; each text continues the preceding columns of its row.

        If a text is surely longer than the column's bound, only a prefix is encoded. The prefix is longer than the
        bound, too. So a row of many megabytes does not take minutes.
        """
        full_texts = [self._text(name, row, line) for row, line in zip(rows, lines, strict=True)]
        encoded_texts = [self.tokens.shorten(text, self.graph.bound(name)) for text in full_texts]
        self.cut |= {
            line for line, part, text in zip(lines, encoded_texts, full_texts, strict=True) if len(part) < len(text)
        }
        previous_columns = self.preceding.get(name)
        if previous_columns is None or self.tokens.pieces.exact:
            return self.tokens.encode(encoded_texts)
        encoded = self.tokens.encode(
            [item if line in self.cut else "" for item, line in zip(encoded_texts, lines, strict=True)]
        )
        uncut = [i for i, line in enumerate(lines) if line not in self.cut]
        all_from_file = {*previous_columns} <= self.data.fields.keys()
        try:
            preceding = (
                [self._text_before(previous_columns, rows[i], lines[i]) for i in uncut] if all_from_file else None
            )
            following = self.tokens.encode_after([encoded_texts[i] for i in uncut], preceding)
        except BadPieceError as error:
            raise self._encoding_fault(name, lines[uncut[error.index]], error) from None
        for i, ids in zip(uncut, following, strict=True):
            encoded[i] = ids
        return encoded

    def _encoding_fault(self, name: str, line: int, error: BadPieceError) -> Fault:
        """Build the fault for a text that cannot be encoded after its preceding text."""
        ids = "write the field as token ids"
        if self.graph.column(name).element == "text":
            ids = f"declare `{name}` as tokens, `i32[<= n]`, and {ids}"
        help = f"{ids}, or use a model whose tokenizer encodes parts of a text as it encodes the whole text"
        return bad_row(self.data, line, f"has text in `{self.data.fields[name]}`, and {error}", help)

    def _text_before(self, columns: Sequence[str], row: dict[str, Any], line: int) -> str:
        """Return a row's text in the columns `columns`, which precede some other column."""
        text = ""
        for name in columns:
            ids = isinstance(row[name], np.ndarray)
            if ids:
                text += self.tokens.decode([row[name]], special=True)[0]
            elif self.graph.column(name).element == "text":
                text += self._render(name, line, self.tokens.prompt_text, row[name])
            else:
                text += self._text(name, row, line)
        return text

    def _text(self, name: str, row: dict[str, Any], line: int) -> str:
        """Return the text of the column `name` in a row, with messages rendered as text."""
        value: str | Messages = row[name]
        if isinstance(value, str):
            return value
        if name not in self.responses:
            return self._render(name, line, self.tokens.prompt, value)
        previous_columns = [column for column in self.responses[name] if column in row]
        prompts = [
            prompt if isinstance(prompt, list) else messages(prompt) if isinstance(prompt, str) else None
            for prompt in (row[column] for column in previous_columns)
        ]
        if len(prompts) > 1 or None in prompts:
            others = " and ".join(f"`{self.data.fields[column]}`" for column in previous_columns)
            message = (
                f"has messages in `{self.data.fields[name]}`, but no single list of messages before it, in {others}"
            )
            raise bad_row(self.data, line, message, "write both as messages, or the response as text")
        return self._render(name, line, self.tokens.response, prompts[0] or [] if prompts else [], value)

    def _render(self, name: str, line: int, render: Callable[..., str], *arguments: str | Messages) -> str:
        try:
            return render(*arguments)
        except BadMessages as error:
            help = error.help or "name the folder of a model that was trained to chat, or write the field as text"
            raise bad_row(self.data, line, f"has messages in `{self.data.fields[name]}`, and {error}", help) from None

    def _check_lengths(self) -> None:
        """Raise Fault if two columns that must have the same lengths do not have them."""
        for name, column in self.columns.items():
            dims = self.graph.column(name).dims
            if not dims or dims[0].like not in self.columns:
                continue
            size = math.prod(dim.size for dim in dims[1:])
            expected = self.columns[dims[0].like].lengths
            # Lines in `cut` are left out in any case, and only a prefix of their text is encoded.
            complete = np.array([line not in self.cut for line in self.lines])
            if len(wrong_rows := np.flatnonzero(complete & (column.lengths != expected * size))):
                row = wrong_rows[0]
                message = f"has {column.lengths[row] // size} values in `{self.data.fields[name]}`"
                raise bad_row(self.data, self.lines[row], f"{message}, but `{dims[0].like}` has {expected[row]}")

    def _find_fitting_rows(self, name: str, plan: Plan) -> Array:
        """Return a mask of rows; False: the row is left out because of the column `name`."""
        kind = self.graph.column(name)
        column = self.columns[name]
        sequences_by_node = [(node, sequences(self.graph, node)) for node in nodes_with_weights(self.graph)]
        readers = {
            plan.model(node.name).path
            for node, sequence in sequences_by_node
            if name in (*sequence.context, *sequence.scored)
        }
        lengths = [column.lengths]
        if kind.element == "text":
            lengths = []
            for tokens in map(Tokens, sorted(readers)):
                input_texts = [
                    self._render(name, line, tokens.prompt_text, column.text(i)) for i, line in enumerate(self.lines)
                ]
                follows = name in self.preceding
                if kind.dims or not follows or tokens.pieces.exact:  # else the whole text must be encoded
                    input_texts = [
                        tokens.shorten(text, self.graph.bound(name) if kind.dims else 0) for text in input_texts
                    ]
                encode = tokens.encode_after if follows else tokens.encode
                try:
                    lengths.append(np.array([len(ids) for ids in encode(input_texts)]))
                except BadPieceError as error:
                    raise self._encoding_fault(name, self.lines[error.index], error) from None
        fits = np.ones(len(column), bool)
        for token_counts in lengths:
            fits &= (token_counts >= bool(readers)) & (
                token_counts <= (self.graph.bound(name) if kind.dims else token_counts)
            )
        return fits

    def _check_vocabulary(self, name: str, column: ColumnData, size: int) -> None:
        """Raise Fault if a usable row has a token outside the model's vocabulary."""
        if not len(unknown := self.usable[rows_outside_vocabulary(column.take(self.usable), size)]):
            return
        ids = column[unknown[0]]
        line = self.lines[unknown[0]]
        token = int(ids[(ids < 0) | (ids >= size)][0])
        text = self.tokens.tokenizer.id_to_token(token) if token >= 0 else None
        message = f"{row_place(self.data, line)} has the token {token}{f' ({text!r})' if text else ''} in `{name}`"
        help = (
            "the model has no embedding for some of the tokenizer's tokens: use the tokenizer that it was trained with"
        )
        if text is None:
            help = "the ids come from another tokenizer: write the field as text or messages"
        raise Fault(Diagnostic("bad-data", f"{message}, outside the vocabulary of {size}", self.data.span, help))

    def __len__(self) -> int:
        return len(self.usable)

    def locate(self, index: int) -> str:
        """Describe, for a message, where a usable row is in the file."""
        return row_place(self.data, self.lines[self.usable[index]])

    def indices(self, position: int, count: int) -> Array:
        """Return `count` row indices from `position` on; each pass has a new random order."""
        return data_order.shuffle_rows(self.order, len(self), position, count)

    def draw(self, weights: Array, iteration: int, position: int, count: int) -> Array:
        """Draw rows by weight: `count` rows of an iteration, from `position` on.

        `weights` has one number per usable row, finite and not negative. data_order.draw_rows describes the result.
        """
        return data_order.draw_rows(self.weighted, iteration, weights, position, count)

    def take(self, indices: Array) -> dict[str, ColumnData]:
        """Return the columns of these rows, in this order."""
        return {name: column.take(self.usable[indices]) for name, column in self.columns.items()}

    def rows(self, position: int, count: int) -> dict[str, ColumnData]:
        """Return the columns of the rows with the indices `indices(position, count)`."""
        return self.take(self.indices(position, count))

    def all(self) -> dict[str, ColumnData]:
        return self.take(np.arange(len(self)))
