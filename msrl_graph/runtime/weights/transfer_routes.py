"""How the weights of one way of a resharding edge (experts, embeddings, all others) come to a rank that generates.

Invariant: all ranks of a block make the same calls in the same order. Of those that hold the same box one gives it, so
that all give about as much. Where an all-gather would bring a rank more than twice what it wants, the plan says
all-to-all, and just that is sent; what each rank of a block has already, nobody sends. What goes where is worked out
once: a run only copies and calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from ...ir.plan import ReshardRoute
from ...sharding.layout import Box, Side, Tensor, elements, overlap, shard, slices, within
from ...sharding.redistribute import gatherers

# Where what neighbours give differs, an all-gather pads it to the largest: up to so much more is taken for one call.
PADDING = 1.02
Tensors = Mapping[str, torch.Tensor]  # by name
Index = tuple[slice, ...]


class Block(NamedTuple):
    """The `ranks` of a layout that gather or exchange among themselves, and their process group."""

    ranks: tuple[int, ...]
    group: Any = None


def blocks(ways: Sequence[ReshardRoute], source: Side, per_host: int, rank: int) -> dict[str, Block]:
    """Those that a rank of all is of, by way; a collective of all ranks, since it makes process groups."""
    found: dict[str, Block] = {}
    made: dict[tuple[int, ...], Any] = {}
    for way in ways:
        for ranks in gatherers(source, way.across, way.block):
            members = [source.device(r, per_host) for r in ranks]
            if ranks not in made:
                made[ranks] = dist.new_group(members) if len(members) > 1 else None
            if rank in members:
                found[way.of] = Block(ranks, made[ranks])
    return found


class Transfer(NamedTuple):
    """A box of a tensor on its way from one neighbour to another, by their numbers in the block."""

    giver: int
    taker: int
    name: str
    box: Box


class Pack(NamedTuple):
    """What this rank gives: where it is in what the rank holds of a tensor, and where in the buffer."""

    name: str
    inside: Index
    place: slice


class Receive(NamedTuple):
    """A box, of some `shape`, that a neighbour gives: where it is in the buffer, which part of it this rank wants, and
    where in its generation box that is."""

    name: str
    place: slice
    shape: tuple[int, ...]
    part: Index
    inside: Index


class LocalCopy(NamedTuple):
    """What this rank has itself: where in its update box, and where in its generation box."""

    name: str
    inside: Index
    target: Index


@dataclass(frozen=True)
class RouteLoad:
    """What a way brings this rank, the `index`-th of a group, of one bucket, by the elements of a `stretch` of the
    temporary buffer. `gathered`: how many each neighbour puts there, in an all-gather; `sent` and `received`: how many
    go to each and come from each, in an all-to-all."""

    group: Any
    index: int
    stretch: slice
    gathered: list[int] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    laid: list[Pack] = field(default_factory=list)
    taken: list[Receive] = field(default_factory=list)
    own: list[LocalCopy] = field(default_factory=list)

    @property
    def moved(self) -> int:
        """Elements that come from neighbours."""
        return sum(self.received) + sum(n for i, n in enumerate(self.gathered) if i != self.index)

    def fetch(self, source: Tensors, buffer: torch.Tensor) -> None:
        """Fills the stretch, with what this rank gives, and with what neighbours do."""
        for name, inside, place in self.laid:
            piece = source[name][inside]
            buffer[place].view(piece.shape).copy_(piece)
        self.exchange(buffer)

    def exchange(self, buffer: torch.Tensor) -> None:
        """The collective alone."""
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

    def lay(self, source: Tensors, buffer: torch.Tensor, goal: Tensors) -> None:
        """Copies what arrived, and what this rank had itself, to its generation boxes."""
        for name, place, shape, part, inside in self.taken:
            goal[name][inside].copy_(buffer[place].view(shape)[part])
        for name, inside, target in self.own:
            goal[name][target].copy_(source[name][inside])


class TransferRoute:
    """One way on one rank. `boxes` are those that the rank holds of the update's weights, and `target` those that it
    generates with, by name."""

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
        self.boxes = {t.name: shard(t, source, rank) for t in tensors}
        self.target = {t.name: shard(t, target, rank) for t in tensors}
        # By tensor, which neighbour puts in which box; of what each has already all that it wants, nobody does.
        self.given: dict[str, list[tuple[int, Box]]] = {}
        self.moves: dict[str, list[Transfer]] = {}
        amounts = [0] * len(self.ranks)  # that neighbours give
        for turn, tensor in enumerate(tensors):
            holders: dict[Box, list[int]] = {}
            for index, one in enumerate(self.ranks):
                if elements(box := shard(tensor, source, one)):
                    holders.setdefault(box, []).append(index)
            wants = [shard(tensor, target, one) for one in self.ranks]
            if gathers and not _have(holders, wants):
                for box, owners in holders.items():
                    giver = min(owners, key=lambda index: (amounts[index], index))
                    amounts[giver] += elements(box)
                    self.given.setdefault(tensor.name, []).append((giver, box))
                continue
            self.moves[tensor.name] = [
                Transfer(taker if taker in owners else owners[(turn + taker) % len(owners)], taker, tensor.name, common)
                for taker, want in enumerate(wants)
                for box, owners in holders.items()
                if (common := overlap(want, box)) is not None
            ]

    def load(self, bucket: Iterable[str], start: int) -> RouteLoad:
        """What it brings of some tensors, from an element of the buffer on."""
        names = list(bucket)
        given = [(n, *pair) for n in names for pair in self.given.get(n, ())]
        moves = [m for n in names for m in self.moves.get(n, ())]
        across = [m for m in moves if m.giver != m.taker]
        # An all-gather's way exchanges nothing: what is no part of it, each rank has.
        load = self._gathered(given, start) if given else self._exchanged(across, start)
        for _, _, name, box in (m for m in moves if m.giver == m.taker == self.index):
            load.own.append(
                LocalCopy(name, slices(within(box, self.boxes[name])), slices(within(box, self.target[name])))
            )
        return load

    def _gathered(self, given: list[tuple[str, int, Box]], start: int) -> RouteLoad:
        counts = [0] * len(self.ranks)
        for _, index, box in given:
            counts[index] += elements(box)
        most = max(counts)
        if most * len(counts) <= PADDING * sum(counts):
            counts = [most] * len(counts)
        load = RouteLoad(self.group, self.index, slice(start, start + sum(counts)), gathered=counts)
        at = list(accumulate(counts[:-1], initial=start))
        for name, index, box in given:
            place = slice(at[index], at[index] + elements(box))
            wanted = self.target[name]
            at[index] = place.stop
            # In place: a rank's own part is laid down where the gather would put it, so that no more is taken.
            if index == self.index:
                load.laid.append(Pack(name, slices(within(box, box)), place))
            if (common := overlap(box, wanted)) is not None:
                part = slices(within(common, box))
                inside = slices(within(common, wanted))
                load.taken.append(Receive(name, place, _shape(box), part, inside))
        return load

    def _exchanged(self, moves: list[Transfer], start: int) -> RouteLoad:
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
                load.laid.append(Pack(name, slices(within(box, self.boxes[name])), place))
            if taker == self.index:
                place = slice(arriving[giver], arriving[giver] + elements(box))
                arriving[giver] = place.stop
                inside = slices(within(box, self.target[name]))
                load.taken.append(Receive(name, place, _shape(box), slices(within(box, box)), inside))
        return load


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _have(holders: Mapping[Box, Sequence[int]], wants: Sequence[Box]) -> bool:
    """Whether each neighbour has all that it wants."""
    own = {index: box for box, owners in holders.items() for index in owners}
    return all(not elements(want) or (i in own and overlap(want, own[i]) == want) for i, want in enumerate(wants))
