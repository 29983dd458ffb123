"""An iteration in progress: its finished nodes, row lengths, and weight versions.

Invariant: the class is plain data. The driver (driver.py) begins and ends iterations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .flow import RowTimes
from .lanes import Lanes
from .nodes import NodeTiming


@dataclass
class Turn:
    """An iteration in progress.

    - `lengths`: the number of tokens of each row, by column.
    - `base`: the time at which the driver opened the iteration. Functions may run from this time on.
    - `hosts`: the processes that run the iteration's functions, as `Lanes`.
    - `timings`: the times of each node that has finished.
    - `ends`: the time at which each pool finished the iteration.
    - `fetches_before`: by resharding edge, the number of fetches that were ordered before the updates began the
      iteration.
    - `version`: by resharding edge with staleness, the version of the weights that the iteration's generation uses.
    - `fetches`: the resharding edges over which the generation must first fetch the version in `version`.
    - `version_by_node`: by generation, the version of the weights that the generation used.
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
