"""Qwen2 and Qwen2.5 (arXiv:2412.15115)."""

from __future__ import annotations

from collections.abc import Iterator

from ..config_parts.windows import WindowConfig
from ..fields import Size
from ..layers import DenseMlp, GroupedQueryAttention, Layer, group_layers
from .family import Family


class Qwen2Config(WindowConfig, frozen=True, kw_only=True):
    num_key_value_heads: Size | None  # the default of transformers is that of its class, not of this model


def _layers(config: Qwen2Config) -> Iterator[Layer]:
    mlp = DenseMlp(config.intermediate_size)
    heads = (config.num_attention_heads, config.kv_heads, config.size_of_head)
    return group_layers((GroupedQueryAttention(*heads, qkv_bias=True, window=window), mlp) for window in config.windows)


FAMILY = Family("qwen2", "Qwen2ForCausalLM", Qwen2Config, _layers)
