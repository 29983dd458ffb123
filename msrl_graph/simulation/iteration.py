"""An iteration under way: what is done of it, the rows' lengths, the weights that it generates with.

Invariant: plain data; who begins and ends one is the driver's business (driver.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .flow import RowTimes
from .lanes import Lanes
from .nodes import NodeTiming


@dataclass
class Turn:
    """`base` is when it was opened, `hosts` are the processes of its functions; `ends` by pool when that was done with
    it. By resharding edge with staleness: `told`, how many fetches there were before the updates began it, and the
    `version` that its generation takes; `fetches` are those where it does not have that already. `held`: by generation
    the version that it had."""

    number: int
    lengths: dict[str, list[int]]
    base: float
    hosts: Lanes
    ran: dict[str, NodeTiming] = field(default_factory=dict)
    ends: dict[str, float] = field(default_factory=dict)
    told: dict[tuple[str, str], int] = field(default_factory=dict)
    version: dict[tuple[str, str], int] = field(default_factory=dict)
    fetches: set[tuple[str, str]] = field(default_factory=set)
    held: dict[str, int] = field(default_factory=dict)
    versions: list[int] = field(default_factory=list)  # of each prompt's responses, the oldest that wrote some of them

    @property
    def done(self) -> Mapping[str, RowTimes]:
        return {n: r.done for n, r in self.ran.items()}
