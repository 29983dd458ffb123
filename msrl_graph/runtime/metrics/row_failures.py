"""Rows that failed: what is told of a task that some of its rows have left.

Invariant: in training and in evaluations all are counted, and the first of each reason is told. An iteration that no
row is left of ends the run: what no row comes out of is broken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ...emit.humanize import many
from ...ir.attributes import place_of_call
from ...ir.plan import Plan
from ..process.task import Task
from ..process.task_report import Report, RunError


def failures(plan: Plan, task: Task, reports: Sequence[Report]) -> list[str]:
    """A message for each node of which rows failed; RunError where none is left to train on."""
    found = []
    first_of_all = plan.graph.verb("generate")[:1]
    for node in plan.graph.nodes:
        head = "failed" if node in first_of_all else f"{node.name}/failed"
        kept = f"kept/{node.name}"
        sums: Counter[str] = Counter()
        for key, (total, _) in ((k, of) for r in reports for k, of in r.sums.items()):
            if key in (head, kept) or key.startswith(f"{head}/"):
                sums[key] += int(total)
        if not (failed := sums.pop(head, 0)):
            continue
        stay = sums.pop(kept, 0)
        rows = int(sum(r.sums.get(kept, (0, 0))[1] for r in reports))
        reasons = [f"{n} {key.removeprefix(f'{head}/')}" for key, n in sorted(sums.items())]
        if task.trains:
            where = f"iteration {task.number}"
            rest = f"{rows - stay} left it and {stay} stay"
        else:
            where = f"the evaluation of {task.name} after {many(task.number, 'iteration')}"
            rest = f"its means are those of the other {stay}"
        words = (
            f"`{node.name}` ({place_of_call(node)}): {failed} of {rows} rows failed in {where} ({', '.join(reasons)}); "
        )
        first: dict[str, str] = {}
        for report in reports:
            first = report.failed.get(node.name, {}) | first
        lines = [first[reason] for reason in sorted(first)]
        if task.trains and not stay:
            raise RunError("\n  ".join([f"{words}nothing is left to train on", *lines]))
        found.append("\n  ".join([words + rest, *lines]))
    return found
