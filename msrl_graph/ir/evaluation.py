"""Evaluations of a plan: their options, their columns and their figures.

A figure is a number that an evaluation reports, such as the mean of a column or pass@8.

Invariant: an `Evaluation` has the resolved values of `EvaluateOptions`, and the evaluation's name and span in the
program.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..diagnostics import NOWHERE, Span
from .graph import Graph, Node


@dataclass(frozen=True)
class Draw:
    """Sampling settings of a generation in an evaluation.

    - `samples`: the number of responses to each row; 0 means the same number as in training.
    - `temperature`: None means the same temperature as in training.
    """

    generation: str
    samples: int = 0
    temperature: float | None = None
    span: Span = NOWHERE


@dataclass(frozen=True)
class Evaluation:
    """An evaluation of the weights on all rows of a data file.

    The evaluation runs the nodes that compute its columns. It runs before and after training, and after each `every`-th
    iteration (0: only before and after training).

    - `data`: the name of the data. `report`: the columns whose means are reported.
    - `samples`, `temperature`: settings of the generations that read prompts. 0 and None mean the same as in training.
    - `draws`: settings of single generations, which replace `samples` and `temperature`.
    - `name`: "" means that the evaluation has the name of the data.
    - `at`: the values of k for pass@k and best@k, and for maj@k if `vote` is set.
    - `passing`: a response passes if its value in the reported column is at least this number.
    - `vote`: the column with the answer of each response.
    - `by`: the column that splits the rows: figures are also reported for each value of this column.
    - `best`: the figure that decides which checkpoint is kept as the best; "" means that no best checkpoint is kept.
    - `patience`: training ends after this number of successive evaluations without a better figure; 0 means never.
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
        """The name of this evaluation in instruction streams and metrics."""
        return self.name or self.data

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the evaluation reads. They determine which nodes run."""
        return (*self.report, *filter(None, (self.vote, self.by)))

    @property
    def needs_rows(self) -> bool:
        """Whether the figures are computed from the rows of all processes together.

        If False, the figures are computed from one sum per process.
        """
        return bool(self.at or self.by)

    def draw(self, graph: Graph, node: Node) -> Draw:
        """Return the sampling settings of a generation in this evaluation.

        The settings that `draws` states for the generation have priority. For a setting that `draws` does not state, a
        generation that reads prompts uses the setting of the evaluation. A generation that reads the text of another
        generation samples as in training.
        """
        own = next((draw for draw in self.draws if draw.generation == node.name), Draw(node.name))
        reads_prompts = graph.level(node) == 0
        return Draw(
            node.name,
            own.samples or (self.samples if reads_prompts else 0),
            self.temperature if own.temperature is None and reads_prompts else own.temperature,
        )

    def samples_of(self, graph: Graph) -> dict[str, int]:
        """Return the stated number of responses to each row, for each generation.

        A generation without a stated number samples as in training and is left out.
        """
        draws = [self.draw(graph, node) for node in graph.verb("generate")]
        return {draw.generation: draw.samples for draw in draws if draw.samples}

    @property
    def figures(self) -> tuple[str, ...]:
        """The metric keys of the evaluation's figures.

        Figures for single values of the column `by` are left out.
        """
        kinds = ("pass", "best", *(("maj",) if self.vote else ()))
        return (
            *self.report,
            *(f"{column}/{kind}@{count}" for column in self.report for count in self.at for kind in kinds),
        )

    def title(self, column: str) -> str:
        """Return the title under which the mean of a column is shown."""
        return self.label if self.label and column == self.report[0] else f"{column} on {self.task}"
