"""The rows of a data file: read, checked, tokenised, and dealt to iterations.

Invariant: which row stands at a position is a function of the seed, and of the iteration and the weights where it is
drawn by some; a row that cannot be used is told with its number before anything is started, or left out and counted.
The same rows in the same order are the same data, whichever kind of file they are in.
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
from ...data import datafile, fields
from ...data.chat import Messages, messages
from ...data.datafile import bad, take_row, where
from ...diagnostics import Diagnostic, Fault
from ...ir.graph import Graph
from ...ir.plan import DataSource, Plan
from ...ir.sequences import is_tokens, models, preceding, responses, sequences, speaker, token_columns
from . import data_order
from .columns import DTYPES, Array, ColumnData, ragged, texts
from .numerics import outside, vocabulary
from .rendering import BadMessages
from .token_pieces import BadPieceError
from .tokens import Tokens

LOOKED = 1000  # rows that are tokenised before a run is started


@dataclass(frozen=True)
class DatasetPreview:
    """What is known of a data file of `rows` before a run: of the first so many that were `looked` at, how many are
    left `out`, and why; and how many hold control tokens, with an example."""

    rows: int
    looked: int = 0
    out: int = 0
    why: str = ""
    controls: int = 0
    example: str = ""

    def __str__(self) -> str:
        """How many rows are left out, in words; nothing where none is."""
        return f"{self.out:,} of {self._first} rows are left out: {self.why}" if self.out else ""

    @property
    def _first(self) -> str:
        return f"the first {self.looked:,}" if self.looked < self.rows else f"{self.rows:,}"

    def doubts(self, data: DataSource, prompts: int) -> Iterator[Diagnostic]:
        """Warnings where most rows are left out, texts hold control tokens, or an iteration takes more rows than there
        are."""
        if 2 * self.out > self.looked:
            help = "state higher bounds, or other data: all else is trained on these few"
            yield Diagnostic("bad-data", f"of {data.path} {self}", data.span, help, "warning")
        if self.controls:
            what = f"{self.controls:,} of {self._first} rows of {data.path} hold control tokens in their text, as"
            message = f"{what} {self.example}: a model reads the token, not its letters"
            help = "nothing is to be done where that is meant, as in prompts that a chat template has rendered"
            yield Diagnostic("bad-data", message, data.span, f"{help}; else write it otherwise", "warning")
        usable = self.rows - self.out  # or fewer, where not all were looked at
        if usable < prompts:
            yield datafile.few(data, f"{'at most ' * (self.looked < self.rows)}{usable:,} usable rows", prompts)


def check(data: DataSource, plan: Plan) -> DatasetPreview:
    """What there is in a data file; `Fault` for one that cannot be read, for a row of the first ones that cannot be
    used, and where no row is short enough."""
    rows = read(data, plan.graph)
    try:
        first = dict(islice(rows.items(), LOOKED))
        found = Dataset(data, plan, rows=first)
    except Fault as fault:
        if len(rows) <= LOOKED or fault.diagnostics[0].code != "no-data":
            raise
        first = rows
        found = Dataset(data, plan, rows=rows)
    controls = [*_controls(found, first)]
    return DatasetPreview(
        len(rows), len(first), found.too_long, found.why, len(controls), controls[0] if controls else ""
    )


def _controls(dataset: Dataset, rows: Mapping[int, dict[str, Any]]) -> Iterator[str]:
    """Where rows hold control tokens in text that a model reads, the first of each row. The token that ends a response
    is meant."""
    added = dataset.tokens.tokenizer.get_added_tokens_decoder().values()
    if not (names := [re.escape(token.content) for token in added if token.special and token.content]):
        return
    control = re.compile("|".join(sorted(names, key=len, reverse=True)))
    read = token_columns(dataset.graph)
    for line, row in rows.items():
        for column in [c for c in row if c in read]:
            texts = [t for t in _strings(row[column]) if t]
            if column in dataset.responses:
                texts = [dataset.tokens.unended(t) for t in texts]
            if found := next((m for m in map(control.search, texts) if m), None):
                yield f"`{found[0]}` in `{dataset.data.fields[column]}` of {where(dataset.data, line)}"
                break


def _strings(value: Any) -> Iterator[str]:
    """The texts in a field: its own, or those of messages."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)


