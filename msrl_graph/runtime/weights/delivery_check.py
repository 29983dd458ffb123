"""A check that a generation holds the weights that its update sent.

The ranks at both ends of a resharding edge compute digests of their weights, and the digests are compared tensor by
tensor.

Invariant: which boxes a rank digests depends only on the two layouts (sharding/layout.py), not on the routes on which
weights are sent. So the check finds a route that is wrong or missing. If several ranks hold copies of a box, one of
these ranks digests the box. The boxes are assigned so that all ranks have about the same work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from heapq import heapreplace
from itertools import groupby
from typing import NamedTuple

import torch

from ...backends.engine_protocols import Shard
from ...sharding.layout import Side, elements, overlap, relative_box, shard, slices, stages, strip_name
from ...sharding.tensors import Box, Tensor
from .digest import Digest, Odd


class TensorSlice(NamedTuple):
    """A part of a tensor whose digest this rank computes.

    - `name`: the name of the tensor.
    - `box`: the part, as a box of the whole tensor.
    - `inside`: the indices of the part in the rank's shard. None means the whole shard.
    - `weights`: the result of `Digest.position_weights` for the box. The digest multiplies each element by a product of
      these odd numbers.
    - `place`: an index in the list of the update's digests. The digest of this part is added to the number at this
      index.
    """

    name: str
    box: Box
    inside: tuple[slice, ...] | None
    weights: Odd
    place: int


class Delivery:
    """One rank's check of one resharding edge: the rank computes and compares digests.

    - `sides`: the layouts of update and generation.
    - `ends`: the number of the rank in each of these two layouts; -1 in a layout that does not have the rank.
    - `size`: the number of different boxes that the ranks of the generation hold, summed over all tensors.

    Training does not change frozen weights. So each rank computes their digests only once.

    The digests of the update are a list with one number for each of these boxes. Several ranks of the update may hold
    parts of a box. Each of these ranks computes the digest of its part, and the sum of these digests is the digest of
    the box.
    """

    def __init__(
        self, tensors: Sequence[Tensor], sides: tuple[Side, Side], ends: tuple[int, int], digest: Digest
    ) -> None:
        source, target = sides
        self.digest = digest
        self.frozen = {tensor.name for tensor in tensors if tensor.frozen}
        self.size = 0
        self.parts: list[TensorSlice] = []  # the slices of the update that this rank sums
        self.declared: dict[str, TensorSlice] = {}  # by tensor, what this rank generates with
        # By kind of tensor: the ranks that hold each box of the update, and the different boxes of the generation.
        known: dict[Hashable, tuple[dict[Box, tuple[int, ...]], list[Box]]] = {}
        # By the ranks that hold a box: a heap with the number of elements that each of these ranks sums.
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
        self._frozen_sent: torch.Tensor | None = None
        self._frozen_held: dict[str, int] = {}

    def _make_slice(self, tensor: Tensor, box: Box, held_box: Box, place: int) -> TensorSlice:
        inside = None if box == held_box else slices(relative_box(box, held_box))
        return TensorSlice(tensor.name, box, inside, self.digest.position_weights(box), place)

    def sent_digests(self, shards: Sequence[Shard]) -> torch.Tensor:
        """Return the numbers that this rank adds to the update's digests.

        The result has one number for each box that the generation holds. The sum of the results of all update ranks is
        the list of the update's digests. `shards` are the weights of the update on this rank.
        """
        if self._frozen_sent is None:
            self._frozen_sent = self._sum_digests(shards, [part for part in self.parts if part.name in self.frozen])
        return self._frozen_sent + self._sum_digests(
            shards, [part for part in self.parts if part.name not in self.frozen]
        )

    def _sum_digests(self, shards: Sequence[Shard], parts: Sequence[TensorSlice]) -> torch.Tensor:
        places = torch.tensor([part.place for part in parts], dtype=torch.int64)
        return torch.zeros(self.size, dtype=torch.int64).index_add_(0, places, self._digests(shards, parts))

    def held_digests(self, shards: Sequence[Shard]) -> dict[str, int]:
        """Return the digest of each generation tensor on this rank, by the tensor's name.

        Only the tensors of `shards` are included.
        """
        names = {shard.name for shard in shards}
        parts = [part for part in self.own_parts if part.name in names - self._frozen_held.keys()]
        digests = dict(zip([part.name for part in parts], self._digests(shards, parts).tolist(), strict=True))
        self._frozen_held |= {name: number for name, number in digests.items() if name in self.frozen}
        return digests | {name: number for name, number in self._frozen_held.items() if name in names}

    def current_digests(self, shards: Sequence[Shard]) -> dict[str, int]:
        """Return the digests of tensors as they are now.

        Those of frozen tensors are computed again too.
        """
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
        """Return the names of this rank's tensors that differ from the update's tensors.

        The tensors are compared by their digests. `digests` is the result of `held_digests`. `sent` has the digests of
        the update, summed over its ranks.
        """
        sent_digests = sent.tolist()
        return [name for name, part in self.declared.items() if digests.get(name) != sent_digests[part.place]]


def _holders(tensor: Tensor, side: Side) -> dict[Box, tuple[int, ...]]:
    """Return each box of a tensor, with the ranks of a layout that hold the box."""
    ranks_by_box: dict[Box, list[int]] = {}
    for rank in range(side.devices):
        if elements(box := shard(tensor, side, rank)):
            ranks_by_box.setdefault(box, []).append(rank)
    return {box: tuple(ranks) for box, ranks in ranks_by_box.items()}


def describe_mismatch(declared: Mapping[str, Box], shards: Iterable[Shard]) -> str:
    """Describe how an engine's tensors differ from the tensors of its layout.

    `declared` has, for each tensor, the box that the layout assigns to the engine's rank. `shards` are the tensors that
    the engine holds. Returns "" if there is no difference.
    """
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
    """Return, for each tensor, the box that a rank of a layout holds.

    Tensors of which the rank holds nothing are left out.
    """
    return {tensor.name: box for tensor in tensors if elements(box := shard(tensor, side, rank))}
