"""What an evaluation reports beside the means of its columns: pass@k, best@k and maj@k.

Invariant: computed from all rows of the evaluation at once, so that it does not depend on which process had which row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ...ir.evaluation import Evaluation
from ...ir.plan import Plan
from ...ir.rowsets import rowsets
from ..data.columns import Array, Column, Piece
from ..process.task import Task, numbers
from .attempts import best_at, majority_at, pass_at


def evaluation_figures(plan: Plan, evaluation: Evaluation, task: Task, pieces: Mapping[str, Piece]) -> dict[str, float]:
    """The figures by their keys in the metrics; `pieces` are the rows of the evaluation's columns."""
    found = rowsets(plan.graph)
    counted = numbers(found.sets, found.refilling, task)
    answers = _answers(pieces.get(evaluation.vote))
    figures: dict[str, float] = {}
    for column in evaluation.report:
        if (piece := pieces.get(column)) is None:
            continue
        finite = np.flatnonzero(np.isfinite(piece.column.values))
        rows, values = piece.rows[finite], piece.column.values[finite].astype(np.float64)
        prompts = counted.above(rows, found.columns[column], 0)
        attempts = _by_prompt(prompts, rows, values, answers if evaluation.vote else None)
        for k in evaluation.at:
            figures |= _at(evaluation, column, attempts, k)
    return figures


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


def _answers(piece: Piece | None) -> dict[int, bytes]:
    """By row the answer as bytes; none where it is empty or no number."""
    if piece is None:
        return {}
    return {int(row): _answer(piece.column, place) for place, row in enumerate(piece.rows)}


def _answer(column: Column, place: int) -> bytes:
    if column.offsets is not None:
        return bytes(column[place])
    return b"" if column[place] != column[place] else (column[place] + 0).tobytes()