def read(data: DataSource, graph: Graph) -> dict[int, dict[str, Any]]:
    """The rows of a JSON lines file, or of a Parquet one, by line (or row, from 1) and column; `Fault` for a file that
    is missing or empty and for a row that cannot be used."""
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
        numbers.see(number, row)
    for column, lines in numbers.whole():
        for line in lines:
            rows[line][column] = rows[line][column].removesuffix(".0")
    return rows


class _Numbers:
    """Numbers in columns of text. A column of whole numbers in which one is missing is a column of floats to many
    libraries: where all of them are whole, they are written so."""

    def __init__(self, data: DataSource, graph: Graph) -> None:
        self.fields = {c: name for c, name in data.fields.items() if graph.column(c).element == "text"}
        self.floats: dict[str, list[int]] = {column: [] for column in self.fields}
        self.broken = set[str]()

    def see(self, number: int, row: Mapping[str, Any]) -> None:
        for column, name in self.fields.items():
            if isinstance(value := row[name], float):
                self.floats[column].append(number)
                if not value.is_integer():
                    self.broken.add(column)

    def whole(self) -> Iterator[tuple[str, list[int]]]:
        """The columns in which all numbers are whole, and the rows with floats."""
        yield from ((column, lines) for column, lines in self.floats.items() if column not in self.broken)


