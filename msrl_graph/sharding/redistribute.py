"""From one layout to another: who gathers with whom, what moves between which devices, and how many bytes that is.

Invariant: every element of a target box comes from exactly one source box, and all ranks that ask work out the same
list in the same order. What is counted (`movement`) is what is moved (`fetches`): between hosts a piece goes once to
each host that lacks it, within a host to each device that lacks it. Counting goes by classes of hosts that hold the
same, never by pairs of devices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from .layout import Box, Coordinates, Side, Tensor, TensorKind, box_at, elements, overlap, shard, stages


def period(side: Side, experts: bool = False) -> int:
    """The number of consecutive ranks of a stage after which boxes repeat: replicas matter only where they divide
    weights."""
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


def boxes(tensor: Tensor, side: Side, ranks: Iterable[int]) -> set[Box]:
    """The different boxes that `ranks` would hold of a tensor if it lay on their stage, without empty ones."""
    found = {_staged(tensor, side, rank) for rank in ranks}
    return {box for box in found if elements(box)}


def _staged(tensor: Tensor, side: Side, rank: int) -> Box:
    at = side.layout.coordinates(rank)
    return box_at(tensor, side, (at.etp, at.ep, at.edp) if tensor.experts else (at.tp, 0, at.dp))


def crosses(source: Side, target: Side, layers: int) -> bool:
    """Whether layers change their pipeline stage."""
    a = source.layout
    b = target.layout
    if a.pp == b.pp == 1:
        return False
    return a.pp != b.pp or any(a.stage_layers(s, layers) != b.stage_layers(s, layers) for s in range(a.pp))


@lru_cache(maxsize=1 << 14)
def gather_block(kinds: tuple[TensorKind, ...], source: Side, target: Side) -> int:
    """The smallest g that divides a source stage, such that in each aligned block of g consecutive ranks (and where
    layers change their stage, the blocks at the same place of all stages) the `source` boxes cover every rank's
    `target` box: an all-gather among them is then enough to reshard.

    Both sides have the same devices. A whole stage always suffices.
    """
    width = source.layout.stage_devices
    across = any(crosses(source, target, k.tensor.layers) for k in kinds)
    offsets = [s * width for s in range(source.layout.pp)] if across else [0]
    for g in (g for g in range(1, width) if width % g == 0):
        if all(_covers(kind.tensor, source, target, g, width, offsets) for kind in kinds):
            return g
    return width


def _covers(tensor: Tensor, source: Side, target: Side, g: int, width: int, offsets: Sequence[int]) -> bool:
    # Beyond this number of ranks, blocks repeat.
    repeat = math.lcm(period(source, tensor.experts), period(target, tensor.experts), g)
    for start in range(0, min(width, repeat), g):
        have = boxes(tensor, source, range(start, start + g))
        want = boxes(tensor, target, (o + r for o in offsets for r in range(start, start + g)))
        if have >= want:
            continue
        # Boxes of `have` are apart, so covering is a matter of counting; too little in all is seen at once.
        amount = sum(map(elements, have))
        if any(elements(box) > amount for box in want):
            return False
        if any(sum(elements(o) for h in have if (o := overlap(box, h))) != elements(box) for box in want - have):
            return False
    return True


def gatherers(source: Side, across: bool, block: int) -> list[tuple[int, ...]]:
    """The groups of ranks that gather together, in blocks of `block` ranks of a stage, `across` the stages or each
    stage alone."""
    width = source.layout.stage_devices
    pp = source.layout.pp
    stages_of = [range(pp)] if across else [range(s, s + 1) for s in range(pp)]
    return [
        tuple(s * width + start + i for s in some for i in range(block))
        for some in stages_of
        for start in range(0, width, block)
    ]


@lru_cache(maxsize=1 << 12)
def served(source: Side, target: Side, ways: tuple[tuple[bool, int], ...]) -> frozenset[tuple[frozenset[int], ...]]:
    """The stages of the target that a rank's neighbours are on, by way (`across` and `block` as in `gatherers`), for
    each kind of rank: weights of other stages never reach it."""
    width = source.layout.stage_devices
    there = target.layout.stage_devices

    def on(rank: int, across: bool, block: int) -> frozenset[int]:
        start = rank % width // block * block
        firsts = [s * width + start for s in (range(source.layout.pp) if across else (rank // width,))]
        return frozenset(s for first in firsts for s in range(first // there, (first + block - 1) // there + 1))

    step = math.gcd(*(block for _, block in ways))
    return frozenset(tuple(on(rank, *way) for way in ways) for rank in range(0, source.devices, step))


def gathered(tensor: Tensor, source: Side, block: int) -> int:
    """Elements of a tensor that an all-gather over a block brings together: each different box once."""
    return sum(map(elements, boxes(tensor, source, range(min(block, period(source, tensor.experts))))))


class TensorPair(NamedTuple):
    """`number` tensors of a kind that lie on the same stages at both sides; `tensor` is one of them."""

    tensor: Tensor
    number: int


def pairs(kinds: Iterable[TensorKind], source: Side, target: Side) -> Iterator[TensorPair]:
    """The tensors of a model by kind, and stage at both ends."""
    for kind in kinds:
        if kind.start < 0 or kind.start >= kind.tensor.layers or source.layout.pp == target.layout.pp == 1:
            yield TensorPair(kind.tensor, kind.each * (kind.stop - kind.start))
            continue
        found: dict[tuple[int, int], list[int]] = {}
        for layer in range(kind.start, kind.stop):
            key = source.layout.stage_of(layer, kind.tensor.layers), target.layout.stage_of(layer, kind.tensor.layers)
            found.setdefault(key, []).append(layer)
        yield from (TensorPair(_at(kind.tensor, layers[0]), kind.each * len(layers)) for layers in found.values())


@lru_cache(maxsize=1 << 14)
def _at(tensor: Tensor, layer: int) -> Tensor:
    return replace(tensor, layer=layer)


class BoxTransfer(NamedTuple):
    """A box that `giver` sends to the first of `takers`, all on one host, which hands it on to the others. Devices, not
    ranks."""

    giver: int
    takers: tuple[int, ...]
    box: Box


def fetches(tensor: Tensor, source: Side, target: Side, per_host: int) -> list[BoxTransfer]:
    """What moves for one tensor, in an order that all ranks agree on; holders of the same box take turns."""
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
    found = []
    for (host, want), devices in wants.items():
        for box, owners in holders.items():
            common = overlap(want, box)
            takers = tuple(d for d in devices if d not in owners) if common else ()
            if common and takers:
                near = [d for d in owners if d // per_host == host] or owners
                found.append(BoxTransfer(near[turns[box] % len(near)], takers, common))
                turns[box] += 1
    return found


# The stages of a tensor at both ends; where in their stages devices of a host stand, by their place on the host.
_Stages = tuple[tuple[int, ...], tuple[int, ...]]
_Places = tuple[tuple[int, tuple[int, int, int]], ...]


@dataclass(frozen=True)
class Movement:
    """How many elements a resharding moves.

    - `received`: what the busiest device receives, from its own host or another; `total`: what all devices receive.
    - `inward`: what the busiest host receives from other hosts; `between`: what all hosts receive so; `outward`: what
      a host sends, if those that hold the same piece take turns.
    """

    received: int = 0
    inward: int = 0
    outward: int = 0
    total: int = 0
    between: int = 0


@lru_cache(maxsize=1 << 12)
def movement(kinds: tuple[TensorKind, ...], source: Side, target: Side, per_host: int, block: int = 0) -> Movement:
    """Counts what `fetches` moves over all tensors of `kinds`: to each device just what it lacks; with `block`, all
    that an all-gather over blocks of so many ranks brings together (the kinds are all of experts then, or none is)."""
    received = dict.fromkeys(range(target.devices), 0)
    inward = dict.fromkeys(_hosts(target, per_host), 0)
    demand = [0] * source.layout.pp  # elements that hosts take from each stage
    for experts in (False, True):
        found = _laid((k for k in kinds if k.tensor.experts is experts), source, target)
        counting = _Hosts(source, target, per_host, block, experts)
        for alike in _alike(source, target, per_host, block, experts) if found else ():
            amounts, taken = counting.count(found, alike[0])
            for host in alike:
                inward[host] += sum(taken)
                for device, amount in amounts.items():
                    received[target.rank(device + (host - alike[0]) * per_host, per_host)] += amount
            demand = [d + len(alike) * t for d, t in zip(demand, taken, strict=True)]
    outward = 0
    width = source.layout.stage_devices
    for stage, amount in enumerate(demand):
        low, high = (source.device(rank, per_host) // per_host for rank in (stage * width, (stage + 1) * width - 1))
        outward = max(outward, -(-amount // (high - low + 1)))
    return Movement(max(received.values()), max(inward.values()), outward, sum(received.values()), sum(inward.values()))


def _hosts(side: Side, per_host: int) -> range:
    return range(side.first // per_host, side.device(side.devices - 1, per_host) // per_host + 1)


@lru_cache(maxsize=1 << 10)
def _alike(source: Side, target: Side, per_host: int, block: int, experts: bool) -> tuple[list[int], ...]:
    """The hosts of the target in classes that hold the same, whichever tensors."""
    counting = _Hosts(source, target, per_host, block, experts)
    classes = dict[tuple[object, ...], list[int]]()
    for host in _hosts(target, per_host):
        classes.setdefault(counting.signature(host), []).append(host)
    return tuple(classes.values())


@lru_cache(maxsize=1 << 12)
def lacking(kinds: tuple[TensorKind, ...], source: Side, target: Side, per_host: int) -> int:
    """Elements that the first or the last host of the target lacks: no more than `movement` finds for the busiest, at a
    fraction of the work."""
    hosts = {target.first // per_host, target.device(target.devices - 1, per_host) // per_host}
    found = dict.fromkeys(hosts, 0)
    for experts in (False, True):
        some = _laid((k for k in kinds if k.tensor.experts is experts), source, target)
        counting = _Hosts(source, target, per_host, 0, experts)
        for host in hosts:
            found[host] += sum(counting.count(some, host)[1])
    return max(found.values())


@dataclass(frozen=True)
class _Hosts:
    """What the devices of a host lack, by the boxes that they and their host hold."""

    source: Side
    target: Side
    per_host: int
    block: int
    experts: bool
    # By tensor and where its devices stand: hosts of other stages count alike.
    counted: dict[tuple[object, ...], tuple[dict[int, int], int]] = field(default_factory=dict)

    def signature(self, host: int) -> tuple[object, ...]:
        """What of a host's ranks decides the boxes that they hold: hosts with the same are alike."""
        found: list[object] = []
        for device in range(host * self.per_host, (host + 1) * self.per_host):
            for side in (self.source, self.target):
                rank = side.rank(device, self.per_host)
                found.append(position(side, rank, self.experts) if 0 <= rank < side.devices else None)
            if self.block and found[-1]:
                found.append(self._start(self.source.rank(device, self.per_host)))
        return tuple(found)

    def _start(self, rank: int) -> int:
        """Where the block of a rank starts in its stage, or where one starts that holds the same."""
        start = rank % self.source.layout.stage_devices // self.block * self.block
        return start % math.lcm(period(self.source, self.experts), self.block)

    def count(self, found: Mapping[Tensor, Mapping[_Stages, int]], host: int) -> tuple[dict[int, int], list[int]]:
        """The elements that each device of a host receives, and those that come from other hosts, by the stage that
        they come from."""
        first = host * self.per_host
        givers, takers = (
            {
                i: side.layout.coordinates(r)
                for i in range(self.per_host)
                if 0 <= (r := side.rank(first + i, self.per_host)) < side.devices
            }
            for side in (self.source, self.target)
        )
        starts = (
            tuple((i, self._start(self.source.rank(first + i, self.per_host))) for i in takers) if self.block else ()
        )
        # Of all stages only those that are on this host make a difference.
        held = {at.pp for at in givers.values()}
        wanted = {at.pp for at in takers.values()}
        here = {
            s: (tuple(held.intersection(s[0])), tuple(wanted.intersection(s[1])))
            for s in {s for n in found.values() for s in n}
        }
        own = {
            w: (self._own(givers, self.source, w[0]), self._own(takers, self.target, w[1])) for w in set(here.values())
        }
        received = dict.fromkeys(takers, 0)
        taken = [0] * self.source.layout.pp
        for tensor, numbers in found.items():
            sums = dict.fromkeys((here[s] for s in numbers), 0)
            for s, number in numbers.items():
                sums[here[s]] += number
            missing = {}
            for where, number in sums.items():
                key = tensor, *own[where], starts
                if key not in self.counted:
                    self.counted[key] = self._blocks(*key) if self.block else self._exact(*key[:3])
                amounts, missing[where] = self.counted[key]
                for i, amount in amounts.items():
                    received[i] += number * amount
            for s, number in numbers.items():
                taken[s[0][0]] += number * missing[here[s]]
        return {first + i: amount for i, amount in received.items()}, taken

    def _own(self, found: Mapping[int, Coordinates], side: Side, on: tuple[int, ...]) -> _Places:
        """Where the devices of a host that are on some stages stand in theirs."""
        every = (
            (i, (at.etp, at.ep, at.edp) if self.experts else (at.tp, 0, at.dp))
            for i, at in found.items()
            if at.pp in on
        )
        return tuple((i, at if side.divided else (at[0], at[1], 0)) for i, at in every)

    def _blocks(
        self, tensor: Tensor, givers: _Places, takers: _Places, starts: tuple[tuple[int, int], ...]
    ) -> tuple[dict[int, int], int]:
        """Of one tensor: a block's boxes are those of its ranks, so what a rank has of them is its own, what a host
        has, its ranks'."""
        have = {i: box_at(tensor, self.source, at) for i, at in givers}
        wants = {i: box_at(tensor, self.target, at) for i, at in takers}
        # A block in which each rank has what it wants gathers nothing; of a box that several have, each gives a part.
        lack = {start for i, start in starts if i in wants and _less(wants[i], (have[i],) if i in have else ())}
        blocks = {start: _block(tensor, self.source, start, self.block) for start in lack}
        received = dict.fromkeys((i for i, _ in starts), 0)
        for i, start in starts:
            if start in blocks:
                found, total = blocks[start]
                received[i] = total - (elements(have[i]) // found[have[i]] if have.get(i) in found else 0)
        present = {box for box in have.values() if elements(box)}
        return received, sum(map(elements, set().union(*(found for found, _ in blocks.values())) - present))

    def _exact(self, tensor: Tensor, givers: _Places, takers: _Places) -> tuple[dict[int, int], int]:
        """Of one tensor: what each device lacks of what it wants, and what all of them lack that is not on their
        host."""
        have = {i: box_at(tensor, self.source, at) for i, at in givers}
        present = {box for box in have.values() if elements(box)}
        received: dict[int, int] = {}
        missing: dict[Box, int] = {}
        for i, at in takers:
            want = box_at(tensor, self.target, at)
            if elements(want):
                received[i] = _less(want, (have[i],) if i in have else ())
                if want not in missing:
                    missing[want] = _less(want, present)
        return received, sum(missing.values())


def _laid(kinds: Iterable[TensorKind], source: Side, target: Side) -> dict[Tensor, dict[_Stages, int]]:
    """How many tensors of each kind are on which stages at both ends."""
    found: dict[Tensor, dict[_Stages, int]] = {}
    for tensor, number in pairs(kinds, source, target):
        on = stages(tensor, source.layout), stages(tensor, target.layout)
        numbers = found.setdefault(tensor.alone, {})
        numbers[on] = numbers.get(on, 0) + number
    return found


@lru_cache(maxsize=1 << 12)
def _block(tensor: Tensor, source: Side, start: int, block: int) -> tuple[Mapping[Box, int], int]:
    """The boxes of a block of ranks, each with how many hold it, and the elements of all."""
    found = Counter(b for r in range(start, start + block) if elements(b := _staged(tensor, source, r)))
    return found, sum(map(elements, found))


def _less(want: Box, present: Iterable[Box]) -> int:
    """Elements of a box that are in none of `present`, which are apart."""
    return elements(want) - sum(elements(common) for box in present if (common := overlap(want, box)))


def position(side: Side, rank: int, experts: bool) -> tuple[int, ...]:
    """What of a rank decides its boxes: its stage, and where it stands in it."""
    at = side.layout.coordinates(rank)
    own = (at.etp, at.ep, at.edp) if experts else (at.tp, 0, at.dp)
    return (at.pp, *(own if side.divided else own[:2]))


def left_behind(kinds: Iterable[TensorKind], source: Side, target: Side) -> int:
    """How many elements naive resharding leaves on all devices beside the weights to generate with (arXiv:2507.19017,
    figure 3 and eq. 3).

    Where the box that a rank needs lies within the box that it has, it generates from the buffer that is there, and
    the rest of the buffer is of no use: of 100 elements with 25 needed, 75. Where it does not, a new buffer is made,
    and all of the old one is of no use.
    """
    total = 0
    for experts in (False, True):
        found = list(pairs((k for k in kinds if k.tensor.experts is experts), source, target))
        places: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
        for rank in range(target.devices if found else 0):
            places.setdefault((position(source, rank, experts), position(target, rank, experts)), []).append(rank)
        for tensor, number in found:
            here = stages(tensor, source.layout)
            for ranks in (ranks for (at, _), ranks in places.items() if at[0] in here):
                old = shard(tensor, source, ranks[0])
                new = shard(tensor, target, ranks[0])
                kept = elements(new) if elements(new) and overlap(old, new) == new else 0
                total += number * len(ranks) * (elements(old) - kept)
    return total
