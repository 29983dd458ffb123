"""The route of weights to a generating rank, for one way of a resharding edge.

A way has some of the tensors: experts, embeddings, or all others.

Invariant: all ranks of a block make the same calls in the same order. If several ranks hold the same box, one gives it,
such that all give about the same amount. If an all-gather would bring a rank more than twice what it wants, the plan
says all-to-all, and only what is wanted is sent; what each rank of a block has already is not sent. The routes are
computed once: a run only copies and calls collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from ...ir.plan import ReshardRoute
from ...sharding.layout import Box, Side, Tensor, elements, overlap, relative_box, shard, slices
from ...sharding.redistribute import list_gather_groups

# If neighbours give different amounts, an all-gather pads them to the largest, up to this factor: it is one call then.
PADDING = 1.02
Tensors = Mapping[str, torch.Tensor]  # by name
Index = tuple[slice, ...]


class Block(NamedTuple):
    """The `ranks` of a layout that gather or exchange together, and their group."""

    ranks: tuple[int, ...]
    group: Any = None


def make_blocks(ways: Sequence[ReshardRoute], source: Side, per_host: int, rank: int) -> dict[str, Block]:
    """Return the blocks that a global rank is in, by way.

    A collective of all ranks, since it makes process groups.
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
    """A box of a tensor on its way between neighbours, by their numbers in the block."""

    giver: int
    taker: int
    name: str
    box: Box


class Pack(NamedTuple):
    """What this rank gives: its place in the rank's tensor, and in the buffer."""

    name: str
    inside: Index
    place: slice


class Receive(NamedTuple):
    """A box of a given `shape` from a neighbour.

    - `place`: its place in the buffer.
    - `part`: the part that this rank wants.
    - `inside`: where that is in the rank's generation box.
    """

    name: str
    place: slice
    shape: tuple[int, ...]
    part: Index
    inside: Index


class LocalCopy(NamedTuple):
    """What this rank has itself: its place in its update box and generation box."""

    name: str
    inside: Index
    target: Index


@dataclass(frozen=True)
class RouteLoad:
    """What a way brings this rank in one bucket, through a `stretch` of the buffer.

    - `index`: the rank's number in the group. `stretch`: elements of the temporary buffer.
    - `gathered`: in an all-gather, the number of elements from each neighbour.
    - `sent` and `received`: in an all-to-all, the numbers of elements to and from each neighbour.
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
        """The number of elements that come from neighbours."""
        return sum(self.received) + sum(count for i, count in enumerate(self.gathered) if i != self.index)

    def fetch(self, source: Tensors, buffer: torch.Tensor) -> None:
        """Fill the stretch with what this rank and its neighbours give."""
        for name, inside, place in self.packs:
            piece = source[name][inside]
            buffer[place].view(piece.shape).copy_(piece)
        self.exchange(buffer)

    def exchange(self, buffer: torch.Tensor) -> None:
        """Run the collective alone."""
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
        """Copy what arrived, and what this rank had itself, to its generation boxes."""
        for name, place, shape, part, inside in self.receives:
            goal[name][inside].copy_(buffer[place].view(shape)[part])
        for name, inside, target in self.local_copies:
            goal[name][target].copy_(source[name][inside])


class TransferRoute:
    """One way on one rank.

    `boxes` are those that the rank holds of the update's weights, and `target` those that it generates with, by name.
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
        # By tensor, the neighbour that gives each box; nothing if each neighbour already has all that it wants.
        self.gathered: dict[str, list[tuple[int, Box]]] = {}
        self.moves: dict[str, list[Transfer]] = {}
        amounts = [0] * len(self.ranks)  # elements that each neighbour gives
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
        """Return what the way brings for some tensors.

        Its elements begin at `start` in the buffer.
        """
        names = list(bucket)
        gathered = [(tensor_name, *pair) for tensor_name in names for pair in self.gathered.get(tensor_name, ())]
        moves = [move for tensor_name in names for move in self.moves.get(tensor_name, ())]
        across = [move for move in moves if move.giver != move.taker]
        # A way with an all-gather exchanges nothing: each rank has what is not part of it.
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
            # In place: a rank's own part is copied to where the gather puts it, to save memory.
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
    """Return whether each neighbour already has all that it wants."""
    own = {index: box for box, owners in holders.items() for index in owners}
    return all(not elements(want) or (i in own and overlap(want, own[i]) == want) for i, want in enumerate(wants))
