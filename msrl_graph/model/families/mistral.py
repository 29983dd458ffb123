"""Mistral (arXiv:2310.06825), whose layers all have a sliding window, or none."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import UNSET, UnsetType

from ..config_parts.windows import check_window
from ..fields import ConfigError, Count, ModelConfig, Size
from ..layers import DenseMlp, GroupedQueryAttention, Layer
from .family import Family

WINDOW = 4096  # transformers' default


class MistralConfig(ModelConfig, frozen=True, kw_only=True):
    num_key_value_heads: Size | None  # the default of transformers is that of its class, not of a model
    sliding_window: Count | UnsetType | None = UNSET  # null: no window

    @property
    def window(self) -> int | None:
        return WINDOW if self.sliding_window is UNSET else self.sliding_window

    def find_errors(self) -> Iterator[ConfigError]:
        yield from super().find_errors()
        if self.window is not None:
            yield from check_window(self.window)


def _layers(config: MistralConfig) -> Iterator[Layer]:
    heads = (config.num_attention_heads, config.kv_heads, config.size_of_head)
    mixer = GroupedQueryAttention(*heads, window=config.window or 0)
    yield Layer(mixer, DenseMlp(config.intermediate_size), config.num_hidden_layers)


FAMILY = Family("mistral", "MistralForCausalLM", MistralConfig, _layers, positions=131072)
