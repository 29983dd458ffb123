"""Host copies of the frozen weights that a rank generates with.

Invariant: the first resharding delivers frozen weights like all others. Later ones leave them out: each time the
generation's weights get memory again, the frozen ones are copied from host memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...backends.devices import TorchDevice
from ...backends.engine_protocols import Shard
from ...backends.host_offload import HostOffload
from ...model.architecture import Model


class FrozenCopies:
    """The frozen weights of one generation on one rank."""

    def __init__(self, device: TorchDevice, model: Model) -> None:
        self.device = device
        self.names = model.frozen_names
        self._copies: HostOffload | None = None

    def store(self, shards: Sequence[Shard]) -> None:
        """Copy frozen weights to host memory, unless this was done before.

        Called with the weights that the resharding delivered, before the engine converts them.
        """
        if self._copies is None:
            self._copies = HostOffload(self.device, [shard.tensor for shard in shards if shard.name in self.names])
            self._copies.store()
            self.device.finish()

    def fetch(self) -> None:
        """Copy frozen weights to the device, if they were stored."""
        if self._copies is not None:
            self._copies.fetch()
            self._copies.arrive()
