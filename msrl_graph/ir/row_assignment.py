"""Which data-parallel group gets which units of a round.

Invariant: a function of its arguments alone, and each unit is dealt once. A unit stays on the host that has most of it,
and beside the others of its prompt, as far as no group's share grows beyond `imbalance` times an even one.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Units:
    """What is dealt. Of each unit: its prompt, the host that has most of it (-1: no host with a group), how much it
    weighs (None: all alike), and how much would move to another host."""

    prompts: Sequence[int]
    homes: Sequence[int]
    weights: Sequence[float] | None = None
    sizes: Sequence[float] | None = None

    def weight(self, unit: int) -> float:
        return 1 if self.weights is None else self.weights[unit]

    def size(self, unit: int) -> float:
        return 0 if self.sizes is None else self.sizes[unit]

    def load(self, units: Iterable[int]) -> float:
        return sum(map(self.weight, units))


def deal(units: Units, at: Sequence[int], imbalance: float = 1.0, had: Sequence[float] = ()) -> list[list[int]]:
    """Of each group the positions of its units, ascending. `at` is each group's host, `had` what it got before: of the
    shares of a host the heaviest goes to the group that had least.

    Of 8 units of one weight, 6 of them on host 0, and a group on each of two hosts, 2 go over to host 1; with
    `imbalance = 1.5` none does.
    """
    everyone = range(len(units.prompts))
    even = units.load(everyone) / len(at)
    most = max(math.ceil(even), math.floor(even * imbalance)) if units.weights is None else even * imbalance
    of_host: dict[int, list[int]] = {}
    for group, host in enumerate(at):
        of_host.setdefault(host, []).append(group)
    found: list[list[int]] = [[] for _ in at]
    for groups, own in zip(
        of_host.values(), _over_hosts(units, {h: most * len(g) for h, g in of_host.items()}), strict=True
    ):
        parts = _within(units, own, len(groups), most)
        loads = [units.load(part) for part in parts]
        heaviest = sorted(range(len(parts)), key=lambda p: (-loads[p], p))
        for part, group in zip(heaviest, sorted(groups, key=lambda g: (had[g] if had else 0, g)), strict=True):
            found[group] = sorted(parts[part])
    return found


def _over_hosts(units: Units, room: dict[int, float]) -> list[list[int]]:
    """The units of each host, none with more than its room as far as that can be."""
    bins: dict[int, list[int]] = {host: [] for host in room}
    homeless: dict[int, list[int]] = {}
    for unit, home in enumerate(units.homes):
        if home in bins:
            bins[home].append(unit)
        else:
            homeless.setdefault(units.prompts[unit], []).append(unit)
    if homeless:
        left = {host: room[host] - units.load(own) for host, own in bins.items()}
        for own in sorted(homeless.values(), key=lambda own: (-units.load(own), own)):
            host = max(left, key=lambda h: left[h])
            bins[host] += own
            left[host] -= units.load(own)
    return _level(units, [*bins.values()], [*room.values()]) if len(bins) > 1 else [*bins.values()]


def _within(units: Units, own: list[int], groups: int, most: float) -> list[list[int]]:
    """Shares units of one host among its groups: by number in even stretches, else by Karmarkar and Karp."""
    if units.weights is None:
        return split(sorted(own, key=lambda u: (units.prompts[u], u)), groups)
    whole = _together(own, lambda u: units.prompts[u])
    parts = partition([units.load(some) for some in whole], groups)
    return _level(units, [[u for i in part for u in whole[i]] for part in parts], [most] * groups)


def _together(units: Iterable[int], key: Callable[[int], int]) -> list[list[int]]:
    """Units of one key together."""
    found: dict[int, list[int]] = {}
    for unit in units:
        found.setdefault(key(unit), []).append(unit)
    return [*found.values()]


def _level(units: Units, bins: list[list[int]], room: Sequence[float]) -> list[list[int]]:
    """Moves units out of bins that have more than their room: whole prompts first, then units, each time the largest
    that fits. None moves twice."""
    over = [units.load(own) - most for own, most in zip(bins, room, strict=True)]
    moved: list[list[int]] = [[] for _ in bins]
    for whole in (True, False):
        if max(over) <= 0:
            break
        key: Callable[[int], int] = units.prompts.__getitem__ if whole else int
        # Ascending by weight; of those that weigh alike the one of which least moves stands last.
        items = [
            sorted(_Item(units.load(some), sum(map(units.size, some)), some) for some in _together(own, key))
            for own in bins
        ]
        while (worst := max(over)) > 0:
            giver = over.index(worst)
            taker = over.index(min(over))
            at = bisect_right(items[giver], min(worst, -over[taker]), key=lambda item: item.weight) - 1
            if at < 0:  # the lightest may go where that is better for the worse of the two
                if whole or not items[giver] or over[taker] + items[giver][0].weight >= worst:
                    break
                at = 0
            item = items[giver].pop(at)
            moved[taker] += item.units
            over[giver], over[taker] = over[giver] - item.weight, over[taker] + item.weight
        bins = [[unit for item in own for unit in item.units] for own in items]
    return [own + more for own, more in zip(bins, moved, strict=True)]


@dataclass(frozen=True)
class _Item:
    weight: float
    size: float
    units: list[int]

    def __lt__(self, other: _Item) -> bool:
        return (self.weight, -self.size, other.units) < (other.weight, -other.size, self.units)


def partition(weights: Sequence[float], parts: int) -> list[list[int]]:
    """Shares items among so many parts by the largest differencing method (Karmarkar and Karp 1982), in ascending
    order: two partial solutions that differ most become one, the heaviest part of one beside the lightest of the other.
    The parts differ by no more than the heaviest item."""
    if parts == 1 or not weights:
        return [[*range(len(weights))], *([] for _ in range(parts - 1))]
    # (- the difference of heaviest and lightest, which, the parts' loads descending, their items as nested pairs)
    heap: list[tuple[float, int, list[tuple[float, Any]]]] = [
        (-weight, item, [(weight, item), *[(0.0, None)] * (parts - 1)]) for item, weight in enumerate(weights)
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, which, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        both = [(a + b, (x, y)) for (a, x), (b, y) in zip(one, reversed(other), strict=True)]
        both.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (both[-1][0] - both[0][0], which, both))
    return [sorted(_leaves(items)) for _, items in heap[0][2]]


def _leaves(items: Any) -> Iterator[int]:
    """The items in nested pairs, which may be as deep as there are many."""
    todo = [items]
    while todo:
        found = todo.pop()
        if isinstance(found, tuple):
            todo += found
        elif found is not None:
            yield found


def split(items: Sequence[T], parts: int) -> list[list[T]]:
    """Even stretches, the longer ones first."""
    each, over = divmod(len(items), parts)
    ends = [i * each + min(i, over) for i in range(parts + 1)]
    return [list(items[a:b]) for a, b in pairwise(ends)]
