"""The description of a chunk: consecutive layers of a model on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...model.architecture import Model


@dataclass(frozen=True)
class ChunkSpec:
    """What the module of consecutive layers is built from.

    - `layers`: the numbers of the layers. With `first`, the module includes the embedding; with `last`, it includes the
      last norm and the head.
    - `config`: Megatron's config for these layers. `groups`: Megatron's process groups. `place`: the torch device.
    - `hf_model`: the transformers model without weights. It provides the rotary angles, the attention scale, the biases
      that correct the routers' scores, and the padding token.
    """

    model: Model
    hf_model: Any
    config: Any
    layers: range
    first: bool
    last: bool
    groups: Any
    place: Any

    @property
    def hf_attention(self) -> Any:
        """The attention module of transformers."""
        return self.hf_model.model.layers[0].self_attn
