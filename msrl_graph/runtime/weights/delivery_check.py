"""Whether a generation holds what its update sent, tensor by tensor, at each end of a resharding edge.

Invariant: what an end sums up follows from the two layouts alone (sharding/layout.py), and nothing of it from the
routes by which weights go: so a route that was cut wrongly, or left out, shows. Of ranks that hold copies of a part one
sums it up, so that all have about as much to do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from heapq import heapreplace
from itertools import groupby
from typing import NamedTuple

import torch

from ...backends.spec import Shard
from ...sharding.layout import Box, Side, Tensor, elements, nameless, overlap, shard, slices, stages, within
from .digest import Digest, Odd


class TensorSlice(NamedTuple):
    """What this rank sums up of a tensor: a box, where it is in what the rank holds (None: that is all of it), with the
    numbers of its positions, and the place of the list that it is for."""

    name: str
    box: Box
    inside: tuple[slice, ...] | None
    at: Odd
    place: int


class Delivery:
    """The weights of an edge on one rank, which is the number `ends` of the update's layout and of the generation's
    (-1: of none). `size`: how many different boxes the generation's ranks hold, of all tensors; what the update sent is
    a list with the digest of each, the sum of what its ranks have of it."""

    def __init__(self, tensors: Sequence[Tensor], sides: tuple[Side, Side], ends: tuple[int, int], of: Digest) -> None:
        source, target = sides
        self.digest = of
        self.size = 0
        self.parts: list[TensorSlice] = []  # of the update
        self.declared: dict[str, TensorSlice] = {}  # by tensor, what this rank generates with
        # By kind of tensor, who holds which box of the update, and the different boxes of the generation.
        known: dict[Hashable, tuple[dict[Box, tuple[int, ...]], list[Box]]] = {}
        busy: dict[tuple[int, ...], list[tuple[int, int]]] = {}  # elements that each of some holders sums up: a heap
        for tensor in tensors:
            kind = nameless(tensor), stages(tensor, source.layout), stages(tensor, target.layout)
            if kind not in known:
                known[kind] = _holders(tensor, source), [*_holders(tensor, target)]
            holders, wanted = known[kind]
            places = {box: self.size + i for i, box in enumerate(wanted)}
            self.size += len(wanted)
            for held, ranks in holders.items():
                heap = busy.setdefault(ranks, [(0, rank) for rank in ranks])
                sums, giver = heap[0]
                heapreplace(heap, (sums + elements(held), giver))
                if giver == ends[0]:
                    found = [(overlap(held, box), place) for box, place in places.items()]
                    self.parts += [self._part(tensor, b, held, place) for b, place in found if b is not None]
            if ends[1] >= 0 and (own := shard(tensor, target, ends[1])) in places:
                self.declared[tensor.name] = self._part(tensor, own, own, places[own])
        self.parts.sort(key=lambda part: part.box)  # those of the same box are summed together
        self.own = sorted(self.declared.values(), key=lambda part: part.box)
        self._places = torch.tensor([part.place for part in self.parts], dtype=torch.int64)

    def _part(self, tensor: Tensor, box: Box, of: Box, place: int) -> TensorSlice:
        inside = None if box == of else slices(within(box, of))
        return TensorSlice(tensor.name, box, inside, self.digest.at(box), place)

    def sent(self, shards: Iterable[Shard]) -> torch.Tensor:
        """Of what the generation is to hold, by place, what this rank of the update has to add."""
        found = self._digests(shards, self.parts)
        return torch.zeros(self.size, dtype=torch.int64).index_add_(0, self._places, found)

    def held(self, shards: Sequence[Shard]) -> dict[str, int]:
        """The digests of what this rank generates with, of some of its tensors."""
        names = {s.name for s in shards}
        parts = [part for part in self.own if part.name in names]
        return dict(zip([part.name for part in parts], self._digests(shards, parts).tolist(), strict=True))

    def _digests(self, shards: Iterable[Shard], parts: Sequence[TensorSlice]) -> torch.Tensor:
        held = {s.name: s.tensor for s in shards}
        found = []
        if not parts:
            return torch.zeros(0, dtype=torch.int64)
        with torch.inference_mode():
            room = self.digest.room(held[parts[0].name].device)
            for _, alike in groupby(parts, key=lambda part: part.box):
                some = [*alike]
                values = [held[p.name] if p.inside is None else held[p.name][p.inside] for p in some]
                found.append(self.digest.of(values, some[0].at, room))
            return torch.cat(found).cpu()

    def other(self, held: Mapping[str, int], sent: torch.Tensor) -> list[str]:
        """The tensors of this rank of which it does not hold what was sent."""
        told = sent.tolist()
        return [name for name, part in self.declared.items() if held.get(name) != told[part.place]]


def _holders(tensor: Tensor, side: Side) -> dict[Box, tuple[int, ...]]:
    """The ranks that hold each box of a tensor."""
    found: dict[Box, list[int]] = {}
    for rank in range(side.devices):
        if elements(box := shard(tensor, side, rank)):
            found.setdefault(box, []).append(rank)
    return {box: tuple(ranks) for box, ranks in found.items()}


def unbound(declared: Mapping[str, Box], shards: Iterable[Shard]) -> str:
    """What an engine holds otherwise than its layout declares, by name, in words; "" where nothing is."""
    bound = [s for s in shards if s.tensor.numel()]
    times = Counter(s.name for s in bound)
    shapes = {n: [b - a for a, b in box] for n, box in declared.items()}
    wrong = [f"`{name}` is missing" for name in declared if name not in times]
    wrong += [f"`{name}` is no part of it" for name in times if name not in declared]
    wrong += [f"`{name}` is there {count} times" for name, count in times.items() if count > 1]
    wrong += [
        f"`{s.name}` has the shape {[*s.tensor.shape]} in place of {shapes[s.name]}"
        for s in bound
        if s.name in shapes and [*s.tensor.shape] != shapes[s.name]
    ]
    if not wrong:
        return ""
    more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return f"{sum(times.values())} tensors where its layout declares {len(declared)}: {wrong[0]}{more}"


def boxes(tensors: Iterable[Tensor], side: Side, rank: int) -> dict[str, Box]:
    """What a rank of a layout holds, by tensor, without what it has nothing of."""
    return {t.name: box for t in tensors if elements(box := shard(t, side, rank))}
