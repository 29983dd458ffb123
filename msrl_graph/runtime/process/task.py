"""A task: one pass over the graph, which all processes of a run execute together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ...analysis.rowsets import Numbers, Rowset, Sieve

Part = Literal["whole", "opening", "rest"]


class WeightFetch(NamedTuple):
    """A fetch of weights that a generation node must make over a resharding edge.

    - `version`: the version of the weights to fetch.
    - `fetch_count`: the number of fetches over this edge that the driver has ordered since the run began.
    """

    version: int
    fetch_count: int


class CutPrompt(NamedTuple):
    """A prompt whose responses were cut in one iteration and continue in the next.

    - `position`: the index of the prompt in the endless sequence of the data's rows.
    - `responses`: for each response, its tokens, the log-probabilities with which these tokens were sampled, the
      versions of the weights that sampled these tokens, and whether the response has ended.
    - `cuts`: how often the responses were cut.
    - `iteration`: the iteration in which the responses began.
    - `row`: the number of the prompt's row in that iteration. The noise keys of all tokens of the responses use
      `iteration` and `row`.
    """

    position: int
    responses: tuple[tuple[Any, Any, Any, bool], ...]
    cuts: int
    iteration: int
    row: int


@dataclass(frozen=True)
class Task:
    """One pass over the graph: iteration `number` of training or of an evaluation.

    A training task has the `name` "train". An evaluation has no filters.

    - `prompts`: the number of prompts in each round. The first round and each refill have the same number.
    - `samples`: the number of responses that a generation node generates for each row that it reads. The keys are the
      names of generation nodes. A node without a key generates the number that the program states for training.
    - `position`: the index of the first new prompt in the endless sequence of the data's rows.
    - `states`: the values of the algorithm's states after the previous iteration; empty if the values are not known
      yet.
    - `fetches`: for each resharding edge with `staleness`, the version of the weights that generate the rows of this
      task, and the number of fetches that the driver has ordered in the run. This number includes the fetch for this
      task, if the driver has already ordered this fetch.
    - `sends`: the resharding edges with `staleness` over which updates send their weights at the beginning of this
      task.
    - `cut`: the prompts that were cut in the previous iteration (`partial`). These prompts come before the new prompts.
    - `part`: the part of the instruction stream to execute (analysis/async_schedule.py). This field is for the ranks of
      a pipelined pool, or for the function hosts. Other processes execute the whole stream.
    - `draws`: the values of the states that determine how the rows of this task are drawn: as arguments of the option
      `weights`, or as temperatures. These values may be older than `states`.
    - `wanted`: the number of prompts that must pass the filter with `refill`; 0 means that this number is `prompts`.
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
        """The number of prompts that must pass the filter with `refill`."""
        return self.wanted or self.prompts

    def rounds(self, refill: int) -> int:
        """Return the maximum number of rounds, if the graph has a filter with `refill`.

        `refill` is the value of the filter's option. The result is the smallest number of rounds that together have at
        least (1 + `refill`) * `target` prompts.
        """
        return -(-self.target * (1 + refill) // self.prompts)

    @property
    def key(self) -> str:
        return f"{self.name}/{self.number}"

    @property
    def turn(self) -> tuple[int, bool]:
        """The sort key of the task: tasks end in the ascending order of this key.

        An evaluation after n iterations comes before the next iteration.
        """
        return self.number, self.trains

    @property
    def trains(self) -> bool:
        return self.name == "train"


class Tables(NamedTuple):
    """The values of the states that have one value for each row of the data.

    Both fields map the name of a state to an array over all rows of the data. `draws` has the values that determine how
    a task's rows are drawn (see the field `draws` of Task). `states` has the values after the previous iteration.
    """

    draws: Mapping[str, Any]
    states: Mapping[str, Any]


def row_numbers(sets: Sequence[Rowset], refilling: Sieve | None, task: Task) -> Numbers:
    """Return the numbering of the rows of a task.

    `sets` are the graph's sets of rows, such as all prompts, or all responses of one generation. `refilling` is the
    filter that requests more prompts, or None.
    """
    rounds = task.rounds(refilling.refill) if refilling and task.trains else 1
    return Numbers(sets, task.prompts * rounds, task.samples)
