"""Merging of a delivered LoRA adapter into the weights that an engine generates with.

Invariant: an adapted weight is the model's own weight plus the adapter's product, rounded once. So each delivery begins
with the model's own weights, which `FrozenCopies` brings back. Engines that generate need to know nothing of adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...backends.engine_protocols import Shard
from ...model.architecture import Model
from ...model.lora import list_adapted
from ...sharding.layout import Side, elements, shard


class AdapterMerge:
    """The adapter of one generation on one rank.

    - `shards`: the rank's boxes of the adapter's tensors, which resharding fills.
    - `adapted`: the names of the weights that the adapter changes.
    """

    def __init__(self, model: Model, side: Side, rank: int, dtype: torch.dtype, place: Any) -> None:
        self.shards: list[Shard] = []
        for tensor in model.weights:
            if tensor.role == "adapter" and elements(box := shard(tensor, side, rank)):
                local = torch.empty([stop - start for start, stop in box], dtype=dtype, device=place)
                self.shards.append(Shard(tensor.name, box, local))
        self._pairs = list_adapted(model)
        self._scale = model.lora.scale if model.lora else 0.0
        self.adapted = frozenset(pair.weight.name for pair in self._pairs)

    def merge(self, weights: Sequence[Shard]) -> None:
        """Add the adapter's products to weights of the model.

        The product of a weight is computed and added in float32: in bfloat16, small changes would be lost twice.
        """
        by_name = {part.name: part.tensor for part in (*weights, *self.shards)}
        with torch.no_grad():
            for weight, down, up in self._pairs:
                if (target := by_name.get(weight.name)) is not None and target.numel():
                    product = by_name[up].float() @ by_name[down].float()
                    target.copy_(target.float() + self._scale * product)
