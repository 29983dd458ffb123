"""A task: what the processes of a run are asked to do at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ...ir.rowsets import Numbers, Rowset, Sieve

Part = Literal["whole", "opening", "rest"]


class WeightFetch(NamedTuple):
    """A version of weights, which is the iterations that were trained before, and how many times one was told to be
    fetched so far."""

    version: int
    told: int


class CutPrompt(NamedTuple):
    """A prompt whose responses go on in the next iteration.

    - `position`: where it stands in the data's endless sequence of rows.
    - `responses`: of each its tokens, their log-probabilities as drawn, the versions of the weights that drew them, and
      whether it has ended.
    - `cuts`: how often they were cut.
    - `iteration` and `row`: those that they began in and as, whose keys their tokens are drawn by.
    """

    position: int
    responses: tuple[tuple[Any, Any, Any, bool], ...]
    cuts: int
    iteration: int
    row: int


@dataclass(frozen=True)
class Task:
    """One pass over the graph: iteration `number` of training (`name` is "train"), or of an evaluation, which has no
    filters.

    - `prompts`: how many come at once, and again with each refill; `position`: where they begin in the data's endless
      sequence of rows, those aside that were `cut` in the iteration before (`partial`): these come first.
    - `wanted`: how many prompts are to go on where a filter refills; 0: as many as come at once.
    - `samples`: by generation how many responses it draws to each row that it reads, where these are not as many as
      the program says.
    - `states`: the values of the run's states that the iteration before left; none where that is not known yet.
      `draws`: those that its rows are drawn by, which may be older.
    - `fetches`: by resharding edge with `staleness`, the version that its rows are drawn with, and how many its
      generation was told to fetch so far, this one perhaps among them.
    - `sends`: of these edges those over which the updates send the version that they begin it with.
    - `part`: what the ranks of a pipelined pool, or the functions, are to do of their stream (ir/async_schedule.py);
      others do the whole.
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
        """How many prompts are to go on where a filter refills."""
        return self.wanted or self.prompts

    def rounds(self, refill: int) -> int:
        """How many rounds of prompts there may be with a filter's `refill`: as many prompts as that many rounds of the
        target have."""
        return -(-self.target * (1 + refill) // self.prompts)

    @property
    def key(self) -> str:
        return f"{self.name}/{self.number}"

    @property
    def turn(self) -> tuple[int, bool]:
        """Tasks end in the order of their turns: an evaluation after so many iterations before the next one."""
        return self.number, self.trains

    @property
    def trains(self) -> bool:
        return self.name == "train"


class Tables(NamedTuple):
    """By state that each row of the data has a value of, all its values: `draws` and `states` as those of a `Task`."""

    draws: Mapping[str, Any]
    states: Mapping[str, Any]


def numbers(sets: Sequence[Rowset], refilling: Sieve | None, task: Task) -> Numbers:
    """How the rows of a task are numbered, in a graph of these sets; `refilling` is the filter that asks for more
    prompts."""
    rounds = task.rounds(refilling.refill) if refilling and task.trains else 1
    return Numbers(sets, task.prompts * rounds, task.samples)
