"""An evaluation as a plan has it.

Invariant: its fields are those of `EvaluateOptions`, resolved, with its name and where it is stated.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..diagnostics import NOWHERE, Span
from .graph import Graph, Node


@dataclass(frozen=True)
class Draw:
    """How a generation draws in an evaluation: so many `samples` (0: as many as in training) at a `temperature` (None:
    that of training)."""

    generation: str
    samples: int = 0
    temperature: float | None = None
    span: Span = NOWHERE


@dataclass(frozen=True)
class Evaluation:
    """Runs the nodes upstream of the reported columns on all of `data`: before, after, and at every `every`-th
    iteration (0: never). Generations that read prompts draw `samples` responses (0: as many as each does in training)
    at a `temperature` (None: its own); `draws` are of generations that have settings of their own. `name` "": that of
    the data.

    `at` are the k of pass@k, where a response passes from `passing` on, of best@k, and of maj@k by the column `vote`.
    `by` is the column whose values part the rows. `best` is the figure by which the best checkpoint is kept ("": none
    is), and `patience` how many evaluations in a row may give no better one (0: any number).
    """

    data: str
    every: int
    report: tuple[str, ...]
    samples: int
    temperature: float | None
    label: str = ""  # what a person calls the first of the reported figures
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
        """The name of its tasks, which streams and metrics have."""
        return self.name or self.data

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it reads: its nodes are those that these need."""
        return (*self.report, *filter(None, (self.vote, self.by)))

    @property
    def needs_rows(self) -> bool:
        """Whether its figures are computed from rows that processes have together, not from their sums."""
        return bool(self.at or self.by)

    def draw(self, graph: Graph, node: Node) -> Draw:
        """How a generation draws: what its own settings leave open is as the evaluation says of those that read
        prompts, and as in training of those that read another's text."""
        own = next((draw for draw in self.draws if draw.generation == node.name), Draw(node.name))
        reads_prompts = graph.level(node) == 0
        return Draw(
            node.name,
            own.samples or (self.samples if reads_prompts else 0),
            self.temperature if own.temperature is None and reads_prompts else own.temperature,
        )

    def samples_of(self, graph: Graph) -> dict[str, int]:
        """By generation the responses to each row that it reads, where these are not as many as in training."""
        draws = [self.draw(graph, node) for node in graph.verb("generate")]
        return {draw.generation: draw.samples for draw in draws if draw.samples}

    @property
    def figures(self) -> tuple[str, ...]:
        """The keys of its figures in the metrics, without those of the parts that `by` makes."""
        kinds = ("pass", "best", *(("maj",) if self.vote else ()))
        return (*self.report, *(f"{column}/{kind}@{k}" for column in self.report for k in self.at for kind in kinds))

    def title(self, column: str) -> str:
        """What a person calls a figure."""
        return self.label if self.label and column == self.report[0] else f"{column} on {self.task}"
