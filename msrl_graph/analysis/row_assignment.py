"""Assignment of rows to data-parallel groups, by the controller of a node.

The controller assigns units. A unit is a single row or, with `per`, all rows below one row of the `per` column. The
controller assigns all units of one round of prompts together.

Invariant: the result depends only on the arguments, and each unit is assigned to exactly one group. A unit is assigned
to the host that has most of its data, and to the same group as the other units of its prompt. Units of a prompt are
separated, or a unit is assigned to another host, only if a group's load would otherwise exceed `imbalance` times an
even share.
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
    """The units to assign; each field has one value per unit.

    - `prompts`: the prompt of each unit.
    - `homes`: the host that stores most of the unit's data; -1 if no data-parallel group is on this host.
    - `weights`: the load of each unit; None means that all units have the same load.
    - `sizes`: the amount of data that is moved if the unit is assigned to a host other than its home.
    """

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


def assign_units(
    units: Units, hosts: Sequence[int], imbalance: float = 1.0, had: Sequence[float] = ()
) -> list[list[int]]:
    """Return, for each data-parallel group, the units that are assigned to it.

    Units are given by their positions in `units`, ascending. `hosts` is the host of each group. `had` is the load that
    each group got in earlier rounds. On each host, the heaviest share goes to the group with the smallest earlier load.

    Example: there are 8 units of equal weight, 6 of them on host 0, and a group on each of two hosts. By default, 2
    units move to host 1. With `imbalance = 1.5`, no unit moves.
    """
    everyone = range(len(units.prompts))
    even = units.load(everyone) / len(hosts)
    most = max(math.ceil(even), math.floor(even * imbalance)) if units.weights is None else even * imbalance
    of_host: dict[int, list[int]] = {}
    for group, host in enumerate(hosts):
        of_host.setdefault(host, []).append(group)
    assigned: list[list[int]] = [[] for _ in hosts]
    for groups, own in zip(
        of_host.values(),
        _assign_to_hosts(units, {index: most * len(members) for index, members in of_host.items()}),
        strict=True,
    ):
        parts = _assign_to_groups(units, own, len(groups), most)
        loads = [units.load(part) for part in parts]
        heaviest = sorted(range(len(parts)), key=lambda index: (-loads[index], index))
        for part, group in zip(
            heaviest, sorted(groups, key=lambda member: (had[member] if had else 0, member)), strict=True
        ):
            assigned[group] = sorted(parts[part])
    return assigned


def _assign_to_hosts(units: Units, room: dict[int, float]) -> list[list[int]]:
    """Assign each unit to a host; return the list of units of each host.

    `room` is the load that each host may get. If possible, no host gets more than this load.
    """
    bins: dict[int, list[int]] = {host: [] for host in room}
    homeless: dict[int, list[int]] = {}
    for unit, home in enumerate(units.homes):
        if home in bins:
            bins[home].append(unit)
        else:
            homeless.setdefault(units.prompts[unit], []).append(unit)
    if homeless:
        remaining = {host: room[host] - units.load(own) for host, own in bins.items()}
        for own in sorted(homeless.values(), key=lambda own: (-units.load(own), own)):
            host = max(remaining, key=lambda candidate: remaining[candidate])
            bins[host] += own
            remaining[host] -= units.load(own)
    return _balance(units, [*bins.values()], [*room.values()]) if len(bins) > 1 else [*bins.values()]


def _assign_to_groups(units: Units, own: list[int], groups: int, most: float) -> list[list[int]]:
    """Partition the units of one host among the data-parallel groups on this host.

    `own` are the units of the host, and `groups` is the number of its groups. Units of equal weight are split into even
    ranges. Units of different weights are partitioned by the method of Karmarkar and Karp; `most` is the maximum load
    of a group.
    """
    if units.weights is None:
        return split(sorted(own, key=lambda unit: (units.prompts[unit], unit)), groups)
    prompts = _group_by_key(own, lambda unit: units.prompts[unit])
    parts = partition([units.load(group) for group in prompts], groups)
    return _balance(units, [[unit for index in part for unit in prompts[index]] for part in parts], [most] * groups)


def _group_by_key(units: Iterable[int], key: Callable[[int], int]) -> list[list[int]]:
    """Group units by their keys."""
    grouped: dict[int, list[int]] = {}
    for unit in units:
        grouped.setdefault(key(unit), []).append(unit)
    return [*grouped.values()]


def _balance(units: Units, bins: list[list[int]], room: Sequence[float]) -> list[list[int]]:
    """Move units out of bins whose load exceeds their `room`; return the new bins.

    A bin is the list of units of one host or one group. `room` is the load that each bin may get. First, units move
    together with the other units of the same prompt in the same bin. If a bin is still too heavy, single units move. Of
    the prompts or units that fit into the new bin, the heaviest moves. No unit moves twice.
    """
    excess = [units.load(own) - most for own, most in zip(bins, room, strict=True)]
    moved: list[list[int]] = [[] for _ in bins]
    for by_prompt in (True, False):
        if max(excess) <= 0:
            break
        key: Callable[[int], int] = units.prompts.__getitem__ if by_prompt else int
        # Ascending by weight; of equal weights, the one that moves least is last.
        items = [
            sorted(_Item(units.load(group), sum(map(units.size, group)), group) for group in _group_by_key(own, key))
            for own in bins
        ]
        while (worst := max(excess)) > 0:
            giver = excess.index(worst)
            taker = excess.index(min(excess))
            position = bisect_right(items[giver], min(worst, -excess[taker]), key=lambda item: item.weight) - 1
            if position < 0:  # the lightest may move if that improves the worse of the two bins
                if by_prompt or not items[giver] or excess[taker] + items[giver][0].weight >= worst:
                    break
                position = 0
            item = items[giver].pop(position)
            moved[taker] += item.units
            excess[giver], excess[taker] = excess[giver] - item.weight, excess[taker] + item.weight
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
    """Partition items by the largest differencing method (Karmarkar and Karp 1982).

    `weights` has the weight of each item. Return the indices of the items in each of `parts` parts, ascending. The
    loads of the parts differ by no more than the weight of the heaviest item.

    A partial solution is a list of parts, and its difference is the load of its heaviest part minus the load of its
    lightest part. Each step merges the two partial solutions with the largest differences: the heaviest part of one
    solution with the lightest part of the other, and so on.
    """
    if parts == 1 or not weights:
        return [[*range(len(weights))], *([] for _ in range(parts - 1))]
    # Entries: minus the difference of the heaviest and the lightest part; a number that breaks ties; the loads of the
    # parts, descending, each with its items as nested pairs.
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
    """Yield the integers in nested pairs; None is left out.

    The nesting can be as deep as the number of integers, so the function does not recurse.
    """
    todo = [items]
    while todo:
        item = todo.pop()
        if isinstance(item, tuple):
            todo += item
        elif item is not None:
            yield item


def split(items: Sequence[T], parts: int) -> list[list[T]]:
    """Split items into `parts` even ranges; the first ranges may have one item more."""
    size, rest = divmod(len(items), parts)
    ends = [part * size + min(part, rest) for part in range(parts + 1)]
    return [list(items[start:end]) for start, end in pairwise(ends)]
