"""Merging of a delivered adapter into the weights that an engine generates with.

Invariant: an adapted weight is the model's own weight plus the adapter's product, rounded once. So each delivery begins
with the model's own weights, which `FrozenCopies` brings back. Engines that generate need to know nothing of adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...backends import devices
from ...backends.adapters import merge_adapter
from ...backends.engine_protocols import Shard
from ...model.architecture import Model
from ...model.lora import list_adapted
from ...sharding.layout import Side, elements, shard


class AdapterMerge:
    """The adapter of one generation on one rank.

    - `shards`: the rank's boxes of the adapter's tensors, which resharding fills. They have memory only between
      `allocate` and `release`, like the weights of the engine.
    - `adapted`: the names of the weights that the adapter changes.
    """

    def __init__(self, model: Model, side: Side, rank: int, dtype: torch.dtype, place: Any) -> None:
        self.shards: list[Shard] = []
        for tensor in model.weights:
            if tensor.role == "adapter" and elements(box := shard(tensor, side, rank)):
                local = torch.empty([stop - start for start, stop in box], dtype=dtype, device=place)
                devices.release(local)
                self.shards.append(Shard(tensor.name, box, local))
        self._model = model
        self.adapted = frozenset(pair.weight.name for pair in list_adapted(model))

    def allocate(self) -> list[Shard]:
        """Give the adapter's tensors memory, and return them."""
        for part in self.shards:
            devices.allocate(part.tensor)
        return self.shards

    def release(self) -> None:
        """Release the memory of the adapter's tensors."""
        for part in self.shards:
            devices.release(part.tensor)

    def merge(self, weights: Sequence[Shard]) -> None:
        """Add the adapter's products to weights of the model."""
        merge_adapter(self._model, {part.name: part.tensor for part in (*weights, *self.shards)})
