"""Some rows of a data file as columns: tokenized, with the rows that can be used.

Invariant: the columns of a row depend on this row alone, not on the other rows of its batch. A row that cannot be used
is either reported with its number, or left out and counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from ...analysis.sequences import columns_before, is_tokens, nodes_with_weights, responses, sequences, source_worker
from ...data import fields
from ...data.chat import Messages, messages
from ...data.datafile import bad_row, row_place
from ...diagnostics import Diagnostic, Fault
from ...ir.plan import DataSource, Plan
from .columns import DTYPES, Array, ColumnData, ragged, texts
from .numerics import rows_outside_vocabulary, vocabulary_size
from .rendering import BadMessages
from .token_pieces import BadPieceError
from .tokens import model_tokens, policy_tokens


class RowReading:
    """How rows become columns: tokenizers, bounds, and late columns.

    A *late* column has texts that are tokenized when a row is used. A text needs no tokenization before if its length
    in characters shows that it has neither too many tokens nor none.
    """

    def __init__(self, data: DataSource, plan: Plan, tokenizer: Any = None) -> None:
        worker = source_worker(plan.graph)
        assert worker is not None
        self.data = data
        self.plan = plan
        self.graph = plan.graph
        self.tokens = policy_tokens(plan, tokenizer)
        self.responses = responses(plan.graph)
        self.preceding = columns_before(plan.graph)
        reads = [(plan.model(node.name).path, sequences(plan.graph, node)) for node in nodes_with_weights(plan.graph)]
        # The folders of the models that read each column.
        self.readers = {
            name: {path for path, sequence in reads if name in (*sequence.context, *sequence.scored)}
            for name in data.fields
        }
        self.vocabularies = {name: vocabulary_size(plan, name) for name in data.fields if is_tokens(plan.graph, name)}

    def find_late_columns(self) -> set[str]:
        """Return the columns of tokens whose texts can be tokenized when a row is used."""
        same_length = {
            dim.like for name in self.data.fields for dim in self.graph.column(name).dims if name in self.data.fields
        }
        ids = self.tokens.tokenizer.get_vocab(with_added_tokens=True).values()
        return {
            name
            for name, size in self.vocabularies.items()
            if name not in {*self.responses, *same_length}
            and not (name in self.preceding and not self.tokens.pieces.exact)
            and fields.holds_tokens(self.graph.column(name))
            and (not size or max(ids, default=0) < size)
            and self.tokens.pieces.fitting_characters(1 << 20) >= 0
        }


class LateColumnError(Exception):
    """A late column has token ids in some row, so it cannot be tokenized later."""


class RowBatch:
    """Some rows as columns.

    - `lines`: the number of each row.
    - `columns`: the columns; a column of `late` has texts.
    - `keep`: a mask of rows. A row is left out if a column is longer than its bound, or if a column that a model reads
      has no token.
    - `rows`: the values of each row by column, from which the columns are built unless they are given.
    - `left_out`: the number of left-out rows by column; a row counts only for the first column that is too long or
      empty.
    """

    def __init__(
        self,
        reading: RowReading,
        lines: Sequence[int] | Array,
        rows: list[dict[str, Any]],
        late: Collection[str] = (),
        columns: dict[str, ColumnData] | None = None,
    ) -> None:
        self.data = reading.data
        self.graph = reading.graph
        self.tokens = reading.tokens
        self.responses = reading.responses
        self.preceding = reading.preceding
        self.readers = reading.readers
        self.late = late
        self.lines = [*map(int, lines)]
        # The lines with a text that is too long, of which only a prefix was encoded.
        self.cut = set[int]()
        self.columns = columns or {name: self._build_column(name, rows) for name in self.data.fields}
        self._check_lengths()
        self.left_out: dict[str, int] = {}
        self.keep = np.ones(len(lines), bool)
        for name in self.data.fields:
            fits = self._find_fitting_rows(name, reading.plan)
            if excluded := int((self.keep & ~fits).sum()):
                self.left_out[name] = excluded
            self.keep &= fits
        for name, size in reading.vocabularies.items():
            if size and name not in late:
                self._check_vocabulary(name, self.columns[name], size)

    def _build_column(self, name: str, rows: list[dict[str, Any]]) -> ColumnData:
        column = self.graph.column(name)
        values = [row[name] for row in rows]
        if column.element in ("text", "json"):
            return texts(values)
        if name in self.late:
            if any(isinstance(value, np.ndarray) for value in values):
                raise LateColumnError(name)
            return texts(self._text(name, row, line) for row, line in zip(rows, self.lines, strict=True))
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
        readers = self.readers[name]
        if name in self.late:
            return self._find_fitting_texts(column, self.graph.bound(name), bool(readers))
        lengths = [column.lengths]
        if kind.element == "text":
            lengths = []
            for tokens in (model_tokens(plan, folder) for folder in sorted(readers)):
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

    def _find_fitting_texts(self, column: ColumnData, bound: int, is_read: bool) -> Array:
        """Return a mask of the texts of a late column that are not too long.

        A text that a model reads has at least one token.

        Only a text whose length does not show this is encoded.
        """
        assert column.offsets is not None
        fits = (column.lengths <= self.tokens.pieces.fitting_characters(bound)) & (column.lengths > 0)
        fits[np.searchsorted(column.offsets, np.flatnonzero(column.values > 127), "right") - 1] = False  # not ASCII
        uncertain = np.flatnonzero(~fits).tolist()
        encoded = self.tokens.encode([self.tokens.shorten(column.text(i), bound) for i in uncertain])
        counts = np.array([len(ids) for ids in encoded], np.int64)
        fits[uncertain] = (counts >= is_read) & (counts <= bound)
        return fits

    def _check_vocabulary(self, name: str, column: ColumnData, size: int) -> None:
        """Raise Fault if a usable row has a token outside the model's vocabulary."""
        usable = np.flatnonzero(self.keep)
        if not len(unknown := usable[rows_outside_vocabulary(column.take(usable), size)]):
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
