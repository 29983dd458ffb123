"""The evaluations of a plan as text: data, times, sampling, and kept checkpoints.

Invariant: each generation is shown with the sampling settings that the evaluation uses, regardless of which statement
of the program sets them.
"""

from __future__ import annotations

from ..analysis.rowsets import nodes_upstream
from ..diagnostics.quantities import plural
from ..diagnostics.sheet import Sheet
from ..ir.attributes import GenerateAttributes
from ..ir.evaluation import Evaluation
from ..ir.plan import Plan


def write_evaluations(page: Sheet, plan: Plan) -> None:
    """Write the evaluations of a plan to a page; write nothing if there are none."""
    if not plan.deploy.evaluations:
        return
    remark = "without updates; a generation that reads another's text samples as in training, or by `draws`"
    page.heading("Evaluations", remark)
    rows = []
    for evaluation in plan.deploy.evaluations:
        when = f"every {plural(evaluation.every, 'iteration')}, " if evaluation.every > 1 else ""
        when = "every iteration, " if evaluation.every == 1 else when
        generations = _generations(plan, evaluation) or [("-", "-", "-")]
        for place, generation in enumerate(generations):
            labels = (
                (evaluation.task, evaluation.data, f"{when}before and after training") if not place else ("", "", "")
            )
            rows.append((*labels, *generation))
    page.table(("evaluation", "data", "when", "generation", "responses", "temperature"), rows, right=(4,), keep=(0, 1))
    for evaluation in plan.deploy.evaluations:
        if evaluation.best:
            which = "smallest" if evaluation.goal == "minimize" else "greatest"
            sentence = f"{evaluation.task}: the checkpoint with the {which} `{evaluation.best}` is kept"
            ends = plural(evaluation.patience, "evaluation")
            page.line(
                sentence + (f"; the training ends after {ends} without a better one" if evaluation.patience else "")
            )


def _generations(plan: Plan, evaluation: Evaluation) -> list[tuple[str, str, str]]:
    """List the generations that an evaluation runs.

    An entry has the node's name, the number of responses that the node samples for each row that it reads, and the
    sampling temperature.
    """
    needed = nodes_upstream(plan.graph, evaluation.columns)
    generations = []
    for node in plan.graph.verb("generate"):
        if node.name not in needed:
            continue
        own = GenerateAttributes.of(node)
        draw = evaluation.draw(plan.graph, node)
        temperature = str(own.temperature) if draw.temperature is None else f"{draw.temperature:g}"
        generations.append((node.name, f"{draw.samples or own.samples:,}", temperature))
    return generations
