"""Generation: what a rank does with prompts that it is handed, the verb `generate`.

Invariant: what is drawn for a row is a function of (seed, iteration, row), of its prompt and of the weights.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..engine import Sampling
from ..graph import Node
from ..plan import Evaluation, Plan
from ..rowsets import rowsets
from ..sequences import sequences
from . import wrong
from .columns import Array, Column, ragged
from .dock import Batch
from .engines import Engines
from .packing import distinct
from .readers import Task
from .report import Report
from .rows import Recording
from .tokens import Tokens


class Generation(Engines):
    """A rank of one of the pools of devices, as far as it generates: a batch in, the written columns out."""

    watch: wrong.Watch

    def __init__(self, plan: Plan, rank: int) -> None:
        super().__init__(plan, rank)
        self.seed = plan.deploy.run.seed
        self.sets = rowsets(plan.graph).sets
        self.recording: Recording | None = None  # where responses of training come from, if not from the generator

    def replay(self, folder: str) -> None:
        """Takes the responses of training from a recorded run from now on."""
        self.recording = Recording(Path(folder))

    def _generate(self, node: Node, task: Task, batch: Batch, report: Report) -> dict[str, tuple[Array, Column]]:
        if not len(batch.rows):  # a last chunk smaller than the groups are many
            return {}
        graph, first = self.plan.graph, self.plan.graph.verb("generate")[0].name == node.name
        evaluation = self._evaluation(node, task)
        response, as_drawn = wrong.drawn(graph, node)
        sampling = Sampling(
            samples=evaluation.samples if evaluation else int(node.number("samples", 1)),
            max_tokens=int(node.number("max_tokens", graph.bound(response))),
            temperature=evaluation.temperature if evaluation else node.number("temperature", 1.0),
            top_p=node.number("top_p", 1.0),
            top_k=int(node.number("top_k", 0)),
            seed=self.seed,
            iteration=task.number,
            stop=_strings(node, "stop"),
        )
        context = self._context(node, batch)
        rows = (batch.rows[:, None] * sampling.samples + np.arange(sampling.samples)).reshape(-1)
        if self.recording is not None and task.trains:
            tokens, logps = self.recording.responses(node, (response, as_drawn), task.number, context, rows, sampling.samples)
        else:
            tokens, logps = self.generators[node.name].generate(context, rows, sampling)
        column, logp = ragged(tokens, np.int32), ragged(logps, np.float32)
        self.watch.response(node, task, report, rows, column, logp, self.plan.model(node.name).vocabulary)
        head = "" if first else f"{node.name}/"  # of other generations than the first the metrics are named apart
        report.count(f"{head}response_length", float(len(column.values)), len(column))
        report.count(f"{head}prompt_tokens", float(sum(map(len, context)) * sampling.samples), 0)
        report.count(f"{head}response_tokens", float(len(column.values)), 0)
        report.count(f"{head}distinct_prompt_tokens", float(distinct(context, len(context))[0]), 0)
        for name, number in zip(("distinct_tokens", "distinct_rows"), distinct(tokens, sampling.samples), strict=True):
            report.count(head + name, float(number), 0)
        report.peak(f"{head}response_length_max", float(column.lengths.max(initial=0)))
        return {response: (rows, column), as_drawn: (rows, logp)}

    def _context(self, node: Node, batch: Batch) -> list[Array]:
        """What is generated after: the tokens of the columns that the node reads, text by the tokenizer of its model."""
        parts = []
        for name in sequences(self.plan.graph, node).context:
            column = batch.columns[name]
            if self.plan.graph.column(name).element == "text":
                column = Tokens(self.plan.model(node.name).path).read(column)
            parts.append(column)
        return [np.concatenate([c[i] for c in parts]) for i in range(len(batch.rows))]

    def _evaluation(self, node: Node, task: Task) -> Evaluation | None:
        """The evaluation under way, where it says how this node draws: one that reads prompts."""
        found = next((e for e in self.plan.deploy.evaluations if e.data == task.name), None)
        return found if self.plan.graph.level(node) == 0 else None


def _strings(node: Node, attribute: str) -> tuple[str, ...]:
    """An attribute that is a string or a list of them."""
    stated = node.attributes[attribute].literal() if attribute in node.attributes else ()
    return (stated,) if isinstance(stated, str) else tuple(map(str, stated))
