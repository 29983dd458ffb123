"""space: the combinations of layouts and engines on one division of the devices, and what they take at least.

Invariant: a bound is of a combination and of all that come later in its owners' lists, and never above what any of
these takes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..cost import holdings
from ..ir.plan import Plan
from ..passes.throughput import pace
from .candidates import Choice
from .owners import Owner
from .pools import Division


@dataclass
class Space:
    """The combinations of one division: a choice for each owner. `skeleton` is a plan with its pools, schedule and
    traffic."""

    division: Division
    skeleton: Plan
    owners: tuple[Owner, ...]
    lists: list[list[Choice]]
    functions: dict[tuple[str, str], float]
    # The least seconds of each node from each place of its owner's list on: a bound for all that come later.
    later: list[list[dict[str, float]]]

    @property
    def size(self) -> int:
        number = 1
        for choices in self.lists:
            number *= len(choices)
        return number

    def bound(self, at: Sequence[int]) -> float:
        """Of an iteration without resharding."""
        return self.least({("RUN", n): s for choice in self.chosen(at) for n, s in choice.seconds.items()})

    def least(self, seconds: Mapping[tuple[str, str], float]) -> float:
        """Of an iteration in which nodes take these seconds, and all else what it does whatever the layouts are."""
        # What the dock's processes take goes by the layouts, too: only an iteration's start and end are sure.
        turn = self.skeleton.cluster.device.overheads.turn.value
        return pace(self.skeleton, {**self.functions, **seconds}, turn).seconds

    def bound_from(self, at: Sequence[int]) -> float:
        """No combination in which each owner's choice comes at or after `at` takes less: the least seconds of each
        node that are left, added up along the critical path; and no pool is done before all of its nodes are."""
        seconds = {("RUN", n): s for i, own in zip(at, self.later, strict=True) for n, s in own[i].items()}
        busy = dict.fromkeys(self.division.pools, 0.0)
        for owner, choice in zip(self.owners, self.chosen(at), strict=True):
            busy[self.division.pool_of(owner.node)] += math.fsum(choice.seconds.values())
        return max(self.least(seconds), *busy.values())

    def chosen(self, at: Sequence[int]) -> list[Choice]:
        return [choices[i] for choices, i in zip(self.lists, at, strict=True)]

    def start(self) -> tuple[int, ...]:
        """A combination that may fit, each owner's quickest choice beside the others' smallest; () where there is
        none."""
        at = [min(range(len(own)), key=lambda i, own=own: own[i].resident) for own in self.lists]  # type: ignore[misc]
        if self.over(at):
            return ()
        for number, own in enumerate(self.lists):
            at[number] = next(i for i in range(len(own)) if not self.over([*at[:number], i, *at[number + 1 :]]))
        return tuple(at)

    def over(self, at: Sequence[int]) -> str:
        """Why a combination cannot fit, "" if it may: what stays of every node of a pool adds up."""
        swap = self.skeleton.deploy.reshard.mode == "swap"
        source = {e.dst: e.src for e in self.skeleton.graph.reshards()}
        capacity = holdings.capacity(self.skeleton.cluster).value
        chosen = list(zip(self.owners, self.chosen(at), strict=True))
        for owner, choice in chosen:
            pool = self.division.pool_of(owner.node)
            others = [(o, c) for o, c in chosen if o.node in pool.nodes and o.node != owner.node]
            for phase, peak in choice.peaks.items():
                beside = sum(c.resident for _, c in others) if phase != "load" else 0
                if phase == "generate" and swap:
                    beside -= sum(c.weights for o, c in others if source.get(owner.node) == o.node)
                if peak + beside > capacity:
                    size = holdings.gigabytes
                    return f"{phase} needs {size(peak + beside)} a device of {size(capacity)}"
        return ""
