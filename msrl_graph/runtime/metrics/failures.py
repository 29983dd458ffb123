"""Rows that failed: what is told of a task that some of its rows have left.

Invariant: in training and in evaluations all are counted, and the first told with their reasons. An iteration that no
row is left of ends the run: what no row comes out of is broken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ...emit.page import many
from ...ir.plan import Plan
from ..process.report import Report, RunError
from ..process.task import Task

FEW = 5  # rows whose reason is told


def failures(plan: Plan, task: Task, reports: Sequence[Report]) -> list[str]:
    """A message for each generation of which rows failed; RunError where none is left to train on."""
    sums: Counter[str] = Counter()
    for report in reports:
        sums.update({key: int(total) for key, (total, _) in report.sums.items() if "failed" in key or "kept" in key})
    found = []
    for i, node in enumerate(plan.graph.verb("generate")):
        head = f"{node.name}/failed" if i else "failed"
        if not (failed := sums[head]):
            continue
        reasons = [
            f"{n} {key.removeprefix(f'{head}/')}" for key, n in sorted(sums.items()) if key.startswith(f"{head}/")
        ]
        stay, rows = sums[f"kept/{node.name}"], int(sum(r.sums.get(f"kept/{node.name}", (0, 0))[1] for r in reports))
        if task.trains:
            where, rest = f"iteration {task.number}", f"{rows - stay} left it and {stay} stay"
        else:
            where = f"the evaluation of {task.name} after {many(task.number, 'iteration')}"
            rest = f"its means are those of the other {stay}"
        words = f"`{node.name}` ({node.span.place}): {failed} of {rows} rows failed in {where} ({', '.join(reasons)}); "
        first = [words for r in reports for words in r.failed.get(node.name, ())][:FEW]
        more = ["…"] if failed > len(first) else []
        if task.trains and not stay:
            raise RunError("\n  ".join([f"{words}nothing is left to train on", *first, *more]))
        found.append("\n  ".join([words + rest, *first, *more]))
    return found
