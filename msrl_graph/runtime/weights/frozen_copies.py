"""Host copies of the frozen weights that a rank generates with.

Ranks of one host that hold the same box of a weight share one copy. The first of them, the copy's owner, writes it into
memory that has no name in a file system (memfd_create), so it is freed when the processes end, however they end. The
others map it. They find it through the store of all ranks.

Invariant: the first resharding delivers frozen weights like all others. Later ones leave them out: each time the
generation's weights get memory again, the frozen ones are copied from host memory. Nothing writes to a copy after its
owner has published it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ...backends.devices import Lane, TorchDevice, map_host_buffer
from ...backends.engine_protocols import Shard
from ...model.architecture import Model
from ...sharding.layout import Side, elements, find_equal_ranks, shard
from ...sharding.tensors import Tensor

if TYPE_CHECKING:
    import torch

ALIGNED = 64  # bytes: each tensor begins at a multiple


@dataclass(frozen=True)
class HostRanks:
    """The ranks of one host that generate with a model.

    - `side`: how the weights are sharded.
    - `rank`: this rank. `ranks`: all ranks of its host, in order.
    - `key`: a prefix of keys in `store`, the store of all ranks. `deadline`: seconds that the owner of a copy may take.
    """

    side: Side
    rank: int
    ranks: tuple[int, ...]
    store: Any
    key: str
    deadline: float

    def find_owner(self, tensor: Tensor, rank: int) -> int | None:
        """Return the owner of a rank's copy of a tensor; None if nobody shares it."""
        holders = find_equal_ranks(tensor, self.side, rank, self.ranks)
        return holders[0] if len(holders) > 1 else None

    def publish(self, descriptor: int) -> None:
        self.store.set(self._name(self.rank), f"{os.getpid()} {descriptor}")

    def open(self, owner: int) -> int:
        """Return a descriptor of the memory that a rank has published."""
        self.store.wait([self._name(owner)], timedelta(seconds=self.deadline))
        process, descriptor = map(int, self.store.get(self._name(owner)).split())
        return os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)

    def _name(self, rank: int) -> str:
        return f"{self.key}/{self.ranks[0]}/{rank}"


class FrozenCopies:
    """The frozen weights of one generation on one rank.

    If `host` is None, this rank shares no copy with others.
    """

    def __init__(self, device: TorchDevice, model: Model, host: HostRanks | None = None) -> None:
        self.device = device
        self._host = host
        self._frozen = {tensor.name: tensor for tensor in model.weights if tensor.frozen}
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # a weight on the device, and its host copy
        self._stored = False

    @cached_property
    def _back(self) -> Lane:
        return Lane(self.device)

    def store(self, shards: Sequence[Shard]) -> None:
        """Copy frozen weights to host memory, unless this was done before.

        Called with the weights that the resharding delivered, before the engine converts them.
        """
        if self._stored:
            return
        self._stored = True
        weights = {part.name: part.tensor for part in shards if part.name in self._frozen}
        by_owner: dict[int | None, list[str]] = {}
        for name in weights:
            owner = self._host.find_owner(self._frozen[name], self._host.rank) if self._host else None
            by_owner.setdefault(owner, []).append(name)
        for name in by_owner.pop(None, ()):
            self._copies.append((weights[name], self.device.host_buffer(weights[name])))
        own = self._host.rank if self._host else -1
        # A rank publishes its own copies before it waits for others.
        for owner in sorted(by_owner, key=lambda rank: rank != own):
            assert owner is not None
            self._share(owner, {name: weights[name] for name in by_owner[owner]})
        if own not in by_owner:
            self._fill([*self._copies])
        self.device.finish()

    def _fill(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for weight, copy in copies:
            copy.copy_(weight, non_blocking=True)
        self.device.finish()

    def _share(self, owner: int, weights: dict[str, torch.Tensor]) -> None:
        """Make or map the copies of weights in an owner's memory."""
        host = self._host
        assert host is not None
        is_own = owner == host.rank
        places = dict(self._lay_out(owner, next(iter(weights.values())).element_size()))
        size = places.pop("")
        descriptor = os.memfd_create("frozen weights", os.MFD_CLOEXEC) if is_own else host.open(owner)
        if is_own:
            os.ftruncate(descriptor, size)
        memory = map_host_buffer(mmap.mmap(descriptor, size), counted=is_own)
        copies = [
            (weight, memory[places[name] :][: weight.nbytes].view(weight.dtype).view(weight.shape))
            for name, weight in weights.items()
        ]
        if is_own:
            self._fill([*self._copies, *copies])
            host.publish(descriptor)  # it stays open: others open it through this process
        else:
            os.close(descriptor)
        self._copies += copies

    def _lay_out(self, owner: int, item_size: int) -> Iterator[tuple[str, int]]:
        """Yield where an owner's memory has each weight, and its size under the name ""."""
        assert self._host is not None
        end = 0
        for name, tensor in self._frozen.items():
            if self._host.find_owner(tensor, owner) == owner:
                yield name, end
                end += -(-elements(shard(tensor, self._host.side, owner)) * item_size // ALIGNED) * ALIGNED
        yield "", end

    def fetch(self) -> None:
        """Copy frozen weights to the device, if they were stored."""
        if not self._stored:
            return
        with self._back.begin():
            for weight, copy in self._copies:
                weight.copy_(copy, non_blocking=True)
        self._back.join()
