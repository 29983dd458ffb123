"""Messages about the rows that failed in an iteration or in an evaluation.

Invariant: in training and in evaluations, all failed rows are counted, and the first failed row of each reason is
reported. If no row of an iteration is left, the run ends with an error, because a program that yields no row is broken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ...diagnostics.quantities import plural
from ...ir.attributes import place_of_call
from ...ir.plan import Plan
from ..process.task import Task
from ..process.task_report import Report, RunError


def failures(plan: Plan, task: Task, reports: Sequence[Report]) -> list[str]:
    """Return a message for each node with failed rows in a task.

    A task is one iteration of training, or one evaluation. Raises RunError if no row is left to train on.
    """
    messages = []
    first_of_all = plan.graph.verb("generate")[:1]
    for node in plan.graph.nodes:
        failed_key = "failed" if node in first_of_all else f"{node.name}/failed"
        kept_key = f"kept/{node.name}"
        sums: Counter[str] = Counter()
        for key, (total, _) in ((name, figure) for report in reports for name, figure in report.sums.items()):
            if key in (failed_key, kept_key) or key.startswith(f"{failed_key}/"):
                sums[key] += int(total)
        if not (failed := sums.pop(failed_key, 0)):
            continue
        stay = sums.pop(kept_key, 0)
        rows = int(sum(report.sums.get(kept_key, (0, 0))[1] for report in reports))
        reasons = [f"{count} {key.removeprefix(f'{failed_key}/')}" for key, count in sorted(sums.items())]
        if task.trains:
            where = f"iteration {task.number}"
            rest = f"{rows - stay} dropped, {stay} remain"
        else:
            where = f"the evaluation of {task.name} after {plural(task.number, 'iteration')}"
            rest = f"its means are those of the other {stay}"
        text = (
            f"`{node.name}` ({place_of_call(node)}): {failed} of {rows} rows failed in {where} ({', '.join(reasons)}); "
        )
        first: dict[str, str] = {}
        for report in reports:
            first = report.failed.get(node.name, {}) | first
        lines = [first[reason] for reason in sorted(first)]
        if task.trains and not stay:
            raise RunError("\n  ".join([f"{text}nothing is left to train on", *lines]))
        messages.append("\n  ".join([text + rest, *lines]))
    return messages
