"""An evaluation as a plan has it.

Invariant: its fields are those of `EvaluateOptions`, resolved, with its name and where it is stated.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..diagnostics import NOWHERE, Span


@dataclass(frozen=True)
class Evaluation:
    """Runs the nodes upstream of the reported columns on all of `data`: before, after, and at every `every`-th
    iteration (0: never). Generations that read prompts draw `samples` responses (0: as many as each does in training)
    at a `temperature` (None: its own). `name` "": that of the data.

    `at` are the k of pass@k, where a response passes from `passing` on, of best@k, and of maj@k by the column `vote`.
    `by` is the column whose values part the rows.
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

    def title(self, column: str) -> str:
        """What a person calls a reported figure."""
        return self.label if self.label and column == self.report[0] else f"{column} on {self.task}"
