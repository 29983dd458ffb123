"""What is known about data before a run: left-out rows, control tokens.

Invariant: the same rows are checked, with the same errors, as when the run loads the data.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ...analysis.sequences import token_columns
from ...data import datafile
from ...data.datafile import RowStream, RowTaker, row_place
from ...diagnostics import Diagnostic
from ...ir.graph import Graph
from ...ir.plan import DataSource, Plan
from .dataset import Dataset

PREVIEW_ROWS = 1000  # the number of rows that are searched for control tokens


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
    """Examine data and return a preview of them.

    Raises Fault if a file cannot be read, if a row cannot be used, or if all rows are too long.
    """
    dataset = Dataset(data, plan)
    first = dict(islice(_rows(data, plan.graph), PREVIEW_ROWS))
    controls = [*_find_control_tokens(dataset, first)]
    examined = min(len(first), dataset.row_count)
    return DatasetPreview(
        dataset.row_count, examined, dataset.excluded, dataset.reason, len(controls), controls[0] if controls else ""
    )


def count_rows(data: DataSource, graph: Graph) -> DatasetPreview:
    """Check the rows of data without a tokenizer, and count them. Raises Fault."""
    return DatasetPreview(sum(1 for _ in _rows(data, graph)))


def _rows(data: DataSource, graph: Graph) -> Iterator[tuple[int, dict[str, Any]]]:
    taker = RowTaker(data, graph)
    return ((number, taker.take(row, number)) for number, row in RowStream(data))


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
