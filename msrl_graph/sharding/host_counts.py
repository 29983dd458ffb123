"""Counts of the elements that the devices of one host receive in a resharding.

Invariant: counts depend only on the boxes (index ranges of tensors) that the host's ranks hold before and after the
resharding. A host's signature determines these boxes. Hosts with equal signatures therefore have equal counts, and only
one of these hosts is counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from .layout import Coordinates, Side, box_at, elements, overlap
from .tensors import Box, Tensor

# The pipeline stages of a tensor on both sides.
StagePair = tuple[tuple[int, ...], tuple[int, ...]]
# The devices of a host (numbered within the host) with their coordinates in their pipeline stages.
DevicePlaces = tuple[tuple[int, tuple[int, int, int]], ...]


def period(side: Side, experts: bool = False) -> int:
    """Return after how many consecutive ranks of a pipeline stage the boxes repeat.

    Data-parallel replicas have different boxes only if the weights are sharded over dp.
    """
    layout = side.layout
    if side.divided and (layout.edp if experts else layout.dp) > 1:
        return layout.stage_devices
    if experts:
        repeat = layout.etp * layout.ep
        return min(
            layout.stage_devices,
            repeat if layout.inner == 1 else math.lcm(repeat, layout.inner * layout.cp * layout.tp),
        )
    return layout.inner * layout.tp


def box_on_stage(tensor: Tensor, side: Side, rank: int) -> Box:
    """Return the box of a rank, assuming that its pipeline stage has the tensor."""
    place = side.layout.coordinates(rank)
    return box_at(tensor, side, (place.etp, place.ep, place.edp) if tensor.experts else (place.tp, 0, place.dp))


def position(side: Side, rank: int, experts: bool) -> tuple[int, ...]:
    """Return the coordinates of a rank that determine its boxes, `pp` first."""
    place = side.layout.coordinates(rank)
    own = (place.etp, place.ep, place.edp) if experts else (place.tp, 0, place.dp)
    return (place.pp, *(own if side.divided else own[:2]))


@dataclass(frozen=True)
class HostCounter:
    """The counter of elements that the devices of a host receive in a resharding.

    - `source` and `target` are the shardings before and after the resharding.
    - `block` is the number of ranks that gather together. If it is 0, each device receives exactly the elements that it
      needs and does not have.
    - `experts` says whether the counted tensors are experts.
    """

    source: Side
    target: Side
    per_host: int
    block: int
    experts: bool
    # By tensor and its devices' places: hosts of other stages have the same counts.
    counted: dict[tuple[object, ...], tuple[dict[int, int], int]] = field(default_factory=dict)

    def signature(self, host: int) -> tuple[object, ...]:
        """Return a value that determines the boxes of a host's ranks.

        Hosts that hold the same boxes have equal signatures.
        """
        parts: list[object] = []
        for device in range(host * self.per_host, (host + 1) * self.per_host):
            for side in (self.source, self.target):
                rank = side.rank(device, self.per_host)
                parts.append(position(side, rank, self.experts) if 0 <= rank < side.devices else None)
            if self.block and parts[-1]:
                parts.append(self._block_start(self.source.rank(device, self.per_host)))
        return tuple(parts)

    def _block_start(self, rank: int) -> int:
        """Return where the block of `rank` begins, as a position in the pipeline stage.

        If several blocks of a pipeline stage have the same boxes, the start of the first of these blocks is returned.
        """
        start = rank % self.source.layout.stage_devices // self.block * self.block
        return start % math.lcm(period(self.source, self.experts), self.block)

    def count(self, by_stages: Mapping[Tensor, Mapping[StagePair, int]], host: int) -> tuple[dict[int, int], list[int]]:
        """Count the elements that a host's devices receive.

        Returns two results: the number of elements that each device receives, and a list with one number per pipeline
        stage. This number says how many elements the stage sends to this host from other hosts. `by_stages` says how
        many equal tensors to count. Its outer key is a tensor without its name. Its inner key is a pair: the tensor's
        stages before and after the resharding.
        """
        first = host * self.per_host
        givers, takers = (
            {
                i: side.layout.coordinates(rank)
                for i in range(self.per_host)
                if 0 <= (rank := side.rank(first + i, self.per_host)) < side.devices
            }
            for side in (self.source, self.target)
        )
        starts = (
            tuple((i, self._block_start(self.source.rank(first + i, self.per_host))) for i in takers)
            if self.block
            else ()
        )
        # Only the stages that are on this host matter.
        own_stages = {place.pp for place in givers.values()}
        target_stages = {place.pp for place in takers.values()}
        here = {
            pair: (tuple(own_stages.intersection(pair[0])), tuple(target_stages.intersection(pair[1])))
            for pair in {pair for numbers in by_stages.values() for pair in numbers}
        }
        places = {
            local: (
                self._place_devices(givers, self.source, local[0]),
                self._place_devices(takers, self.target, local[1]),
            )
            for local in set(here.values())
        }
        received = dict.fromkeys(takers, 0)
        sent = [0] * self.source.layout.pp
        for tensor, numbers in by_stages.items():
            sums = dict.fromkeys((here[pair] for pair in numbers), 0)
            for pair, number in numbers.items():
                sums[here[pair]] += number
            missing = {}
            for where, number in sums.items():
                key = tensor, *places[where], starts
                if key not in self.counted:
                    self.counted[key] = self._count_blocks(*key) if self.block else self._count_exact(*key[:3])
                amounts, missing[where] = self.counted[key]
                for i, amount in amounts.items():
                    received[i] += number * amount
            for pair, number in numbers.items():
                sent[pair[0][0]] += number * missing[here[pair]]
        return {first + i: amount for i, amount in received.items()}, sent

    def _place_devices(self, devices: Mapping[int, Coordinates], side: Side, on: tuple[int, ...]) -> DevicePlaces:
        """Return the coordinates of the devices whose pipeline stage is in `on`."""
        places = (
            (i, (place.etp, place.ep, place.edp) if self.experts else (place.tp, 0, place.dp))
            for i, place in devices.items()
            if place.pp in on
        )
        return tuple((i, place if side.divided else (place[0], place[1], 0)) for i, place in places)

    def _count_blocks(
        self, tensor: Tensor, givers: DevicePlaces, takers: DevicePlaces, starts: tuple[tuple[int, int], ...]
    ) -> tuple[dict[int, int], int]:
        """Count the received elements of one tensor if blocks of ranks gather it.

        A block gathers the boxes of all its ranks. A rank does not receive its own box, and a host does not receive the
        boxes of its own ranks. Returns the number of elements that each device receives, and the number that the host
        receives. `starts` has, for each device, the first rank of its block.
        """
        have = {i: box_at(tensor, self.source, place) for i, place in givers}
        wants = {i: box_at(tensor, self.target, place) for i, place in takers}
        # A block in which each rank has what it wants gathers nothing. Ranks that have the same box each send a part
        # of it.
        lack = {
            start for i, start in starts if i in wants and _count_missing(wants[i], (have[i],) if i in have else ())
        }
        blocks = {start: _count_block_boxes(tensor, self.source, start, self.block) for start in lack}
        received = dict.fromkeys((i for i, _ in starts), 0)
        for i, start in starts:
            if start in blocks:
                holders, total = blocks[start]
                received[i] = total - (elements(have[i]) // holders[have[i]] if have.get(i) in holders else 0)
        present = {box for box in have.values() if elements(box)}
        return received, sum(map(elements, set().union(*(holders for holders, _ in blocks.values())) - present))

    def _count_exact(self, tensor: Tensor, givers: DevicePlaces, takers: DevicePlaces) -> tuple[dict[int, int], int]:
        """Count the received elements of one tensor if each device receives what it needs.

        Returns two results. The first is, for each device, how many elements of its target box are missing on the
        device. The second is how many elements of the target boxes are missing on all devices of the host.
        """
        have = {i: box_at(tensor, self.source, place) for i, place in givers}
        present = {box for box in have.values() if elements(box)}
        received: dict[int, int] = {}
        missing: dict[Box, int] = {}
        for i, place in takers:
            want = box_at(tensor, self.target, place)
            if elements(want):
                received[i] = _count_missing(want, (have[i],) if i in have else ())
                if want not in missing:
                    missing[want] = _count_missing(want, present)
        return received, sum(missing.values())


@lru_cache(maxsize=1 << 12)
def _count_block_boxes(tensor: Tensor, source: Side, start: int, block: int) -> tuple[Mapping[Box, int], int]:
    """Return how many ranks of a block hold each box, and the number of all elements.

    A box that several ranks hold counts once in the number of all elements.
    """
    holders = Counter(
        box for rank in range(start, start + block) if elements(box := box_on_stage(tensor, source, rank))
    )
    return holders, sum(map(elements, holders))


def _count_missing(want: Box, present: Iterable[Box]) -> int:
    """Return how many elements of a box are in none of the disjoint boxes `present`."""
    return elements(want) - sum(elements(common) for box in present if (common := overlap(want, box)))
