"""The evaluations of a plan as text: on what, when, and how each of their generations draws.

Invariant: a generation that an evaluation's `samples` and `temperature` do not concern is shown with its own.
"""

from __future__ import annotations

from ..ir.attributes import Generate
from ..ir.evaluation import Evaluation
from ..ir.plan import Plan
from ..ir.rowsets import upstream
from .page import Sheet
from .words import many


def write_evaluations(page: Sheet, plan: Plan) -> None:
    if not plan.deploy.evaluations:
        return
    page.heading("Evaluations", "without an update; a generation that reads the text of another draws as in training")
    rows = []
    for evaluation in plan.deploy.evaluations:
        when = f"each {many(evaluation.every, 'iteration')}, " if evaluation.every > 1 else ""
        when = "each iteration, " if evaluation.every == 1 else when
        generations = _generations(plan, evaluation) or [("-", "-", "-")]
        for place, generation in enumerate(generations):
            head = (evaluation.task, evaluation.data, f"{when}before and after") if not place else ("", "", "")
            rows.append((*head, *generation))
    page.table(("evaluation", "data", "when", "generation", "responses", "temperature"), rows, right=(4,), keep=(0, 1))


def _generations(plan: Plan, evaluation: Evaluation) -> list[tuple[str, str, str]]:
    """List the generations that an evaluation runs: name, responses for each row that it reads, temperature."""
    needed = upstream(plan.graph, evaluation.columns)
    found = []
    for node in plan.graph.verb("generate"):
        if node.name not in needed:
            continue
        own, prompts = Generate.of(node), plan.graph.level(node) == 0
        samples = (evaluation.samples if prompts else 0) or own.samples
        stated = evaluation.temperature if prompts else None
        found.append((node.name, f"{samples:,}", f"{stated:g}" if stated is not None else str(own.temperature)))
    return found
