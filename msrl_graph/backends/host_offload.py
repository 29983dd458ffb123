"""Offload of tensors to host memory; their device memory is released meanwhile.

Invariant: contents return bit for bit, and references to a tensor stay valid. Where the device has streams, copies run
on streams of their own. On host cores a host buffer is another tensor, and the storage of the offloaded tensor is
released too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .devices import Lane, TorchDevice, allocate, release

if TYPE_CHECKING:
    import torch


class HostOffload:
    """Tensors of a device that can be moved to host memory and back.

    Several of the tensors may share a storage. Between `leave` and `come` the contents are in host buffers (`stored`).
    The buffers stay allocated until `drop`.
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
        """Release the device's storages after the copies to the host have finished.

        Contents that were not copied by `store` are lost.
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
        """Make later operations on the device wait for the copy from the host."""
        self.back.join()

    def drop(self) -> None:
        if self.device.kind.shares_host_memory:
            for buffer in self.buffers:
                release(buffer)
        self.buffers = []

    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor's host buffer, with the contents of the last `store`."""
        self.device.finish()
        return next(buffer for candidate, buffer in zip(self.tensors, self.buffers, strict=True) if candidate is tensor)
