"""Offload of tensors to host memory: their storages are released meanwhile.

Invariant: contents come back bit for bit, and references to a tensor stay valid. Copies run on streams of their own
where the device has streams. On host cores a buffer is another tensor, and the storage is released all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .devices import Lane, TorchDevice, allocate, release

if TYPE_CHECKING:
    import torch


class HostOffload:
    """Tensors of a device that can leave for host memory; several may share a storage.

    Between `leave` and `come` their contents are in host buffers (`stored`), which stay allocated until `drop`.
    """

    def __init__(self, device: TorchDevice, tensors: Sequence[torch.Tensor]) -> None:
        self.device = device
        self.tensors = list(tensors)
        storages = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
        # An engine may keep a padded storage behind an uneven shard: the full size is allocated again.
        self.storages = [(tensor, tensor.untyped_storage().nbytes()) for tensor in storages.values()]
        self.buffers: list[torch.Tensor] = []
        self.out = Lane(device)
        self.back = Lane(device)

    def store(self) -> None:
        """Start the copy from device to host."""
        self.buffers = self.buffers or [self.device.host_buffer(original) for original in self.tensors]
        with self.out.begin():
            for tensor, buffer in zip(self.tensors, self.buffers, strict=True):
                buffer.copy_(tensor, non_blocking=True)

    def leave(self) -> None:
        """Release the device's storages after the copies that have started.

        Contents that were not stored are lost.
        """
        self.out.join()
        for tensor, _ in self.storages:
            release(tensor)

    def come(self) -> None:
        """Allocate the storages, and start the copy from host to device."""
        self.take()
        self.fetch()

    def take(self) -> None:
        for tensor, size in self.storages:
            allocate(tensor, size)

    def fetch(self) -> None:
        with self.back.begin():
            for tensor, buffer in zip(self.tensors, self.buffers, strict=True):
                tensor.copy_(buffer, non_blocking=True)

    def arrive(self) -> None:
        """Make later operations wait for the contents."""
        self.back.join()

    def drop(self) -> None:
        if self.device.kind.shares_host_memory:
            for buffer in self.buffers:
                release(buffer)
        self.buffers = []

    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the buffer of one of the tensors, with its last stored contents."""
        self.device.finish()
        return next(buffer for candidate, buffer in zip(self.tensors, self.buffers, strict=True) if candidate is tensor)
