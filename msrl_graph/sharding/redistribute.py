"""Resharding: which ranks gather, what moves between devices, and how many bytes.

Invariant: every element of a target box comes from exactly one source box, and all ranks compute the same list of
transfers in the same order. `count_movement` counts exactly what `list_transfers` moves. Between hosts, a box is sent
once to each host that needs it. Within a host, the box is passed on to each device that needs it. Hosts that
hold the same boxes are counted together, so the cost of counting does not grow with the number of pairs of devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from .host_counts import HostCounter, StagePair, box_on_stage, period, position
from .layout import Side, TensorKind, elements, overlap, shard, stages
from .tensors import Box, Tensor


def boxes(tensor: Tensor, side: Side, ranks: Iterable[int]) -> set[Box]:
    """Return the distinct nonempty boxes of a tensor on the given ranks.

    The boxes are computed as if the pipeline stages of all `ranks` had the tensor.
    """
    candidates = {box_on_stage(tensor, side, rank) for rank in ranks}
    return {box for box in candidates if elements(box)}


def crosses(source: Side, target: Side, layers: int) -> bool:
    """Return whether any of the `layers` layers changes its pipeline stage."""
    before = source.layout
    after = target.layout
    if before.pp == after.pp == 1:
        return False
    return before.pp != after.pp or any(
        before.stage_layers(stage, layers) != after.stage_layers(stage, layers) for stage in range(before.pp)
    )


@lru_cache(maxsize=1 << 14)
def gather_block(kinds: tuple[TensorKind, ...], source: Side, target: Side) -> int:
    """Return the smallest number g of ranks that must gather together to reshard.

    The ranks of each source stage are cut into blocks of g consecutive ranks, so g divides the number of ranks per
    stage. In each block, the boxes of `source` together cover the `target` box of every rank. If layers change their
    pipeline stage, a block includes the ranks at the same positions of all stages. Both shardings must have the same
    devices. A block of a whole stage always suffices.
    """
    width = source.layout.stage_devices
    across = any(crosses(source, target, tensor_kind.tensor.layers) for tensor_kind in kinds)
    offsets = [stage * width for stage in range(source.layout.pp)] if across else [0]
    for block in (block for block in range(1, width) if width % block == 0):
        if all(_covers(kind.tensor, source, target, block, width, offsets) for kind in kinds):
            return block
    return width


def _covers(tensor: Tensor, source: Side, target: Side, block: int, width: int, offsets: Sequence[int]) -> bool:
    # Blocks repeat after this number of ranks.
    repeat = math.lcm(period(source, tensor.experts), period(target, tensor.experts), block)
    for start in range(0, min(width, repeat), block):
        have = boxes(tensor, source, range(start, start + block))
        want = boxes(tensor, target, (offset + rank for offset in offsets for rank in range(start, start + block)))
        if have >= want:
            continue
        # Boxes of `have` are disjoint, so covering is a matter of counting. Too few elements in total are found at
        # once.
        amount = sum(map(elements, have))
        if any(elements(box) > amount for box in want):
            return False
        if any(
            sum(elements(common) for piece in have if (common := overlap(box, piece))) != elements(box)
            for box in want - have
        ):
            return False
    return True


def list_gather_groups(source: Side, across: bool, block: int) -> list[tuple[int, ...]]:
    """Return the groups of ranks that gather together.

    A group has `block` consecutive ranks of a pipeline stage. If `across` is True, a group also includes the ranks at
    the same positions of all other stages.
    """
    width = source.layout.stage_devices
    pp = source.layout.pp
    stages_of = [range(pp)] if across else [range(stage, stage + 1) for stage in range(pp)]
    return [
        tuple(stage * width + start + i for stage in stage_range for i in range(block))
        for stage_range in stages_of
        for start in range(0, width, block)
    ]


@lru_cache(maxsize=1 << 12)
def find_served_stages(
    source: Side, target: Side, ways: tuple[tuple[bool, int], ...]
) -> frozenset[tuple[frozenset[int], ...]]:
    """Return for which pipeline stages of `target` each rank may receive weights.

    `ways` are routes, given by `across` and `block` as in `list_gather_groups`. The result is a set with one entry for
    each rank; ranks with equal entries share one entry. An entry has, for each route, the target stages of all ranks
    that gather together with the rank. Weights of other stages never reach the rank.
    """
    width = source.layout.stage_devices
    width_there = target.layout.stage_devices

    def find_target_stages(rank: int, across: bool, block: int) -> frozenset[int]:
        start = rank % width // block * block
        firsts = [s * width + start for s in (range(source.layout.pp) if across else (rank // width,))]
        return frozenset(
            s for first in firsts for s in range(first // width_there, (first + block - 1) // width_there + 1)
        )

    step = math.gcd(*(block for _, block in ways))
    return frozenset(tuple(find_target_stages(rank, *way) for way in ways) for rank in range(0, source.devices, step))


def count_gathered(tensor: Tensor, source: Side, block: int) -> int:
    """Return the number of elements that one block collects in an all-gather.

    A box that several ranks hold counts once.
    """
    return sum(map(elements, boxes(tensor, source, range(min(block, period(source, tensor.experts))))))


class TensorPair(NamedTuple):
    """A group of equal tensors that a resharding moves between the same stages.

    `tensor` is one of these tensors, and `number` is the number of these tensors.
    """

    tensor: Tensor
    number: int


def pairs(kinds: Iterable[TensorKind], source: Side, target: Side) -> Iterator[TensorPair]:
    """Yield a model's tensors, grouped by kind and by their stages in both shardings."""
    for kind in kinds:
        if kind.at_end or source.layout.pp == target.layout.pp == 1:
            yield TensorPair(kind.tensor, kind.each * sum(stop - start for start, stop in kind.stretches))
            continue
        layers_by_stages: dict[tuple[int, int], list[int]] = {}
        for layer in kind.layers:
            key = source.layout.stage_of(layer, kind.tensor.layers), target.layout.stage_of(layer, kind.tensor.layers)
            layers_by_stages.setdefault(key, []).append(layer)
        yield from (
            TensorPair(_move_to_layer(kind.tensor, layers[0]), kind.each * len(layers))
            for layers in layers_by_stages.values()
        )


