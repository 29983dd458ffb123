"""The rows of a data file: read, checked, tokenised, and dealt to iterations.

Invariant: which rows an iteration gets is a function of (seed, iteration) alone; a row that cannot be used is told with its line before
anything is started.
"""

from __future__ import annotations

import json
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
    """The rows of a JSON lines file, by line and column; `Fault` for a file that is missing or empty and for a row that cannot be used."""
    path = Path(data.path)
    if path.suffix not in (".jsonl", ".json"):
        raise Fault(Diagnostic("not-yet", f"`{path.suffix}` data cannot be read yet", data.span, "write it as JSON lines (.jsonl)"))
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: a JSON string may hold U+2028 and its like
    except FileNotFoundError:
        raise Fault(Diagnostic("missing-file", f"there is no data file {path}", data.span)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise Fault(Diagnostic("missing-file", f"the data file {path} cannot be read: {error}", data.span)) from None
    rows = {number: _row(line, number, data, graph) for number, line in enumerate(lines, 1) if line.strip()}
    if not rows:
        raise Fault(Diagnostic("no-data", f"the data file {path} has no rows", data.span))
    return rows


def _row(line: str, number: int, data: Data, graph: Graph) -> dict[str, Any]:
    def bad(what: str, help: str = "") -> Fault:
        return Fault(Diagnostic("bad-data", f"line {number} of {data.path} {what}", data.span, help))

    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise bad(f"is not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(row, dict):
        raise bad("is not an object", 'write one object a line: {"prompt": "...", ...}')
    found = {}
    for column, name in data.fields.items():
        if name not in row:
            there = ", ".join(f"`{k}`" for k in row) or "none"
            raise bad(f"has no field `{name}`, which the column `{column}` reads", f"its fields are {there}")
        value = row[name]
        if graph.column(column).element == "text" and isinstance(value, (int, float)) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str):
            raise bad(f"has {type(value).__name__} in `{name}`, where text belongs")
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
                what = f"line {line} of {data.path} has the token {token} ({tokenizer.id_to_token(token)!r}) in `{name}`"
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