class Dataset:
    """The rows of a data file that can be used, numbered from 0 in the file's order.

    Left out are rows with a column that is longer than its bound, or that has no token where a model reads it.
    `left_out` counts them by that column (the first, where there are several), `too_long` counts all of them, and
    `why` says it in words. `rows` are rows of the file as `read` gives them, where somebody has read it already.
    """

    def __init__(
        self, data: DataSource, plan: Plan, tokenizer: Any = None, rows: Mapping[int, dict[str, Any]] | None = None
    ) -> None:
        worker = speaker(plan.graph)
        assert worker is not None
        self.data = data
        self.graph = plan.graph
        self.order = noise.RandomStream(plan.deploy.run.seed, "order", data.name)
        self.weighted = noise.RandomStream(plan.deploy.run.seed, "weighted", data.name)
        self.tokens = Tokens(plan.deploy.models[worker.model].path, tokenizer)
        self.responses = responses(plan.graph)
        self.preceding = preceding(plan.graph)
        rows = rows or read(data, plan.graph)
        self.lines = list(rows)
        self.cut = set[int]()  # lines with a text of which only a beginning was encoded: it is too long already
        self.columns = {name: self._column(name, list(rows.values())) for name in data.fields}
        self._match()
        self.left_out: dict[str, int] = {}
        keep = np.ones(len(rows), bool)
        for name in data.fields:
            fits = self._fits(name, plan)
            if out := int((keep & ~fits).sum()):
                self.left_out[name] = out
            keep &= fits
        self.usable = np.flatnonzero(keep)
        if not len(self.usable):
            raise Fault(Diagnostic("no-data", f"no row of {data.path} is short enough to be used", data.span, self.why))
        for name, column in self.columns.items():
            if is_tokens(plan.graph, name) and (size := vocabulary(plan, name)):
                self._known(name, column, size)

    @property
    def too_long(self) -> int:
        return sum(self.left_out.values())

    @property
    def why(self) -> str:
        """Why rows are left out, for a sentence."""
        bounds = {c: self.graph.bound(c) for c in self.left_out}
        return ", ".join(f"`{c}` of {n:,} is empty or longer than {bounds[c]:,}" for c, n in self.left_out.items())

    def _column(self, name: str, rows: list[dict[str, Any]]) -> ColumnData:
        column = self.graph.column(name)
        values = [row[name] for row in rows]
        if column.element in ("text", "json"):
            return texts(values)
        if not fields.holds_tokens(column):
            return ragged(values, DTYPES[column.element]) if column.dims else ColumnData(np.concatenate(values))
        written = [i for i, v in enumerate(values) if not isinstance(v, np.ndarray)]
        encoded = self._encoded(name, [rows[i] for i in written], [self.lines[i] for i in written])
        for i, ids in zip(written, encoded, strict=True):
            values[i] = ids
        if name in self.responses:
            values = self.tokens.closed(values)
        return ragged(values, DTYPES[column.element])

    def _encoded(self, name: str, rows: list[dict[str, Any]], lines: list[int]) -> list[Array]:
        """The tokens of a column's texts, each after those of the columns before it in its row. Of a text that is
        longer than the column's bound whatever its tokens are, those of a beginning that is too long as well: one row
        of many megabytes takes no minutes."""
        whole = [self._text(name, row, line) for row, line in zip(rows, lines, strict=True)]
        found = [self.tokens.beginning(text, self.graph.bound(name)) for text in whole]
        self.cut |= {line for line, part, text in zip(lines, found, whole, strict=True) if len(part) < len(text)}
        before = self.preceding.get(name)
        if before is None or self.tokens.pieces.exact:
            return self.tokens.encode(found)
        encoded = self.tokens.encode([t if line in self.cut else "" for t, line in zip(found, lines, strict=True)])
        used = [i for i, line in enumerate(lines) if line not in self.cut]
        known = {*before} <= self.data.fields.keys()
        try:
            given = [self._before(before, rows[i], lines[i]) for i in used] if known else None
            following = self.tokens.following([found[i] for i in used], given)
        except BadPieceError as error:
            raise self._unjoined(name, lines[used[error.index]], error) from None
        for i, ids in zip(used, following, strict=True):
            encoded[i] = ids
        return encoded

    def _unjoined(self, name: str, line: int, error: BadPieceError) -> Fault:
        """A row whose text a tokenizer cannot encode after what comes before it."""
        ids = "write the field as token ids"
        if self.graph.column(name).element == "text":
            ids = f"declare `{name}` as tokens, `i32[<= n]`, and {ids}"
        help = f"{ids}, or take a model whose tokenizer encodes parts of a text as the whole"
        return bad(self.data, line, f"has text in `{self.data.fields[name]}`, and {error}", help)

    def _before(self, columns: Sequence[str], row: dict[str, Any], line: int) -> str:
        """The text of the columns before another in a row."""
        found = ""
        for name in columns:
            ids = isinstance(row[name], np.ndarray)
            if ids:
                found += self.tokens.decode([row[name]], special=True)[0]
            elif self.graph.column(name).element == "text":
                found += self._rendered(name, line, self.tokens.asked, row[name])
            else:
                found += self._text(name, row, line)
        return found

    def _text(self, name: str, row: dict[str, Any], line: int) -> str:
        """What a row's tokens are encoded from: text as it is, messages as the chat template writes them."""
        value: str | Messages = row[name]
        if isinstance(value, str):
            return value
        if name not in self.responses:
            return self._rendered(name, line, self.tokens.prompt, value)
        before = [c for c in self.responses[name] if c in row]
        prompts = [
            v if isinstance(v, list) else messages(v) if isinstance(v, str) else None for v in (row[c] for c in before)
        ]
        if len(prompts) > 1 or None in prompts:
            others = " and ".join(f"`{self.data.fields[c]}`" for c in before)
            what = f"has messages in `{self.data.fields[name]}`, and before it, in {others}, not one list of messages"
            raise bad(self.data, line, what, "write both as messages, or the response as text")
        return self._rendered(name, line, self.tokens.response, prompts[0] or [] if prompts else [], value)

    def _rendered(self, name: str, line: int, render: Callable[..., str], *given: str | Messages) -> str:
        try:
            return render(*given)
        except BadMessages as error:
            help = error.help or "name the folder of a model that was trained to chat, or write the field as text"
            raise bad(self.data, line, f"has messages in `{self.data.fields[name]}`, and {error}", help) from None

    def _match(self) -> None:
        """Looks at columns that are as long as another."""
        for name, column in self.columns.items():
            dims = self.graph.column(name).dims
            if not dims or dims[0].like not in self.columns:
                continue
            each = math.prod(d.size for d in dims[1:])
            wanted = self.columns[dims[0].like].lengths
            here = np.array([line not in self.cut for line in self.lines])  # others are left out, and not encoded whole
            if len(wrong := np.flatnonzero(here & (column.lengths != wanted * each))):
                row = wrong[0]
                what = f"has {column.lengths[row] // each} values in `{self.data.fields[name]}`"
                raise bad(self.data, self.lines[row], f"{what}, where `{dims[0].like}` has {wanted[row]}")

    def _fits(self, name: str, plan: Plan) -> Array:
        """The rows whose column is no longer than its bound, nor empty where a model reads it."""
        kind = self.graph.column(name)
        column = self.columns[name]
        read = [(n, sequences(self.graph, n)) for n in models(self.graph)]
        readers = {plan.model(n.name).path for n, s in read if name in (*s.context, *s.scored)}
        lengths = [column.lengths]
        if kind.element == "text":
            lengths = []
            for tokens in map(Tokens, sorted(readers)):
                asked = [self._rendered(name, line, tokens.asked, column.text(i)) for i, line in enumerate(self.lines)]
                follows = name in self.preceding
                if kind.dims or not follows or tokens.pieces.exact:  # else all of it must be fit to be encoded
                    asked = [tokens.beginning(text, self.graph.bound(name) if kind.dims else 0) for text in asked]
                encode = tokens.following if follows else tokens.encode
                try:
                    lengths.append(np.array([len(ids) for ids in encode(asked)]))
                except BadPieceError as error:
                    raise self._unjoined(name, self.lines[error.index], error) from None
        fits = np.ones(len(column), bool)
        for some in lengths:
            fits &= (some >= bool(readers)) & (some <= (self.graph.bound(name) if kind.dims else some))
        return fits

    def _known(self, name: str, column: ColumnData, size: int) -> None:
        """Looks for tokens outside the vocabulary of a model that reads them."""
        if not len(strange := self.usable[outside(column.take(self.usable), size)]):
            return
        ids = column[strange[0]]
        line = self.lines[strange[0]]
        token = int(ids[(ids < 0) | (ids >= size)][0])
        text = self.tokens.tokenizer.id_to_token(token) if token >= 0 else None
        what = f"{where(self.data, line)} has the token {token}{f' ({text!r})' if text else ''} in `{name}`"
        help = (
            "the model has no embedding for some of the tokenizer's tokens: take the tokenizer that it was trained with"
        )
        if text is None:
            help = "the ids are of another tokenizer: write the field as text or messages"
        raise Fault(Diagnostic("bad-data", f"{what}, outside the vocabulary of {size}", self.data.span, help))

    def __len__(self) -> int:
        return len(self.usable)

    def where(self, index: int) -> str:
        """The place of a usable row in the file, in words."""
        return where(self.data, self.lines[self.usable[index]])

    def indices(self, position: int, count: int) -> Array:
        """`count` rows from `position` on of an endless sequence of passes over the data, each in its own order."""
        return data_order.shuffled(self.order, len(self), position, count)

    def drawn(self, weights: Array, iteration: int, position: int, count: int) -> Array:
        """`count` rows from `position` on of an iteration's draw by `weights`, one a usable row, finite and not
        negative: without replacement, those of weight 0 last."""
        return data_order.drawn(self.weighted, iteration, weights, position, count)

    def take(self, indices: Array) -> dict[str, ColumnData]:
        """The columns of these rows, in this order."""
        return {name: column.take(self.usable[indices]) for name, column in self.columns.items()}

    def rows(self, position: int, count: int) -> dict[str, ColumnData]:
        """The columns of `indices(position, count)`."""
        return self.take(self.indices(position, count))

    def all(self) -> dict[str, ColumnData]:
        return self.take(np.arange(len(self)))
