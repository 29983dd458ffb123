"""Evaluations of a plan.

Invariant: an evaluation has the fields of `EvaluateOptions`, resolved, with its name and its span in the program.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..diagnostics import NOWHERE, Span
from .graph import Graph, Node


@dataclass(frozen=True)
class Draw:
    """Sampling settings of a generation in an evaluation.

    It draws `samples` responses (0: the number of training) at a `temperature` (None: that of training).
    """

    generation: str
    samples: int = 0
    temperature: float | None = None
    span: Span = NOWHERE


@dataclass(frozen=True)
class Evaluation:
    """An evaluation: the nodes upstream of the reported columns run on all of `data`.

    It runs before and after training, and after each `every`-th iteration (0: never). Generations that read prompts
    draw `samples` responses (0: the number of training) at a `temperature` (None: that of training). `draws` are the
    settings of single generations. A `name` of "" is that of the data.

    `at` are the k of pass@k, best@k and, by the column `vote`, maj@k. A response passes from `passing` on. `by` is the
    column by whose values rows are split. `best` is the figure by which the best checkpoint is kept ("": none is), and
    `patience` the number of evaluations in a row that may not improve it (0: any number).
    """

    data: str
    every: int
    report: tuple[str, ...]
    samples: int
    temperature: float | None
    label: str = ""  # the title of the first reported figure
    span: Span = NOWHERE
    name: str = ""
    at: tuple[int, ...] = ()
    passing: float = 1.0
    vote: str = ""
    by: str = ""
    draws: tuple[Draw, ...] = ()
    best: str = ""
    goal: str = "maximize"
    patience: int = 0

    @property
    def task(self) -> str:
        """The name of its tasks in streams and metrics."""
        return self.name or self.data

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it reads, which determine its nodes."""
        return (*self.report, *filter(None, (self.vote, self.by)))

    @property
    def needs_rows(self) -> bool:
        """Whether its figures need the rows of all processes, not only their sums."""
        return bool(self.at or self.by)

    def draw(self, graph: Graph, node: Node) -> Draw:
        """Return the sampling settings of a generation.

        Where its own settings leave something open, a generation that reads prompts uses those of the evaluation. One
        that reads the text of another generation draws as in training.
        """
        own = next((draw for draw in self.draws if draw.generation == node.name), Draw(node.name))
        reads_prompts = graph.level(node) == 0
        return Draw(
            node.name,
            own.samples or (self.samples if reads_prompts else 0),
            self.temperature if own.temperature is None and reads_prompts else own.temperature,
        )

    def samples_of(self, graph: Graph) -> dict[str, int]:
        """Return the responses per row of each generation that differs from training."""
        draws = [self.draw(graph, node) for node in graph.verb("generate")]
        return {draw.generation: draw.samples for draw in draws if draw.samples}

    @property
    def figures(self) -> tuple[str, ...]:
        """The keys of its figures in the metrics, without those of the groups of `by`."""
        kinds = ("pass", "best", *(("maj",) if self.vote else ()))
        return (
            *self.report,
            *(f"{column}/{kind}@{count}" for column in self.report for count in self.at for kind in kinds),
        )

    def title(self, column: str) -> str:
        """Return the title of a figure."""
        return self.label if self.label and column == self.report[0] else f"{column} on {self.task}"
