"""Lanes: when each device of a pool, or each host, is free and when it works.

A lane is one device of a pool. For functions, a lane is a host.

Invariant: a device does one thing at a time, in the order of its pool's instructions. A data-parallel group begins when
all of its devices are free, and computes as slowly as its slowest device. Each interval of work, including resharding
and swaps, is recorded as a LaneSpan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..ir.plan import Pool
from ..sharding.layout import Layout


@dataclass(frozen=True)
class LaneSpan:
    """An interval in which a data-parallel group, or a host, worked.

    `lane` is the number of the group's first device, or of the host. `width` is the number of devices that worked.
    """

    pool: str
    lane: int
    name: str
    iteration: int
    begin: float
    end: float
    width: int


@dataclass
class Lanes:
    """The devices of a pool, or the hosts, with the times at which they are free.

    - `slow`: how many times slower than planned each device computes.
    - `clock`: the time at which each device becomes free.
    - `last_node`: the node that each device computed last in the current iteration.
    """

    pool: str
    devices: list[int]
    slow: list[float]
    clock: list[float] = field(default_factory=list)
    last_node: list[str] = field(default_factory=list)
    # By update: when its weights have returned to each device.
    weights_back_at: dict[str, list[float]] = field(default_factory=dict)
    groups: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)  # by node: the devices of each group

    def __post_init__(self) -> None:
        self.clock = [0.0] * len(self.slow)
        self.last_node = [""] * len(self.slow)

    @classmethod
    def from_pool(cls, pool: Pool, devices: list[int], slow: Sequence[float], layouts: dict[str, Layout]) -> Lanes:
        lanes = cls(pool.name, devices, list(slow))
        for node, layout in layouts.items():
            groups: list[list[int]] = [[] for _ in range(layout.dp)]
            for rank in range(min(layout.devices, pool.devices)):
                groups[layout.coordinates(rank).dp].append(rank)
            lanes.groups[node] = tuple(map(tuple, groups))
        return lanes

    def begin(self, time: float) -> None:
        """Begin an iteration at `time`; a device that is busy begins when it is free."""
        self.clock = [max(time, free_at) for free_at in self.clock]
        self.last_node = [""] * len(self.clock)

    def free(self, devices: Sequence[int]) -> float:
        return max(self.clock[device] for device in devices)

    def set(self, devices: Sequence[int], time: float, node: str = "") -> None:
        for device in devices:
            self.clock[device] = time
            self.last_node[device] = node or self.last_node[device]

    def slowest(self, devices: Sequence[int]) -> float:
        return max(self.slow[device] for device in devices)

    @property
    def last(self) -> float:
        return max(self.clock)
