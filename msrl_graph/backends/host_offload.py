"""What leaves a device for host memory: the contents of tensors, in host buffers while their storages are released.

Invariant: what comes back is what left, bit for bit, and to whoever holds a tensor it is the same tensor. Copies run on
streams of their own where the device has streams; on a host's cores a buffer is another tensor, and the storage is
given back all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .devices import Lane, TorchDevice, release, take

if TYPE_CHECKING:
    import torch


class HostOffload:
    """Tensors of a device, some of which may be parts of one storage. What they hold in between is `stored`, in buffers
    that stay once they are made; `drop` lets go of them."""

    def __init__(self, device: TorchDevice, tensors: Sequence[torch.Tensor]) -> None:
        self.device = device
        self.tensors = list(tensors)
        storages = {t.untyped_storage()._cdata: t for t in tensors}
        # An engine may keep a padded storage behind an uneven shard: it gets back what it had.
        self.storages = [(t, t.untyped_storage().nbytes()) for t in storages.values()]
        self.buffers: list[torch.Tensor] = []
        self.out = Lane(device)
        self.back = Lane(device)

    def store(self) -> None:
        """Begins device to host."""
        self.buffers = self.buffers or [self.device.host_buffer(t) for t in self.tensors]
        with self.out.begin():
            for tensor, buffer in zip(self.tensors, self.buffers, strict=True):
                buffer.copy_(tensor, non_blocking=True)

    def leave(self) -> None:
        """Releases the device's storages, once what was begun to be stored is; what was not is lost."""
        self.out.join()
        for tensor, _ in self.storages:
            release(tensor)

    def come(self) -> None:
        """Takes storages, and begins host to device."""
        self.take()
        self.fetch()

    def take(self) -> None:
        for tensor, size in self.storages:
            take(tensor, size)

    def fetch(self) -> None:
        with self.back.begin():
            for tensor, buffer in zip(self.tensors, self.buffers, strict=True):
                tensor.copy_(buffer, non_blocking=True)

    def arrive(self) -> None:
        """What is begun from here on finds the contents."""
        self.back.join()

    def drop(self) -> None:
        if self.device.kind.shares_host_memory:
            for buffer in self.buffers:
                release(buffer)
        self.buffers = []

    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        """The buffer of one of the tensors, with what was stored last."""
        self.device.finish()
        return next(b for t, b in zip(self.tensors, self.buffers, strict=True) if t is tensor)
