"""Figures of an evaluation in addition to column means: pass@k, best@k, maj@k.

The attribute `by` of an evaluation can name a column, such as a column with the source of each prompt. Each figure is
then also computed for each value of this column, over the prompts with this value.

Invariant: the figures are computed from all rows of the evaluation together, so the figures do not depend on how the
rows were distributed over processes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ...analysis.rowsets import rowsets
from ...ir.evaluation import Evaluation
from ...ir.plan import Plan
from ..data.columns import Array, ColumnData, ColumnRows
from ..process.task import Task, row_numbers
from ..process.task_report import RunError
from .pass_at_k import best_at, majority_at, pass_at

MOST_VALUES = 100  # most values of the column that splits an evaluation


def evaluation_figures(
    plan: Plan, evaluation: Evaluation, task: Task, pieces: Mapping[str, ColumnRows]
) -> dict[str, float]:
    """Return the figures of an evaluation, by the figures' names in the metrics.

    A key of `pieces` is the name of a column that the figures need; the value has the rows of this column. Raises
    RunError if the column that the attribute `by` names has more than MOST_VALUES values.
    """
    row_sets = rowsets(plan.graph)
    counted = row_numbers(row_sets.sets, row_sets.refilling, task)
    answers = _answers_by_row(pieces.get(evaluation.vote)) if evaluation.vote else None
    parts = _group_prompts(evaluation, pieces)
    figures: dict[str, float] = {f"rows/{ending}": len(part) for ending, part in parts.items()}
    for column in evaluation.report:
        if (piece := pieces.get(column)) is None:
            continue
        finite = np.flatnonzero(np.isfinite(piece.column.values))
        rows = piece.rows[finite]
        values = piece.column.values[finite].astype(np.float64)
        prompts = counted.above(rows, row_sets.columns[column], 0)
        attempts = _attempts_by_prompt(prompts, rows, values, answers)
        for k in evaluation.at:
            figures |= _figures_at(evaluation, column, attempts, k)
        for ending, part in parts.items():
            own = {prompt: attempts[prompt] for prompt in part if prompt in attempts}
            part_figures = {column: _mean([value for values, _ in own.values() for value in values])}
            for k in evaluation.at:
                part_figures |= _figures_at(evaluation, column, own, k)
            figures |= {f"{key}/{ending}": value for key, value in part_figures.items()}
    return figures


def _group_prompts(evaluation: Evaluation, pieces: Mapping[str, ColumnRows]) -> dict[str, list[int]]:
    """Group the prompts by their values in the column `by` of the evaluation.

    A key of the result is the text that is appended to a metric's name for this group, such as `data_source=gsm8k`. The
    value has the row numbers of the group's prompts.
    """
    parts: dict[str, list[int]] = {}
    if evaluation.by in pieces:
        piece = pieces[evaluation.by]
        for place, row in enumerate(piece.rows.tolist()):
            ragged = piece.column.offsets is not None
            text = piece.column.text(place) if ragged else str(piece.column[place].item())
            parts.setdefault(f"{evaluation.by}={text}", []).append(row)
    if len(parts) > MOST_VALUES:
        raise RunError(
            f"`{evaluation.by}` ({evaluation.span.place}) has {len(parts):,} values in the data `{evaluation.data}`: "
            f"`by` takes a column with at most {MOST_VALUES}"
        )
    return dict(sorted(parts.items()))


Attempts = tuple[Array, Sequence[bytes] | None]


def _attempts_by_prompt(
    prompts: Array, rows: Array, values: Array, answers: Mapping[int, bytes] | None
) -> dict[int, Attempts]:
    """Return, for each prompt, the values and the answers of the prompt's rows.

    `prompts`, `rows` and `values` have an element for each row: the row's prompt, the row's number and the row's value.
    `answers` has the answers by row number.
    """
    order = np.argsort(prompts, kind="stable")
    units, starts = np.unique(prompts[order], return_index=True)
    attempts: dict[int, Attempts] = {}
    for prompt, places in zip(units.tolist(), np.split(order, starts[1:]), strict=True):
        prompt_answers = None if answers is None else [answers.get(int(row), b"") for row in rows[places]]
        attempts[prompt] = values[places], prompt_answers
    return attempts


def _figures_at(evaluation: Evaluation, column: str, attempts: Mapping[int, Attempts], k: int) -> dict[str, float]:
    """Compute pass@k, best@k and maj@k of a column for one k.

    Each figure is the mean over the prompts with at least k attempts. `fewer@k` is the number of prompts with fewer
    than k attempts.
    """
    enough = [(values, answers) for values, answers in attempts.values() if len(values) >= k]
    passed = [pass_at(len(values), int((values >= evaluation.passing).sum()), k) for values, _ in enough]
    figures = {
        f"{column}/pass@{k}": _mean(passed),
        f"{column}/best@{k}": _mean([best_at(values, k) for values, _ in enough]),
    }
    if evaluation.vote:
        votes = [majority_at(values, answers, k) for values, answers in enough if answers is not None]
        figures[f"{column}/maj@{k}"] = _mean(votes)
    if len(enough) < len(attempts):
        figures[f"{column}/fewer@{k}"] = len(attempts) - len(enough)
    return figures


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _answers_by_row(piece: ColumnRows | None) -> dict[int, bytes]:
    """Return the answer of each row as bytes, by row number.

    The bytes are empty if a row has no answer, or if its answer is NaN.
    """
    if piece is None:
        return {}
    return {int(row): _answer(piece.column, place) for place, row in enumerate(piece.rows)}


def _answer(column: ColumnData, place: int) -> bytes:
    if column.offsets is not None:
        return bytes(column[place])
    return b"" if column[place] != column[place] else (column[place] + 0).tobytes()
