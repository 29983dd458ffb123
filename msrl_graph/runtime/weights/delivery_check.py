"""A check that a generation holds what its update sent, tensor by tensor.

It is made at each end of a resharding edge.

Invariant: what an end sums follows from the two layouts alone (sharding/layout.py), not from the routes on which
weights are sent: so a route that was cut wrongly, or left out, shows. If several ranks hold copies of a part, one of
them sums it, such that all have about the same work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from heapq import heapreplace
from itertools import groupby
from typing import NamedTuple

import torch

from ...backends.spec import Shard
from ...sharding.layout import Box, Side, Tensor, elements, overlap, relative_box, shard, slices, stages, strip_name
from .digest import Digest, Odd


class TensorSlice(NamedTuple):
    """What this rank sums of a tensor.

    - `box`: the part.
    - `inside`: its place in what the rank holds (None: it is all of that).
    - `at`: the numbers of its positions.
    - `place`: its place in the list of digests.
    """

    name: str
    box: Box
    inside: tuple[slice, ...] | None
    weights: Odd
    place: int


class Delivery:
    """The weights of an edge on one rank: what it sums, and what it must hold.

    `ends` are the rank's numbers in the layouts of update and generation (-1: not in it). `size` is the number of
    different boxes that the generation's ranks hold, of all tensors. What the update sent is a list with the digest of
    each box: the sum over its ranks.
    """

    def __init__(
        self, tensors: Sequence[Tensor], sides: tuple[Side, Side], ends: tuple[int, int], digest: Digest
    ) -> None:
        source, target = sides
        self.digest = digest
        self.size = 0
        self.parts: list[TensorSlice] = []  # to sum of the update
        self.declared: dict[str, TensorSlice] = {}  # by tensor, what this rank generates with
        # By kind of tensor: the ranks that hold each box of the update, and the different boxes of the generation.
        known: dict[Hashable, tuple[dict[Box, tuple[int, ...]], list[Box]]] = {}
        # By holders: a heap of the elements that each of them sums.
        busy: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for tensor in tensors:
            kind = strip_name(tensor), stages(tensor, source.layout), stages(tensor, target.layout)
            if kind not in known:
                known[kind] = _holders(tensor, source), [*_holders(tensor, target)]
            holders, wanted = known[kind]
            places = {box: self.size + index for index, box in enumerate(wanted)}
            self.size += len(wanted)
            for held_box, ranks in holders.items():
                heap = busy.setdefault(ranks, [(0, rank) for rank in ranks])
                sums, giver = heap[0]
                heapreplace(heap, (sums + elements(held_box), giver))
                if giver == ends[0]:
                    overlaps = [(overlap(held_box, box), place) for box, place in places.items()]
                    self.parts += [
                        self._make_slice(tensor, common, held_box, place)
                        for common, place in overlaps
                        if common is not None
                    ]
            if ends[1] >= 0 and (own := shard(tensor, target, ends[1])) in places:
                self.declared[tensor.name] = self._make_slice(tensor, own, own, places[own])
        self.parts.sort(key=lambda part: part.box)  # slices of the same box are summed together
        self.own_parts = sorted(self.declared.values(), key=lambda part: part.box)
        self._places = torch.tensor([part.place for part in self.parts], dtype=torch.int64)

    def _make_slice(self, tensor: Tensor, box: Box, held_box: Box, place: int) -> TensorSlice:
        inside = None if box == held_box else slices(relative_box(box, held_box))
        return TensorSlice(tensor.name, box, inside, self.digest.position_weights(box), place)

    def sent_digests(self, shards: Iterable[Shard]) -> torch.Tensor:
        """Return this rank's summands of the update's digests, by place."""
        digests = self._digests(shards, self.parts)
        return torch.zeros(self.size, dtype=torch.int64).index_add_(0, self._places, digests)

    def held_digests(self, shards: Sequence[Shard]) -> dict[str, int]:
        """Return the digests of some tensors that this rank generates with."""
        names = {shard.name for shard in shards}
        parts = [part for part in self.own_parts if part.name in names]
        return dict(zip([part.name for part in parts], self._digests(shards, parts).tolist(), strict=True))

    def _digests(self, shards: Iterable[Shard], parts: Sequence[TensorSlice]) -> torch.Tensor:
        tensors = {shard.name: shard.tensor for shard in shards}
        digests = []
        if not parts:
            return torch.zeros(0, dtype=torch.int64)
        with torch.inference_mode():
            room = self.digest.make_buffer(tensors[parts[0].name].device)
            for _, alike in groupby(parts, key=lambda part: part.box):
                same_box = [*alike]
                values = [
                    tensors[piece.name] if piece.inside is None else tensors[piece.name][piece.inside]
                    for piece in same_box
                ]
                digests.append(self.digest.digests(values, same_box[0].weights, room))
            return torch.cat(digests).cpu()

    def find_differences(self, digests: Mapping[str, int], sent: torch.Tensor) -> list[str]:
        """Return this rank's tensors whose digests differ from what was sent."""
        sent_digests = sent.tolist()
        return [name for name, part in self.declared.items() if digests.get(name) != sent_digests[part.place]]


def _holders(tensor: Tensor, side: Side) -> dict[Box, tuple[int, ...]]:
    """Return the ranks that hold each box of a tensor."""
    ranks_by_box: dict[Box, list[int]] = {}
    for rank in range(side.devices):
        if elements(box := shard(tensor, side, rank)):
            ranks_by_box.setdefault(box, []).append(rank)
    return {box: tuple(ranks) for box, ranks in ranks_by_box.items()}


def describe_mismatch(declared: Mapping[str, Box], shards: Iterable[Shard]) -> str:
    """Describe how an engine's tensors differ from its layout; "" if they do not."""
    bound = [shard for shard in shards if shard.tensor.numel()]
    times = Counter(shard.name for shard in bound)
    shapes = {name: [stop - start for start, stop in box] for name, box in declared.items()}
    wrong = [f"`{name}` is missing" for name in declared if name not in times]
    wrong += [f"`{name}` is not part of it" for name in times if name not in declared]
    wrong += [f"`{name}` is there {count} times" for name, count in times.items() if count > 1]
    wrong += [
        f"`{shard.name}` has shape {[*shard.tensor.shape]} instead of {shapes[shard.name]}"
        for shard in bound
        if shard.name in shapes and [*shard.tensor.shape] != shapes[shard.name]
    ]
    if not wrong:
        return ""
    more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return f"{sum(times.values())} tensors, but its layout declares {len(declared)}: {wrong[0]}{more}"


def boxes_by_name(tensors: Iterable[Tensor], side: Side, rank: int) -> dict[str, Box]:
    """Return what a rank of a layout holds, by tensor, without empty boxes."""
    return {tensor.name: box for tensor in tensors if elements(box := shard(tensor, side, rank))}
