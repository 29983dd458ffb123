"""The allgather-swap (arXiv:2507.19017, figure 5): update weights become generation weights, and leave the device.

Invariant: after `run`, each rank holds exactly its boxes of the generation layout, bit for bit the values of the update's; in mode
swap the update's storages on the device are empty and their bytes lie in host buffers, and `swap_in` brings them back bit for bit.
An engine is known only by its shards.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed as dist

from ..engine import Shard
from ..layout import Box, Side, elements, overlap, shard, slices, within
from ..plan import Model, Reshard
from . import memory


class Swap:
    """The update weights of a rank, on the device or in host buffers."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = shards
        # An engine may keep a padded storage behind an uneven shard: it gets back what it had.
        self.sizes = [s.tensor.untyped_storage().nbytes() for s in shards]
        self.host: list[torch.Tensor] = []
        self.seconds = 0.0  # that the last copy in took, beside whatever ran
        self._thread: threading.Thread | None = None

    def copy_out(self) -> None:
        """Device to host. The weights stay on the device until `free`."""
        self.host = [memory.host_copy(s.tensor) for s in self.shards]

    def free(self) -> None:
        """Releases the device's storages."""
        for piece in self.shards:
            piece.tensor.untyped_storage().resize_(0)

    def start_in(self) -> None:
        """Begins host to device, beside whatever runs."""
        if self.host and self._thread is None:
            # Storage is taken here, so that the memory plan holds from this instant on.
            for piece, size in zip(self.shards, self.sizes, strict=True):
                piece.tensor.untyped_storage().resize_(size)
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
        with torch.no_grad():
            for piece, buffer in zip(self.shards, self.host, strict=True):
                piece.tensor.copy_(buffer)
        self.seconds = time.perf_counter() - start


class Resharder:
    """One resharding edge on one rank; `block` is the process group of the neighbours that gather together."""

    def __init__(self, plan: Reshard, model: Model, rank: int, source: Side, target: Side, block: Any, swap: Swap) -> None:
        self.plan, self.block, self.swap = plan, block, swap
        size = plan.ways[0].ranks
        first = rank // size * size
        self.tensors = {t.name: t for t in model.tensors}
        self.boxes = {s.name: s.box for s in swap.shards}
        # What each neighbour puts in: its box of each tensor, unless an earlier neighbour holds the same one.
        self.given: dict[str, list[tuple[int, Box]]] = {}
        for name, tensor in self.tensors.items():
            given: list[tuple[int, Box]] = []
            for index in range(size):
                box = shard(tensor, source, first + index)
                if elements(box) and all(box != other for _, other in given):
                    given.append((index, box))
            self.given[name] = given
        self.index, self.size = rank - first, size
        self.target = {n: shard(t, target, rank) for n, t in self.tensors.items()}
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
                parts = self._gather(bucket, source)
                timed("all-gather", start)
                start = time.perf_counter()
                self._select(bucket, parts, goal)
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
        counts = [sum(elements(b) for n in bucket for i, b in self.given[n] if i == index) for index in range(self.size)]
        dtype = next(iter(source.values())).dtype
        buffer = torch.empty(self.size, max(counts), dtype=dtype)
        # In place: a rank's own part is laid down where the gather would put it, so that the bucket is all that is taken.
        own = buffer[self.index]
        if mine:
            torch.cat(mine, out=own[: counts[self.index]])
        dist.all_gather_into_tensor(buffer.view(-1), own, group=self.block)
        self.moved += (self.size - 1) * max(counts) * own.element_size()
        return [row[:count] for row, count in zip(buffer, counts, strict=True)]

    def _select(self, bucket: tuple[str, ...], parts: list[torch.Tensor], goal: dict[str, torch.Tensor]) -> None:
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
