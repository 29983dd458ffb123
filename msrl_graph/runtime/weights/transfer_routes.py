"""The transfer of one kind of weights to a rank, over one resharding edge.

The kinds are experts, embeddings, and all other tensors. The transfer of one kind is a *way* of the edge. A *block* is
a set of ranks that gather or exchange these tensors with each other. The other ranks of a rank's block are its
*neighbors*.

Invariant: all ranks of a block make the same calls in the same order. If several ranks hold the same box, one of them
sends the box. The senders are chosen so that all ranks send about the same amount. If an all-gather would bring a rank
more than twice the amount that the rank wants, the plan says all-to-all, and only boxes that a rank wants are sent. If
each rank of a block already has its box of a tensor, the tensor is not sent. The list of transfers is computed once;
each resharding only copies and calls collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from ...ir.resharding_plan import ReshardRoute
from ...sharding.layout import Side, elements, overlap, relative_box, shard, slices
from ...sharding.redistribute import list_gather_groups
from ...sharding.tensors import Box, Tensor

# If the ranks send different amounts, an all-gather pads all amounts to the largest amount, if this makes the total at
# most this many times larger. The all-gather is then a single call.
PADDING = 1.02
Tensors = Mapping[str, torch.Tensor]  # by name
Index = tuple[slice, ...]


class Block(NamedTuple):
    """The ranks of a layout that gather or exchange tensors, with their process group."""

    ranks: tuple[int, ...]
    group: Any = None


def make_blocks(ways: Sequence[ReshardRoute], source: Side, per_host: int, rank: int) -> dict[str, Block]:
    """Return the block of the rank `rank` for each kind of tensors (`ways`).

    All ranks must call this function together, because it makes process groups. `source` is the layout of the update.
    `per_host` is the number of devices of a host.
    """
    own_blocks: dict[str, Block] = {}
    groups: dict[tuple[int, ...], Any] = {}
    for way in ways:
        for ranks in list_gather_groups(source, way.across, way.block):
            members = [source.device(index, per_host) for index in ranks]
            if ranks not in groups:
                groups[ranks] = dist.new_group(members) if len(members) > 1 else None
            if rank in members:
                own_blocks[way.of] = Block(ranks, groups[ranks])
    return own_blocks


class Transfer(NamedTuple):
    """A box (a part of a tensor) that one rank of a block sends to another rank.

    `giver` is the index of the sending rank in the block, and `taker` is the index of the receiving rank. If the rank
    that needs the box already has it, nothing is sent, and the two indices are equal.
    """

    giver: int
    taker: int
    name: str
    box: Box


class Pack(NamedTuple):
    """A box (a part of a tensor) that this rank sends.

    `inside` are the indices of the box in the rank's update shard. `place` is the range of the box in the buffer.
    """

    name: str
    inside: Index
    place: slice


class Receive(NamedTuple):
    """A box (a part of a tensor) that this rank receives.

    - `place`: the range of the box in the buffer.
    - `shape`: the shape of the box.
    - `part`: the indices of the wanted elements in the box. A rank may need only a piece of the box.
    - `inside`: the indices of these elements in the rank's generation shard.
    """

    name: str
    place: slice
    shape: tuple[int, ...]
    part: Index
    inside: Index


class LocalCopy(NamedTuple):
    """A part of a tensor that this rank copies from its own update shard.

    `inside` are the indices of the part in the update shard, and `target` are its indices in the generation shard.
    """

    name: str
    inside: Index
    target: Index


@dataclass(frozen=True)
class RouteLoad:
    """The transfers of one kind of tensors in one bucket, on this rank.

    - `group`: the process group of the block.
    - `index`: the number of this rank in the group.
    - `stretch`: the range of elements in the temporary buffer that these transfers use.
    - `gathered`: in an all-gather, the number of elements from each rank of the block.
    - `sent`, `received`: in an all-to-all, the numbers of elements to and from each rank of the block.
    - `packs`, `receives`, `local_copies`: the boxes that this rank sends, receives, and copies locally.
    """

    group: Any
    index: int
    stretch: slice
    gathered: list[int] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    packs: list[Pack] = field(default_factory=list)
    receives: list[Receive] = field(default_factory=list)
    local_copies: list[LocalCopy] = field(default_factory=list)

    @property
    def moved(self) -> int:
        """The number of elements that this rank receives from its neighbors."""
        return sum(self.received) + sum(count for i, count in enumerate(self.gathered) if i != self.index)

    def fetch(self, source: Tensors, buffer: torch.Tensor) -> None:
        """Copy this rank's boxes into the buffer, and run the collective.

        `source` has the tensors of the update. Afterwards, the range `stretch` of the buffer contains the boxes that
        this rank receives.
        """
        for name, inside, place in self.packs:
            piece = source[name][inside]
            buffer[place].view(piece.shape).copy_(piece)
        self.exchange(buffer)

    def exchange(self, buffer: torch.Tensor) -> None:
        """Run the collective on the buffer, without copying boxes into the buffer."""
        room = buffer[self.stretch]
        if self.sent:
            sent, received = torch.split(room, [sum(self.sent), sum(self.received)])
            dist.all_to_all_single(received, sent, self.received, self.sent, group=self.group)
        elif self.gathered:
            rows = torch.split(room, self.gathered)
            if len(set(self.gathered)) == 1:
                dist.all_gather_into_tensor(room, rows[self.index], group=self.group)
                return
            for index, row in enumerate(rows):
                if len(row):
                    dist.broadcast(row, group=self.group, group_src=index)

    def unpack(self, source: Tensors, buffer: torch.Tensor, goal: Tensors) -> None:
        """Copy the received boxes, and this rank's own boxes, to the generation's tensors.

        `source` has the tensors of the update, and `goal` has the tensors of the generation.
        """
        for name, place, shape, part, inside in self.receives:
            goal[name][inside].copy_(buffer[place].view(shape)[part])
        for name, inside, target in self.local_copies:
            goal[name][target].copy_(source[name][inside])


class TransferRoute:
    """The transfers of one kind of tensors on one rank.

    `boxes` has, for each tensor, the box that the rank holds in the update layout. `target` has, for each tensor, the
    box that the rank must hold in the generation layout.
    """

    def __init__(
        self,
        way: ReshardRoute,
        tensors: Sequence[Tensor],
        block: Block,
        rank: int,
        sides: tuple[Side, Side],
    ) -> None:
        self.ranks, self.group = block
        self.index = self.ranks.index(rank)
        gathers = way.how == "all-gather" and len(block.ranks) > 1
        source, target = sides
        self.boxes = {tensor.name: shard(tensor, source, rank) for tensor in tensors}
        self.target = {tensor.name: shard(tensor, target, rank) for tensor in tensors}
        # By tensor, the rank that sends each box; nothing if each rank of the block already has all that it wants.
        self.gathered: dict[str, list[tuple[int, Box]]] = {}
        self.moves: dict[str, list[Transfer]] = {}
        amounts = [0] * len(self.ranks)  # the number of elements that each rank sends
        for turn, tensor in enumerate(tensors):
            holders: dict[Box, list[int]] = {}
            for index, neighbour in enumerate(self.ranks):
                if elements(box := shard(tensor, source, neighbour)):
                    holders.setdefault(box, []).append(index)
            wants = [shard(tensor, target, neighbour) for neighbour in self.ranks]
            if gathers and not _have_all(holders, wants):
                for box, owners in holders.items():
                    giver = min(owners, key=lambda index: (amounts[index], index))
                    amounts[giver] += elements(box)
                    self.gathered.setdefault(tensor.name, []).append((giver, box))
                continue
            self.moves[tensor.name] = [
                Transfer(taker if taker in owners else owners[(turn + taker) % len(owners)], taker, tensor.name, common)
                for taker, want in enumerate(wants)
                for box, owners in holders.items()
                if (common := overlap(want, box)) is not None
            ]

    def load(self, bucket: Iterable[str], start: int) -> RouteLoad:
        """Return this rank's transfers for the tensors of one bucket.

        `start` is the index in the temporary buffer at which the elements of these transfers begin.
        """
        names = list(bucket)
        gathered = [(tensor_name, *pair) for tensor_name in names for pair in self.gathered.get(tensor_name, ())]
        moves = [move for tensor_name in names for move in self.moves.get(tensor_name, ())]
        across = [move for move in moves if move.giver != move.taker]
        # A way with an all-gather exchanges nothing: each rank already has the tensors that are not gathered.
        load = self._make_gather(gathered, start) if gathered else self._make_exchange(across, start)
        for _, _, name, box in (move for move in moves if move.giver == move.taker == self.index):
            load.local_copies.append(
                LocalCopy(
                    name, slices(relative_box(box, self.boxes[name])), slices(relative_box(box, self.target[name]))
                )
            )
        return load

    def _make_gather(self, gathered: list[tuple[str, int, Box]], start: int) -> RouteLoad:
        counts = [0] * len(self.ranks)
        for _, index, box in gathered:
            counts[index] += elements(box)
        most = max(counts)
        if most * len(counts) <= PADDING * sum(counts):
            counts = [most] * len(counts)
        load = RouteLoad(self.group, self.index, slice(start, start + sum(counts)), gathered=counts)
        offsets = list(accumulate(counts[:-1], initial=start))
        for name, index, box in gathered:
            place = slice(offsets[index], offsets[index] + elements(box))
            wanted = self.target[name]
            offsets[index] = place.stop
            # In place, to save memory: a rank copies its own box to the range where the all-gather would put it.
            if index == self.index:
                load.packs.append(Pack(name, slices(relative_box(box, box)), place))
            if (common := overlap(box, wanted)) is not None:
                part = slices(relative_box(common, box))
                inside = slices(relative_box(common, wanted))
                load.receives.append(Receive(name, place, _shape(box), part, inside))
        return load

    def _make_exchange(self, moves: list[Transfer], start: int) -> RouteLoad:
        out = [0] * len(self.ranks)
        into = [0] * len(self.ranks)
        for giver, taker, _, box in moves:
            out[taker] += elements(box) * (giver == self.index)
            into[giver] += elements(box) * (taker == self.index)
        if not moves:
            return RouteLoad(self.group, self.index, slice(start, start))
        middle = start + sum(out)
        load = RouteLoad(self.group, self.index, slice(start, middle + sum(into)), sent=out, received=into)
        leaving = list(accumulate(out[:-1], initial=start))
        arriving = list(accumulate(into[:-1], initial=middle))
        for giver, taker, name, box in moves:
            if giver == self.index:
                place = slice(leaving[taker], leaving[taker] + elements(box))
                leaving[taker] = place.stop
                load.packs.append(Pack(name, slices(relative_box(box, self.boxes[name])), place))
            if taker == self.index:
                place = slice(arriving[giver], arriving[giver] + elements(box))
                arriving[giver] = place.stop
                inside = slices(relative_box(box, self.target[name]))
                load.receives.append(Receive(name, place, _shape(box), slices(relative_box(box, box)), inside))
        return load


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _have_all(holders: Mapping[Box, Sequence[int]], wants: Sequence[Box]) -> bool:
    """Return whether each rank of a block already has the box that it wants.

    The boxes are parts of one tensor. `holders` maps each box to the ranks that hold the box. `wants` has the box that
    each rank wants.
    """
    own = {index: box for box, owners in holders.items() for index in owners}
    return all(not elements(want) or (i in own and overlap(want, own[i]) == want) for i, want in enumerate(wants))
