"""SmolLM3, whose every fourth layer has no rotary positions.

Source: https://huggingface.co/HuggingFaceTB/SmolLM3-3B.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from ..config_parts.windows import WindowConfig
from ..fields import Above, ConfigError, Flag, Size
from ..layers import DenseMlp, GroupedQueryAttention, Layer, group_layers
from .family import Family

# For each layer, 1 if it has rotary positions.
Rotates = Annotated[list[Annotated[int, Meta(ge=0, le=1)]], Meta(description="a list of 0 and 1")]
INTERVAL = 4  # transformers' default of `no_rope_layer_interval`


class SmolLM3Config(WindowConfig, frozen=True, kw_only=True):
    # The defaults of transformers are those of its class, not of a model.
    num_key_value_heads: Size | None
    tie_word_embeddings: Flag = True
    mlp_bias: Flag | UnsetType = UNSET
    rope_theta: Above = 2_000_000.0
    no_rope_layers: Rotates | UnsetType = UNSET
    no_rope_layer_interval: Size | UnsetType = UNSET

    @property
    def rotates(self) -> list[bool]:
        """Whether each layer has rotary positions."""
        if self.no_rope_layers is not UNSET:
            return [bool(stated) for stated in self.no_rope_layers[: self.num_hidden_layers]]
        interval = self.no_rope_layer_interval or INTERVAL
        return [(layer + 1) % interval != 0 for layer in range(self.num_hidden_layers)]

    @property
    def slides(self) -> list[bool]:
        if self.layer_types:
            return super().slides
        windows = bool(self.use_sliding_window) and self.sliding_window is not UNSET
        return [windows and not rotates for rotates in self.rotates]

    def find_errors(self) -> Iterator[ConfigError]:
        if len(self.rotates) < self.num_hidden_layers:
            yield ConfigError(f"has {len(self.rotates):,} `no_rope_layers` for {self.num_hidden_layers:,} layers")
            return
        yield from super().find_errors()


def _layers(config: SmolLM3Config) -> Iterator[Layer]:
    bias = bool(config.attention_bias)
    heads = (config.num_attention_heads, config.kv_heads, config.size_of_head, bias, bias)
    mixers = (
        GroupedQueryAttention(*heads, window=window, no_rope=not rotates)
        for window, rotates in zip(config.windows, config.rotates, strict=True)
    )
    return group_layers((mixer, DenseMlp(config.intermediate_size, bool(config.mlp_bias))) for mixer in mixers)


FAMILY = Family("smollm3", "SmolLM3ForCausalLM", SmolLM3Config, _layers)
