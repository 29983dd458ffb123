"""The rows of a data file: read, checked, tokenised, and dealt to iterations.

Invariant: which rows an iteration gets is a function of (seed, iteration) alone; a row that cannot be used is told with its number before
anything is started. The same rows in the same order are the same data, whichever kind of file they are in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .. import noise
from ..diagnostics import Diagnostic, Fault
from ..graph import Graph
from ..plan import Data, Plan
from .columns import Array, Column, ragged, texts
from .wrong import outside, vocabulary


def read(data: Data, graph: Graph) -> dict[int, dict[str, Any]]:
    """The rows of a JSON lines file, or of a Parquet one, by line (or row, from 1) and column; `Fault` for a file that is missing or empty
    and for a row that cannot be used."""
    path = Path(data.path)
    if path.suffix not in (".jsonl", ".json", ".parquet"):
        message = f"`{path.suffix}` data cannot be read"
        raise Fault(Diagnostic("bad-value", message, data.span, "write it as JSON lines (.jsonl), or as Parquet (.parquet)"))
    try:
        found = _parquet(data) if _is_parquet(data) else _lines(data)
        rows = {number: _row(row, number, data, graph) for number, row in found}
    except FileNotFoundError:
        raise Fault(Diagnostic("missing-file", f"there is no data file {path}", data.span)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise Fault(Diagnostic("missing-file", f"the data file {path} cannot be read: {error}", data.span)) from None
    if not rows:
        raise Fault(Diagnostic("no-data", f"the data file {path} has no rows", data.span))
    return rows


def _is_parquet(data: Data) -> bool:
    return Path(data.path).suffix == ".parquet"


def _lines(data: Data) -> Iterator[tuple[int, dict[str, Any]]]:
    # Not splitlines: a JSON string may hold U+2028 and its like.
    for number, line in enumerate(Path(data.path).read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise _bad(data, number, f"is not JSON: {error.msg} at column {error.colno}") from None
        if not isinstance(row, dict):
            raise _bad(data, number, "is not an object", 'write one object a line: {"prompt": "...", ...}')
        yield number, row


def _parquet(data: Data) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(data.path) as file:
            there = file.schema_arrow.names
            for column, name in data.fields.items():
                if name not in there:
                    raise _without(data, f"the data file {data.path}", column, there)
                if there.count(name) > 1:
                    raise Fault(Diagnostic("bad-data", f"the data file {data.path} has several fields `{name}`", data.span))
            # A part at a time, and of it the fields that are read: a file may hold more than memory does.
            number = 0
            for batch in file.iter_batches(columns=list(dict.fromkeys(data.fields.values()))):
                for row in batch.to_pylist():
                    yield (number := number + 1), row
    except pa.ArrowInvalid as error:
        raise Fault(Diagnostic("bad-data", f"the data file {data.path} is no Parquet file: {error}", data.span)) from None


def _where(data: Data, number: int) -> str:
    return f"{'row' if _is_parquet(data) else 'line'} {number} of {data.path}"


def _bad(data: Data, number: int, what: str, help: str = "") -> Fault:
    return Fault(Diagnostic("bad-data", f"{_where(data, number)} {what}", data.span, help))


def _without(data: Data, what: str, column: str, there: Iterable[str]) -> Fault:
    message = f"{what} has no field `{data.fields[column]}`, which the column `{column}` reads"
    fields = ", ".join(f"`{k}`" for k in there) or "none"
    return Fault(Diagnostic("bad-data", message, data.span, f"its fields are {fields}"))


def _row(row: dict[str, Any], number: int, data: Data, graph: Graph) -> dict[str, Any]:
    found = {}
    for column, name in data.fields.items():
        if name not in row:
            raise _without(data, _where(data, number), column, row)
        value = row[name]
        if graph.column(column).element == "text" and isinstance(value, (int, float)) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str):
            raise _bad(data, number, f"has {type(value).__name__} in `{name}`, where text belongs")
        found[column] = value
    return found


class Dataset:
    """The usable rows of a data file; prompts longer than their column's bound are left out and counted in `too_long`."""

    def __init__(self, data: Data, plan: Plan, tokenizer: Any) -> None:
        graph = plan.graph
        rows = read(data, graph)
        self.seed = plan.deploy.run.seed
        self.columns: dict[str, Column] = {}
        keep = np.ones(len(rows), bool)
        for name in data.fields:
            column = graph.column(name)
            values = [row[name] for row in rows.values()]
            if column.element == "text":
                self.columns[name] = texts(values)
            else:
                encoded = tokenizer.encode_batch(values, add_special_tokens=False)
                self.columns[name] = ragged([np.asarray(e.ids, np.int32) for e in encoded], np.int32)
                keep &= (self.columns[name].lengths <= graph.bound(name)) & (self.columns[name].lengths > 0)
        self.usable = np.flatnonzero(keep)
        self.too_long = int((~keep).sum())
        if not len(self.usable):
            raise Fault(Diagnostic("no-data", f"no row of {data.path} is short enough to be used", data.span))
        for name, tokens in self.columns.items():
            size = vocabulary(plan, name)
            if size and len(strange := self.usable[outside(tokens.take(self.usable), size)]):
                token, line = int(tokens[strange[0]].max()), list(rows)[strange[0]]
                what = f"{_where(data, line)} has the token {token} ({tokenizer.id_to_token(token)!r}) in `{name}`"
                help = "the model has no embedding for some of the tokenizer's tokens: take the tokenizer that it was trained with"
                raise Fault(Diagnostic("bad-data", f"{what}, outside the vocabulary of {size}", data.span, help))

    def __len__(self) -> int:
        return len(self.usable)

    def rows(self, iteration: int, count: int) -> dict[str, Column]:
        """`count` rows: the next of an endless sequence of passes over the data, each in its own order."""
        positions = np.arange(iteration * count, (iteration + 1) * count)
        size = len(self.usable)
        chosen = np.concatenate([self._order(p)[positions[positions // size == p] % size] for p in np.unique(positions // size)])
        return {name: column.take(self.usable[chosen]) for name, column in self.columns.items()}

    def all(self) -> dict[str, Column]:
        return {name: column.take(self.usable) for name, column in self.columns.items()}

    def _order(self, turn: int) -> Array:
        order: Array = np.argsort(noise.keys(self.seed, int(turn), np.arange(len(self.usable))), kind="stable")
        return order
