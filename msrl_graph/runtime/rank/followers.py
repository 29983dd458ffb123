"""Frozen workers whose weights follow a trained one: copies, and exponential moving averages.

Invariant: both lie on a rank in the same boxes (checks/followers.py), so each rank changes its own part and nothing is
sent. An average of weights that are not float32 is kept in float32 beside them, and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ...backends.host_offload import HostOffload
from ...backends.spec import Shard, Trainer
from ...ir.graph import Worker

AVERAGE = "average"  # the kind under which a checkpoint has it


class Follower:
    """One worker on one rank; `away` where its weights lie in host memory while others compute."""

    def __init__(self, worker: Worker, own: Trainer, followed: Trainer, away: HostOffload | None) -> None:
        self.worker = worker
        self.away = away
        self.shards, self.sources = own.shards(), followed.shards()
        for mine, theirs in zip(self.shards, self.sources, strict=True):
            if (mine.name, mine.box) != (theirs.name, theirs.box):
                raise ValueError(f"`{worker.name}` has other shards than the worker that it follows: `{mine.name}`")
        self.averages: list[Shard] = []

    @contextmanager
    def held(self, changes: bool = False) -> Iterator[list[Shard]]:
        """Its shards, on the device; what `changes` goes back to host memory with them."""
        if self.away:
            self.away.come()
            self.away.arrive()
        yield self.shards
        if self.away:
            if changes:
                self.away.store()
            self.away.leave()

    def build(self) -> None:
        """Begin the average with the weights of its model."""
        kept = self.worker.decay and any(s.tensor.dtype != torch.float32 for s in self.shards)
        with self.held() as shards:
            self.averages = [Shard(s.name, s.box, s.tensor.detach().float()) for s in shards] if kept else []

    def kinds(self) -> dict[str, list[Shard]]:
        """What a checkpoint keeps beside its weights."""
        return {AVERAGE: self.averages} if self.averages else {}

    def follow(self, number: int) -> None:
        """Take over the weights after iteration `number`, if that is due."""
        if not self.worker.due(number):
            return
        with torch.no_grad(), self.held(changes=True) as shards:
            for i, (mine, theirs) in enumerate(zip(shards, self.sources, strict=True)):
                if not self.worker.decay:
                    mine.tensor.copy_(theirs.tensor)
                    continue
                average = self.averages[i].tensor if self.averages else mine.tensor
                average.lerp_(theirs.tensor.to(average.dtype), 1 - self.worker.decay)
                if self.averages:
                    mine.tensor.copy_(average)


__all__ = ["AVERAGE", "Follower"]
