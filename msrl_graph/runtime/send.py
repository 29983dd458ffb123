"""Resharding between two pools: the update's weights are sent to the ranks that generate, and stay where they are.

Invariant: after `run`, each generation rank holds exactly its boxes, bit for bit the values of the update's. Every rank walks the same
list of messages and takes part in its own, each of which both ends finish before their next: so no two ranks wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import distributed as dist

from ..backends import transformer
from ..engine import Shard
from ..layout import Box, Tensor, transfers, within
from ..plan import Model, Placement, Reshard
from . import memory
from .reshard import Side, slices

Message = tuple[int, int, list[tuple[str, Box]]]  # source rank, target rank, boxes of tensors


class Sender:
    """One resharding edge on one rank, of those that count through all pools. `ends` are the update and the generation, `model` has the
    update's type, `shards` are its weights, none on a rank that generates."""

    def __init__(
        self, plan: Reshard, model: Model, rank: int, ends: tuple[Placement, Placement], sides: Sequence[Side], shards: Sequence[Shard]
    ) -> None:
        self.plan, self.rank, self.shards = plan, rank, shards
        tensors = {t.name: t for t in model.tensors}
        alike: dict[Tensor, list[tuple[int, int, Box]]] = {}
        source, target = sides
        self.buckets: list[list[Message]] = []
        for names in plan.buckets:
            found: dict[tuple[int, int], list[tuple[str, Box]]] = {}
            for name in names:
                kind = Tensor("", tensors[name].shape, tensors[name].tp_dim)
                if kind not in alike:
                    alike[kind] = transfers(kind, source.layout, source.divided, target.layout, target.divided)
                for giver, taker, box in alike[kind]:
                    found.setdefault((giver, taker), []).append((name, box))
            # In a round each source rank has another target, so that messages of a round pass side by side.
            most = max(source.layout.devices, target.layout.devices)
            order = sorted(found, key=lambda pair: ((pair[1] - pair[0]) % most, pair))
            every = [(ends[0].first + giver, ends[1].first + taker, found[giver, taker]) for giver, taker in order]
            self.buckets.append([message for message in every if rank in message[:2]])
        self.dtype = getattr(torch, transformer.DTYPES[model.dtype])
        self.seconds: dict[str, float] = {}
        self.moved = 0  # bytes received in the last run
        self.peak = {"device": 0, "host": 0}

    def run(self, allocate: Callable[[], list[Shard]], measure: bool = False) -> None:
        """Sends or receives all buckets; `allocate` gives the shards to fill, none on a rank that sends. With `measure`, the peak of live
        tensors is looked up at each step of a message (slow)."""
        self.seconds, self.moved = {}, 0
        self.peak = {"device": 0, "host": 0}
        since = time.perf_counter()

        def timed(name: str) -> None:
            nonlocal since
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - since
            if measure:
                now = memory.held()
                self.peak = {k: max(self.peak[k], now[k]) for k in now}
            since = time.perf_counter()

        held = {s.name: s for s in (*self.shards, *allocate())}
        with torch.no_grad():
            for giver, taker, boxes in (message for bucket in self.buckets for message in bucket):
                parts = [held[name].tensor[slices(within(box, held[name].box))] for name, box in boxes]
                if self.rank == giver:
                    self._send(parts, taker, timed)
                else:
                    self._receive(parts, giver, timed)

    def _send(self, parts: list[torch.Tensor], taker: int, timed: Callable[[str], None]) -> None:
        buffer = torch.cat([part.reshape(-1) for part in parts])
        timed("buffer")
        dist.send(buffer, taker)
        timed("send")

    def _receive(self, parts: list[torch.Tensor], giver: int, timed: Callable[[str], None]) -> None:
        sizes = [part.numel() for part in parts]
        buffer = torch.empty(sum(sizes), dtype=self.dtype)
        timed("buffer")
        dist.recv(buffer, giver)
        self.moved += buffer.nbytes
        timed("send")
        for part, values in zip(parts, torch.split(buffer, sizes), strict=True):
            part.copy_(values.view(part.shape))
        timed("select")
