"""The allgather-swap (arXiv:2507.19017, figure 5): update weights become generation weights, and leave the device.

Invariant: after `run`, each rank holds exactly its boxes of the generation layout, bit for bit the values of the
update's; in mode swap the update's storages on the device are empty and their bytes lie in host buffers, and `swap_in`
brings them back bit for bit. An engine is known only by its shards. Where an all-gather would bring a rank more than
twice what it wants, the plan says all-to-all, and just that is sent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from ...backends import devices
from ...backends.spec import Shard
from ...ir.plan import Reshard
from ...model.architecture import Model
from ...sharding.layout import Box, Side, elements, overlap, shard, slices, within
from ..process import memory


class Swap:
    """The update weights of a rank, on the device or in host buffers."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = shards
        # An engine may keep a padded storage behind an uneven shard: it gets back what it had.
        self.sizes = [s.tensor.untyped_storage().nbytes() for s in shards]
        self.host: list[torch.Tensor] = []
        self._seconds = 0.0  # that copies in took, beside whatever ran, since they were last asked for
        self._thread: threading.Thread | None = None

    def copy_out(self) -> None:
        """Device to host. The weights stay on the device until `free`."""
        self.host = [memory.host_copy(s.tensor) for s in self.shards]

    def free(self) -> None:
        """Releases the device's storages."""
        for piece in self.shards:
            devices.release(piece.tensor)

    def start_in(self) -> None:
        """Begins host to device, beside whatever runs."""
        if self.host and self._thread is None:
            # Storage is taken here, so that the memory plan holds from this instant on.
            for piece, size in zip(self.shards, self.sizes, strict=True):
                devices.take(piece.tensor, size)
            self._thread = threading.Thread(target=self._copy_in)
            self._thread.start()

    def wait(self) -> None:
        """Returns when the weights are on the device."""
        self.start_in()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            for buffer in self.host:
                memory.forget(buffer)
            self.host = []

    def _copy_in(self) -> None:
        start = time.perf_counter()
        with torch.no_grad(), devices.of(self.shards[0].tensor).aside():
            for piece, buffer in zip(self.shards, self.host, strict=True):
                piece.tensor.copy_(buffer, non_blocking=True)
        self._seconds += time.perf_counter() - start

    def taken(self) -> float:
        """Seconds that copies in took since this was last asked."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class Move(NamedTuple):
    """A box of a tensor on its way from one neighbour to another, by their numbers in the block."""

    giver: int
    taker: int
    name: str
    box: Box


class Resharder:
    """One resharding edge on one rank; `block` is the process group of the neighbours that gather or exchange among
    themselves."""

    def __init__(
        self, plan: Reshard, model: Model, rank: int, source: Side, target: Side, block: Any, swap: Swap
    ) -> None:
        self.name, self.plan, self.block, self.swap = plan.name, plan, block, swap
        (way,) = plan.ways  # engines that divide experts, or pad vocabularies, need more than one
        self.size, self.exchanges = way.ranks, way.how == "all-to-all"
        first = rank // self.size * self.size
        self.index = rank - first
        self.boxes = {s.name: s.box for s in swap.shards}
        self.target = {t.name: shard(t, target, rank) for t in model.tensors}
        # What each neighbour puts in: of those that hold the same box one, in turns.
        self.given: dict[str, list[tuple[int, Box]]] = {}
        # In an exchange, who sends which box to whom, in an order that all neighbours agree on; what a rank keeps is
        # its own.
        self.moves: dict[str, list[Move]] = {}
        for turn, tensor in enumerate(model.tensors):
            holders: dict[Box, list[int]] = {}
            for index in range(self.size):
                if elements(box := shard(tensor, source, first + index)):
                    holders.setdefault(box, []).append(index)
            self.given[tensor.name] = [(owners[turn % len(owners)], box) for box, owners in holders.items()]
            wants = [shard(tensor, target, first + index) for index in range(self.size)] if self.exchanges else []
            self.moves[tensor.name] = [
                Move(taker if taker in owners else owners[(turn + taker) % len(owners)], taker, tensor.name, common)
                for taker, want in enumerate(wants)
                for box, owners in holders.items()
                if (common := overlap(want, box)) is not None
            ]
        self.seconds: dict[str, float] = {}
        self.moved = 0  # bytes received from neighbours in the last run

    def run(self, allocate: Callable[[], list[Shard]]) -> None:
        """The five steps."""
        self.seconds, self.moved = {}, 0
        staged = self.plan.mode == "swap" and self.plan.order == "staged"

        def timed(name: str, since: float) -> None:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - since

        source = {s.name: s.tensor for s in self.swap.shards}
        if staged:
            start = time.perf_counter()
            self._swap_out()
            source = {s.name: h for s, h in zip(self.swap.shards, self.swap.host, strict=True)}
            timed("swap out", start)
        start = time.perf_counter()
        goal = {s.name: s.tensor for s in allocate()}
        timed("buffer", start)
        with torch.no_grad():
            for bucket in self.plan.buckets:
                start = time.perf_counter()
                parts = self._exchange(bucket, source) if self.exchanges else self._gather(bucket, source)
                timed("all-gather", start)
                start = time.perf_counter()
                (self._place if self.exchanges else self._select)(bucket, parts, source, goal)
                timed("select", start)
                start = time.perf_counter()
                del parts
                timed("release", start)
        if self.plan.mode == "swap" and not staged:
            start = time.perf_counter()
            self._swap_out()
            timed("swap out", start)

    def _swap_out(self) -> None:
        self.swap.copy_out()
        self.swap.free()

    def _gather(self, bucket: tuple[str, ...], source: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """What each neighbour puts in of the bucket, flat, one tensor a neighbour."""
        mine = [source[n].reshape(-1) for n in bucket for i, _ in self.given[n] if i == self.index]
        if self.size == 1:
            return [torch.cat(mine)]
        counts = [
            sum(elements(b) for n in bucket for i, b in self.given[n] if i == index) for index in range(self.size)
        ]
        dtype = next(iter(source.values())).dtype
        buffer = torch.empty(self.size, max(counts), dtype=dtype)
        # In place: a rank's own part is laid down where the gather would put it, so that the bucket is all that is
        # taken.
        own = buffer[self.index]
        if mine:
            torch.cat(mine, out=own[: counts[self.index]])
        dist.all_gather_into_tensor(buffer.view(-1), own, group=self.block)
        self.moved += (self.size - 1) * max(counts) * own.element_size()
        return [row[:count] for row, count in zip(buffer, counts, strict=True)]

    def _exchange(self, bucket: tuple[str, ...], source: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """What each neighbour sends this rank of the bucket, flat, one tensor a neighbour."""
        moves = [m for n in bucket for m in self.moves[n] if m.giver != m.taker]
        out, into = [0] * self.size, [0] * self.size
        for giver, taker, _, box in moves:
            if giver == self.index:
                out[taker] += elements(box)
            if taker == self.index:
                into[giver] += elements(box)
        dtype = next(iter(source.values())).dtype
        sent = torch.empty(sum(out), dtype=dtype)
        rooms = torch.split(sent, out)
        laid = [0] * self.size
        for giver, taker, name, box in moves:
            if giver == self.index:
                piece = source[name][slices(within(box, self.boxes[name]))]
                rooms[taker][laid[taker] : laid[taker] + elements(box)].view(piece.shape).copy_(piece)
                laid[taker] += elements(box)
        received = torch.empty(sum(into), dtype=dtype)
        dist.all_to_all_single(received, sent, into, out, group=self.block)
        self.moved += received.nbytes
        return list(torch.split(received, into))

    def _place(
        self,
        bucket: tuple[str, ...],
        parts: list[torch.Tensor],
        source: dict[str, torch.Tensor],
        goal: dict[str, torch.Tensor],
    ) -> None:
        """Copies what arrived, and what this rank had itself, to its generation boxes."""
        start = [0] * self.size
        for giver, taker, name, box in (m for n in bucket for m in self.moves[n]):
            if taker != self.index:
                continue
            room = goal[name][slices(within(box, self.target[name]))]
            if giver == taker:
                room.copy_(source[name][slices(within(box, self.boxes[name]))])
                continue
            room.copy_(parts[giver][start[giver] : start[giver] + elements(box)].view(room.shape))
            start[giver] += elements(box)

    def _select(
        self,
        bucket: tuple[str, ...],
        parts: list[torch.Tensor],
        source: dict[str, torch.Tensor],
        goal: dict[str, torch.Tensor],
    ) -> None:
        """Copies what this rank's generation boxes need out of the gathered parts."""
        start = [0] * self.size
        for name in bucket:
            wanted = self.target[name]
            for index, box in self.given[name]:
                piece = parts[index][start[index] : start[index] + elements(box)].view([b - a for a, b in box])
                start[index] += elements(box)
                common = overlap(box, wanted)
                if common is not None:
                    goal[name][slices(within(common, wanted))].copy_(piece[slices(within(common, box))])
