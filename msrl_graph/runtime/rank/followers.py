"""Frozen workers that follow a trained worker, by copies or moving averages.

Invariant: on a rank, the weights of both workers have the same boxes (checks/followers.py). So each rank changes its
own shards of the follower, and no weights are sent. If the follower's weights are not float32, the rank keeps a float32
moving average in addition to the weights. Each change of the follower first updates this average and then rounds the
average once to get the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ...backends.engine_protocols import Shard, Trainer
from ...backends.host_offload import HostOffload
from ...ir.graph import Worker

AVERAGE = "average"  # the name in a checkpoint for the moving average


class Follower:
    """One rank's shards of a worker that follows another worker.

    `offload` is set if the follower's weights are in host memory while other workers compute.
    """

    def __init__(self, worker: Worker, own: Trainer, followed: Trainer, offload: HostOffload | None) -> None:
        self.worker = worker
        self.offload = offload
        self.shards = own.shards()
        self.sources = followed.shards()
        for mine, theirs in zip(self.shards, self.sources, strict=True):
            if (mine.name, mine.box) != (theirs.name, theirs.box):
                raise ValueError(f"`{worker.name}` and the worker that it follows have different shards: `{mine.name}`")
        # The moving average starts with the follower's own weights.
        self.averages: list[Shard] = []
        if worker.decay and any(shard.tensor.dtype != torch.float32 for shard in self.shards):
            with self.on_device() as shards:
                self.averages = [Shard(shard.name, shard.box, shard.tensor.detach().float()) for shard in shards]

    @contextmanager
    def on_device(self, changes: bool = False) -> Iterator[list[Shard]]:
        """Copy the follower's shards to the device if necessary; yield the shards.

        If `changes` is true, the shards are copied back to host memory when the context ends.
        """
        if self.offload:
            self.offload.come()
            self.offload.arrive()
        yield self.shards
        if self.offload:
            if changes:
                self.offload.store()
            self.offload.leave()

    def extra_shards(self) -> dict[str, list[Shard]]:
        """Return the moving average, which a checkpoint stores in addition to the weights.

        The result is empty if the weights themselves are the average.
        """
        return {AVERAGE: self.averages} if self.averages else {}

    def follow(self, number: int) -> None:
        """Update the follower after iteration `number`, if the program asks for it.

        The follower copies the weights of the worker that it follows, or adds them to a moving average.
        """
        if not self.worker.due(number):
            return
        with torch.no_grad(), self.on_device(changes=True) as shards:
            for i, (mine, theirs) in enumerate(zip(shards, self.sources, strict=True)):
                if not self.worker.decay:
                    mine.tensor.copy_(theirs.tensor)
                    continue
                average = self.averages[i].tensor if self.averages else mine.tensor
                average.lerp_(theirs.tensor.to(average.dtype), 1 - self.worker.decay)
                if self.averages:
                    mine.tensor.copy_(average)
