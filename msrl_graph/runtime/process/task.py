"""A task: the unit of work that all processes of a run do together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ...ir.rowsets import Numbers, Rowset, Sieve

Part = Literal["whole", "opening", "rest"]


class WeightFetch(NamedTuple):
    """A version of weights to fetch, and how many fetches were ordered so far.

    The version is the number of iterations that were trained before.
    """

    version: int
    fetch_count: int


class CutPrompt(NamedTuple):
    """A prompt whose responses continue in the next iteration.

    - `position`: its place in the data's endless sequence of rows.
    - `responses`: the tokens of each, their log-probabilities as sampled, the versions of the weights that sampled
      them, and whether it has ended.
    - `cuts`: how often they were cut.
    - `iteration` and `row`: the iteration that they began in and their row there; the keys of their tokens are those.
    """

    position: int
    responses: tuple[tuple[Any, Any, Any, bool], ...]
    cuts: int
    iteration: int
    row: int


@dataclass(frozen=True)
class Task:
    """One pass over the graph: iteration `number` of training or of an evaluation.

    Training has the `name` "train". An evaluation has no filters.

    - `prompts`: the number of prompts in each round: the first and each refill. `position`: where they begin in the
      data's endless sequence of rows, without those that were `cut` in the iteration before (`partial`), which come
      first.
    - `wanted`: the number of prompts that must pass a filter that refills; 0: the number of a round.
    - `samples`: by generation, the number of responses for each row that it reads, where it differs from the program's.
    - `states`: the values of the run's states after the iteration before; empty if not known yet. `draws`: the values
      with which its rows are sampled, which may be older.
    - `fetches`: by resharding edge with `staleness`, the version with which its rows are sampled, and how many fetches
      were ordered of its generation so far, perhaps including this one.
    - `sends`: those of these edges over which the updates send the version with which they begin the task.
    - `part`: the part of their stream that the ranks of a pipelined pool, or the functions, are to do
      (ir/async_schedule.py); others do the whole stream.
    """

    name: str
    number: int
    prompts: int
    samples: Mapping[str, int] = field(default_factory=dict)
    position: int = 0
    states: Mapping[str, float] = field(default_factory=dict)
    fetches: Mapping[str, WeightFetch] = field(default_factory=dict)
    sends: tuple[str, ...] = ()
    cut: tuple[CutPrompt, ...] = ()
    part: Part = "whole"
    draws: Mapping[str, float] = field(default_factory=dict)
    wanted: int = 0

    @property
    def target(self) -> int:
        """The number of prompts that must pass a filter that refills."""
        return self.wanted or self.prompts

    def rounds(self, refill: int) -> int:
        """Return the maximal number of rounds of prompts with a filter's `refill`.

        Together they have as many prompts as 1 + `refill` rounds of the target.
        """
        return -(-self.target * (1 + refill) // self.prompts)

    @property
    def key(self) -> str:
        return f"{self.name}/{self.number}"

    @property
    def turn(self) -> tuple[int, bool]:
        """The order in which tasks end.

        An evaluation after n iterations comes before the next iteration.
        """
        return self.number, self.trains

    @property
    def trains(self) -> bool:
        return self.name == "train"


class Tables(NamedTuple):
    """All values of the states that have a value for each row of the data, by state.

    `draws` and `states` are as in `Task`.
    """

    draws: Mapping[str, Any]
    states: Mapping[str, Any]


def row_numbers(sets: Sequence[Rowset], refilling: Sieve | None, task: Task) -> Numbers:
    """Return how the rows of a task are numbered, in a graph of these sets.

    `refilling` is the filter that asks for more prompts.
    """
    rounds = task.rounds(refilling.refill) if refilling and task.trains else 1
    return Numbers(sets, task.prompts * rounds, task.samples)
