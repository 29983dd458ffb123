"""A task: what the processes of a run are asked to do at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...ir.rowsets import Numbers, Rowset, Sieve


@dataclass(frozen=True)
class Task:
    """One pass over the graph: iteration `number` of `train`, or of an evaluation, which has no filters. `prompts` come at once (again
    with each refill), from row `position` of the data's endless sequence on; `fan` responses are drawn to each (0: as many as the program
    says). `states` are those of the run, as the iteration begins with them."""

    name: str
    number: int
    prompts: int
    fan: int = 0
    position: int = 0
    states: Mapping[str, float] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.name}/{self.number}"

    @property
    def trains(self) -> bool:
        return self.name == "train"


def numbers(sets: Sequence[Rowset], refilling: Sieve | None, task: Task) -> Numbers:
    """How the rows of a task are numbered, in a graph of these sets; `refilling` is the filter that asks for more prompts."""
    rounds = 1 + refilling.refill if refilling and task.trains else 1
    return Numbers(sets, task.prompts * rounds, task.fan)
