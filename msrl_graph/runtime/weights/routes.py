"""How the weights of one way of a resharding edge (experts, embeddings, all others) come to a rank that generates.

Invariant: all ranks of a block make the same calls in the same order. Of those that hold the same box one gives it, so
that all give about as much. Where an all-gather would bring a rank more than twice what it wants, the plan says
all-to-all, and just that is sent; what each rank of a block has already, nobody sends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from ...ir.plan import Way
from ...sharding.layout import Box, Side, Tensor, elements, overlap, shard, slices, within

# Where what neighbours give differs, an all-gather pads it to the largest: up to so much more is taken for one call.
PADDING = 1.02
Tensors = Mapping[str, torch.Tensor]  # by name


class Move(NamedTuple):
    """A box of a tensor on its way from one neighbour to another, by their numbers in the block."""

    giver: int
    taker: int
    name: str
    box: Box


class Block(NamedTuple):
    """The `ranks` of a layout that gather or exchange among themselves, and their process group."""

    ranks: tuple[int, ...]
    group: Any = None


class Room:
    """The temporary buffer of an edge: taken once, of so many elements, and laid out anew for every bucket."""

    def __init__(self, size: int, dtype: torch.dtype, place: torch.device) -> None:
        self.buffer, self.used = torch.empty(size, dtype=dtype, device=place), 0

    def clear(self) -> None:
        self.used = 0

    def take(self, size: int) -> torch.Tensor:
        self.used += size
        return self.buffer[self.used - size : self.used]


class Route:
    """One way on one rank. `boxes` are those that the rank holds of the update's weights, and `target` those that it
    generates with, by name."""

    def __init__(
        self,
        way: Way,
        tensors: Sequence[Tensor],
        block: Block,
        rank: int,
        sides: tuple[Side, Side],
    ) -> None:
        self.ranks, self.group = block
        self.index, self.gathers = self.ranks.index(rank), way.how == "all-gather" and len(block.ranks) > 1
        source, target = sides
        self.boxes = {t.name: shard(t, source, rank) for t in tensors}
        self.target = {t.name: shard(t, target, rank) for t in tensors}
        # By tensor, which neighbour puts in which box; of what each has already all that it wants, nobody does.
        self.given: dict[str, list[tuple[int, Box]]] = {}
        self.moves: dict[str, list[Move]] = {}
        amounts = [0] * len(self.ranks)  # that neighbours give
        for turn, tensor in enumerate(tensors):
            holders: dict[Box, list[int]] = {}
            for index, one in enumerate(self.ranks):
                if elements(box := shard(tensor, source, one)):
                    holders.setdefault(box, []).append(index)
            wants = [shard(tensor, target, one) for one in self.ranks]
            if self.gathers and not _have(holders, wants):
                for box, owners in holders.items():
                    giver = min(owners, key=lambda index: (amounts[index], index))
                    amounts[giver] += elements(box)
                    self.given.setdefault(tensor.name, []).append((giver, box))
                continue
            self.moves[tensor.name] = [
                Move(taker if taker in owners else owners[(turn + taker) % len(owners)], taker, tensor.name, common)
                for taker, want in enumerate(wants)
                for box, owners in holders.items()
                if (common := overlap(want, box)) is not None
            ]
        self.moved = 0  # bytes received from neighbours

    def sizes(self, names: Iterable[str]) -> tuple[list[int], tuple[list[int], list[int]]]:
        """Elements that `fetch` moves of some tensors: what of each neighbour is gathered; what is sent to each, and
        received from each."""
        if len(self.ranks) == 1:
            return [], ([], [])
        return self._lengths([n for n in names if n in self.given]), self._counts([n for n in names if n in self.moves])

    def needs(self, names: Iterable[str]) -> int:
        """Elements of the room that `fetch` takes."""
        gathered, (out, into) = self.sizes(names)
        return sum(gathered) + sum(out) + sum(into)

    def fetch(self, names: Iterable[str], source: Tensors, room: Room) -> list[torch.Tensor]:
        """What each neighbour puts in, or sends to this rank, of some tensors: flat, one tensor a neighbour."""
        own = [n for n in names if n in (self.given if self.gathers else self.moves)]
        if not own or len(self.ranks) == 1:
            return []
        return self._gather(own, source, room) if self.gathers else self._exchange(own, source, room)

    def lay(self, names: Iterable[str], parts: list[torch.Tensor], source: Tensors, goal: Tensors) -> None:
        """Copies what arrived, and what this rank had itself, to its generation boxes."""
        self._select([n for n in names if n in self.given], parts, goal)
        self._place([n for n in names if n in self.moves], parts, source, goal)

    def _given(self, names: list[str]) -> list[int]:
        """Elements that each neighbour puts in."""
        counts = [0] * len(self.ranks)
        for index, box in (pair for n in names for pair in self.given[n]):
            counts[index] += elements(box)
        return counts

    def _lengths(self, names: list[str]) -> list[int]:
        """What each neighbour takes of the buffer: as much as the one with the most, or where that is too much more,
        its own."""
        counts = self._given(names)
        most = max(counts, default=0)
        return [most] * len(counts) if most * len(counts) <= PADDING * sum(counts) else counts

    def _gather(self, names: list[str], source: Tensors, room: Room) -> list[torch.Tensor]:
        counts, lengths = self._given(names), self._lengths(names)
        buffer = room.take(sum(lengths))
        rows = torch.split(buffer, lengths)
        # In place: a rank's own part is laid down where the gather would put it, so that no more is taken.
        at = 0
        for name, index, box in ((n, *pair) for n in names for pair in self.given[n]):
            if index == self.index:
                rows[index][at : at + elements(box)].view(source[name].shape).copy_(source[name])
                at += elements(box)
        if len(set(lengths)) == 1:
            dist.all_gather_into_tensor(buffer, rows[self.index], group=self.group)
        else:
            for index, row in enumerate(rows):
                if len(row):
                    dist.broadcast(row, group=self.group, group_src=index)
        self.moved += (sum(lengths) - lengths[self.index]) * buffer.element_size()
        return [row[:count] for row, count in zip(rows, counts, strict=True)]

    def _select(self, names: list[str], parts: list[torch.Tensor], goal: Tensors) -> None:
        start = [0] * len(parts)
        for name in names:
            wanted = self.target[name]
            for index, box in self.given[name]:
                piece = parts[index][start[index] : start[index] + elements(box)].view([b - a for a, b in box])
                start[index] += elements(box)
                common = overlap(box, wanted)
                if common is not None:
                    goal[name][slices(within(common, wanted))].copy_(piece[slices(within(common, box))])

    def _counts(self, names: list[str]) -> tuple[list[int], list[int]]:
        """Elements that this rank sends to each neighbour, and receives from each."""
        out, into = [0] * len(self.ranks), [0] * len(self.ranks)
        for giver, taker, _, box in (m for n in names for m in self.moves[n] if m.giver != m.taker):
            if giver == self.index:
                out[taker] += elements(box)
            if taker == self.index:
                into[giver] += elements(box)
        return out, into

    def _exchange(self, names: list[str], source: Tensors, room: Room) -> list[torch.Tensor]:
        out, into = self._counts(names)
        sent, received = room.take(sum(out)), room.take(sum(into))
        rooms = torch.split(sent, out)
        laid = [0] * len(self.ranks)
        for giver, taker, name, box in (m for n in names for m in self.moves[n]):
            if giver == self.index != taker:
                piece = source[name][slices(within(box, self.boxes[name]))]
                rooms[taker][laid[taker] : laid[taker] + elements(box)].view(piece.shape).copy_(piece)
                laid[taker] += elements(box)
        dist.all_to_all_single(received, sent, into, out, group=self.group)
        self.moved += received.nbytes
        return list(torch.split(received, into))

    def _place(self, names: list[str], parts: list[torch.Tensor], source: Tensors, goal: Tensors) -> None:
        start = [0] * len(self.ranks)
        for giver, taker, name, box in (m for n in names for m in self.moves[n]):
            if taker != self.index:
                continue
            room = goal[name][slices(within(box, self.target[name]))]
            if giver == taker:
                room.copy_(source[name][slices(within(box, self.boxes[name]))])
                continue
            room.copy_(parts[giver][start[giver] : start[giver] + elements(box)].view(room.shape))
            start[giver] += elements(box)


def _have(holders: Mapping[Box, Sequence[int]], wants: Sequence[Box]) -> bool:
    """Whether each neighbour has all that it wants."""
    own = {index: box for box, owners in holders.items() for index in owners}
    return all(not elements(want) or (i in own and overlap(want, own[i]) == want) for i, want in enumerate(wants))
