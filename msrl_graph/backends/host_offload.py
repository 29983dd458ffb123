"""Offload of tensors to host memory, which frees the tensors' device memory.

Invariant: a tensor that was offloaded and copied back has the same bits as before, and references to the tensor stay
valid. If the device has streams, one stream is for copies to the host, and one stream is for copies back. On host cores
a host buffer is a second tensor in host memory, and the storage of the offloaded tensor is released as on other
devices.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from .devices import Lane, TorchDevice, allocate, release

if TYPE_CHECKING:
    import torch


class HostOffload:
    """Tensors of a device that can be moved to host memory and back.

    Several of the tensors may share a storage. From `leave` to `come` the contents are only in host buffers, which
    `stored` returns. The host buffers stay allocated until `drop`. Nothing changes the tensors whose indices are in
    `constant`: their host buffers are filled once, and are never dropped.
    """

    def __init__(self, device: TorchDevice, tensors: Sequence[torch.Tensor], constant: Collection[int] = ()) -> None:
        self.device = device
        self.constant = constant
        self._filled: dict[int, torch.Tensor] = {}  # host buffers of constant tensors
        self.tensors = list(tensors)
        storages = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
        # An engine may keep a padded storage behind an uneven shard: the full size is allocated again.
        self.storages = [(tensor, tensor.untyped_storage().nbytes()) for tensor in storages.values()]
        self.buffers: list[torch.Tensor] = []
        self.out = Lane(device)
        self.back = Lane(device)

    def store(self) -> None:
        """Start the copy of the tensors to host buffers."""
        self.buffers = self.buffers or [
            self._filled[i] if i in self._filled else self.device.host_buffer(original)
            for i, original in enumerate(self.tensors)
        ]
        with self.out.begin():
            for i, (tensor, buffer) in enumerate(zip(self.tensors, self.buffers, strict=True)):
                if i not in self._filled:
                    buffer.copy_(tensor, non_blocking=True)
        self._filled = {i: self.buffers[i] for i in self.constant}

    def leave(self) -> None:
        """Release the tensors' device memory after the copies to the host have finished.

        Contents that were not copied by `store` are lost.
        """
        self.out.join()
        for tensor, _ in self.storages:
            release(tensor)

    def come(self) -> None:
        """Allocate the tensors' device memory, and start the copy from the host buffers."""
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
        """Make later operations on the device wait for the copy from the host buffers."""
        self.back.join()

    def drop(self) -> None:
        if self.device.kind.shares_host_memory:
            for i, buffer in enumerate(self.buffers):
                if i not in self._filled:
                    release(buffer)
        self.buffers = []

    def forget_constant(self) -> None:
        """Fill the host buffers of constant tensors again at the next `store`.

        Called when the tensors have got other values.
        """
        self._filled = {}

    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the host buffer of `tensor`, with the contents that `store` copied last."""
        self.device.finish()
        return next(buffer for candidate, buffer in zip(self.tensors, self.buffers, strict=True) if candidate is tensor)