@lru_cache(maxsize=1 << 14)
def _move_to_layer(tensor: Tensor, layer: int) -> Tensor:
    return replace(tensor, layer=layer)


class BoxTransfer(NamedTuple):
    """A box (an index range per dim) that `giver` sends to the first of `takers`.

    `giver` and `takers` are devices. All takers are on one host. The first taker passes the box on to the other takers.
    """

    giver: int
    takers: tuple[int, ...]
    box: Box


def list_transfers(tensor: Tensor, source: Side, target: Side, per_host: int) -> list[BoxTransfer]:
    """Return the transfers that reshard one tensor; all ranks compute the same list.

    Devices that hold the same box take turns at sending.
    """
    holders: dict[Box, list[int]] = {}
    for rank in range(source.devices):
        if elements(box := shard(tensor, source, rank)):
            holders.setdefault(box, []).append(source.device(rank, per_host))
    turns = dict.fromkeys(holders, 0)
    wants: dict[tuple[int, Box], list[int]] = {}
    for rank in range(target.devices):
        if elements(box := shard(tensor, target, rank)):
            device = target.device(rank, per_host)
            wants.setdefault((device // per_host, box), []).append(device)
    transfers = []
    for (host, want), devices in wants.items():
        for box, owners in holders.items():
            common = overlap(want, box)
            takers = tuple(candidate for candidate in devices if candidate not in owners) if common else ()
            if common and takers:
                near = [candidate for candidate in owners if candidate // per_host == host] or owners
                transfers.append(BoxTransfer(near[turns[box] % len(near)], takers, common))
                turns[box] += 1
    return transfers


@dataclass(frozen=True)
class Movement:
    """The number of elements that a resharding moves.

    - `received`: elements that the busiest device receives, from its own host or from another host.
    - `total`: elements that all devices receive.
    - `inward`: elements that the busiest host receives from other hosts.
    - `between`: elements that all hosts receive from other hosts.
    - `outward`: elements that the busiest host sends, if the hosts that hold the same boxes take turns at sending.
    """

    received: int = 0
    inward: int = 0
    outward: int = 0
    total: int = 0
    between: int = 0


@lru_cache(maxsize=1 << 12)
def count_movement(
    kinds: tuple[TensorKind, ...], source: Side, target: Side, per_host: int, block: int = 0
) -> Movement:
    """Count the elements that `list_transfers` moves for all tensors of `kinds`.

    If `block` is 0, each device receives only the elements that it needs and does not have. Otherwise, each device
    receives all elements that an all-gather over blocks of `block` ranks collects. In that case, either all or none of
    `kinds` must be experts.
    """
    received = dict.fromkeys(range(target.devices), 0)
    inward = dict.fromkeys(_hosts(target, per_host), 0)
    demand = [0] * source.layout.pp  # elements that hosts receive from each stage
    for experts in (False, True):
        by_stages = _count_by_stages((kind for kind in kinds if kind.tensor.experts is experts), source, target)
        counter = HostCounter(source, target, per_host, block, experts)
        for hosts in _classify_hosts(source, target, per_host, block, experts) if by_stages else ():
            amounts, sent = counter.count(by_stages, hosts[0])
            for host in hosts:
                inward[host] += sum(sent)
                for device, amount in amounts.items():
                    received[target.rank(device + (host - hosts[0]) * per_host, per_host)] += amount
            demand = [total + len(hosts) * share for total, share in zip(demand, sent, strict=True)]
    outward = 0
    width = source.layout.stage_devices
    for stage, amount in enumerate(demand):
        low, high = (source.device(rank, per_host) // per_host for rank in (stage * width, (stage + 1) * width - 1))
        outward = max(outward, -(-amount // (high - low + 1)))
    return Movement(max(received.values()), max(inward.values()), outward, sum(received.values()), sum(inward.values()))


def _hosts(side: Side, per_host: int) -> range:
    return range(side.first // per_host, side.device(side.devices - 1, per_host) // per_host + 1)


@lru_cache(maxsize=1 << 10)
def _classify_hosts(source: Side, target: Side, per_host: int, block: int, experts: bool) -> tuple[list[int], ...]:
    """Group the target's hosts into classes: hosts of one class hold the same boxes."""
    counter = HostCounter(source, target, per_host, block, experts)
    classes = dict[tuple[object, ...], list[int]]()
    for host in _hosts(target, per_host):
        classes.setdefault(counter.signature(host), []).append(host)
    return tuple(classes.values())


@lru_cache(maxsize=1 << 12)
def count_lacking(kinds: tuple[TensorKind, ...], source: Side, target: Side, per_host: int) -> int:
    """Return how many elements the first or the last target host still needs.

    The host must have these elements after the resharding, but does not have them before. The result is the larger of
    the two hosts' numbers. It is at most the number `inward` that `count_movement` returns. This function is faster
    than `count_movement`.
    """
    hosts = {target.first // per_host, target.device(target.devices - 1, per_host) // per_host}
    missing = dict.fromkeys(hosts, 0)
    for experts in (False, True):
        by_stages = _count_by_stages((kind for kind in kinds if kind.tensor.experts is experts), source, target)
        counter = HostCounter(source, target, per_host, 0, experts)
        for host in hosts:
            missing[host] += sum(counter.count(by_stages, host)[1])
    return max(missing.values())


def _count_by_stages(kinds: Iterable[TensorKind], source: Side, target: Side) -> dict[Tensor, dict[StagePair, int]]:
    """Count tensors of each kind, by their pipeline stages in `source` and `target`."""
    by_stages: dict[Tensor, dict[StagePair, int]] = {}
    for tensor, number in pairs(kinds, source, target):
        pair = stages(tensor, source.layout), stages(tensor, target.layout)
        numbers = by_stages.setdefault(tensor.stripped, {})
        numbers[pair] = numbers.get(pair, 0) + number
    return by_stages


def count_left_behind(kinds: Iterable[TensorKind], source: Side, target: Side) -> int:
    """Count the useless elements that naive resharding leaves on all devices.

    Useless elements are elements beyond the weights that the generation needs (arXiv:2507.19017, figure 3 and eq. 3).
    If the box that a rank needs is within the box that the rank has, the rank generates from the existing buffer. The
    rest of the existing buffer is useless: 75 of 100 elements, if 25 are needed. If the needed box is not within the
    existing box, a new buffer is allocated, and the whole old buffer is useless.
    """
    total = 0
    for experts in (False, True):
        tensor_pairs = list(pairs((kind for kind in kinds if kind.tensor.experts is experts), source, target))
        places: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
        for rank in range(target.devices if tensor_pairs else 0):
            places.setdefault((position(source, rank, experts), position(target, rank, experts)), []).append(rank)
        for tensor, number in tensor_pairs:
            source_stages = stages(tensor, source.layout)
            for ranks in (ranks for (old_position, _), ranks in places.items() if old_position[0] in source_stages):
                old = shard(tensor, source, ranks[0])
                new = shard(tensor, target, ranks[0])
                reused = elements(new) if elements(new) and overlap(old, new) == new else 0
                total += number * len(ranks) * (elements(old) - reused)
    return total
