"""An iteration in progress: its finished nodes, row lengths, and weight versions.

Invariant: plain data; the driver (driver.py) begins and ends iterations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .flow import RowTimes
from .lanes import Lanes
from .nodes import NodeTiming


@dataclass
class Turn:
    """The state of an iteration.

    - `base` is when it was opened, `hosts` are the processes of its functions, `ends` the times by pool when it was
      done.
    - By resharding edge with staleness: `told` is the number of fetches before the updates began the iteration,
      `version` the one that its generation uses; `fetches` are the edges where that version must be fetched first.
    - `held` is, by generation, the version that it had.
    """

    number: int
    lengths: dict[str, list[int]]
    base: float
    hosts: Lanes
    timings: dict[str, NodeTiming] = field(default_factory=dict)
    ends: dict[str, float] = field(default_factory=dict)
    fetches_before: dict[tuple[str, str], int] = field(default_factory=dict)
    version: dict[tuple[str, str], int] = field(default_factory=dict)
    fetches: set[tuple[str, str]] = field(default_factory=set)
    version_by_node: dict[str, int] = field(default_factory=dict)
    versions: list[int] = field(default_factory=list)  # by prompt: the oldest version that wrote some of its responses

    @property
    def done(self) -> Mapping[str, RowTimes]:
        return {node: timing.done for node, timing in self.timings.items()}
