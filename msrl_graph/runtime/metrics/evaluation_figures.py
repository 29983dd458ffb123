"""What an evaluation reports beside the means of its columns: pass@k, best@k, maj@k, and all of it by a column.

Invariant: computed from all rows of the evaluation at once, so that it does not depend on which process had which row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ...ir.evaluation import Evaluation
from ...ir.plan import Plan
from ...ir.rowsets import rowsets
from ..data.columns import Array, ColumnData, ColumnRows
from ..process.task import Task, numbers
from ..process.task_report import RunError
from .pass_at_k import best_at, majority_at, pass_at

MOST_VALUES = 100  # of the column that an evaluation is parted by


def evaluation_figures(
    plan: Plan, evaluation: Evaluation, task: Task, pieces: Mapping[str, ColumnRows]
) -> dict[str, float]:
    """The figures by their keys in the metrics; `pieces` are the rows of the evaluation's columns.

    Raises RunError where the column that it is parted by has too many values.
    """
    found = rowsets(plan.graph)
    counted = numbers(found.sets, found.refilling, task)
    answers = _answers(pieces.get(evaluation.vote)) if evaluation.vote else None
    parts = _parts(evaluation, pieces)
    figures: dict[str, float] = {f"rows/{ending}": len(part) for ending, part in parts.items()}
    for column in evaluation.report:
        if (piece := pieces.get(column)) is None:
            continue
        finite = np.flatnonzero(np.isfinite(piece.column.values))
        rows = piece.rows[finite]
        values = piece.column.values[finite].astype(np.float64)
        prompts = counted.above(rows, found.columns[column], 0)
        attempts = _by_prompt(prompts, rows, values, answers)
        for k in evaluation.at:
            figures |= _at(evaluation, column, attempts, k)
        for ending, part in parts.items():
            own = {prompt: attempts[prompt] for prompt in part if prompt in attempts}
            some = {column: _mean([value for values, _ in own.values() for value in values])}
            for k in evaluation.at:
                some |= _at(evaluation, column, own, k)
            figures |= {f"{key}/{ending}": value for key, value in some.items()}
    return figures


def _parts(evaluation: Evaluation, pieces: Mapping[str, ColumnRows]) -> dict[str, list[int]]:
    """Group the prompts by the value of the column; the keys end metric names, as `data_source=gsm8k`."""
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


def _by_prompt(prompts: Array, rows: Array, values: Array, answers: Mapping[int, bytes] | None) -> dict[int, Attempts]:
    """By prompt the values of its rows, and their answers."""
    order = np.argsort(prompts, kind="stable")
    units, starts = np.unique(prompts[order], return_index=True)
    found: dict[int, Attempts] = {}
    for prompt, places in zip(units.tolist(), np.split(order, starts[1:]), strict=True):
        given = None if answers is None else [answers.get(int(row), b"") for row in rows[places]]
        found[prompt] = values[places], given
    return found


def _at(evaluation: Evaluation, column: str, attempts: Mapping[int, Attempts], k: int) -> dict[str, float]:
    """The figures of one k: means over the prompts that have so many attempts, and how many prompts have fewer."""
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


def _answers(piece: ColumnRows | None) -> dict[int, bytes]:
    """By row the answer as bytes; none where it is empty or not a number."""
    if piece is None:
        return {}
    return {int(row): _answer(piece.column, place) for place, row in enumerate(piece.rows)}


def _answer(column: ColumnData, place: int) -> bytes:
    if column.offsets is not None:
        return bytes(column[place])
    return b"" if column[place] != column[place] else (column[place] + 0).tobytes()
