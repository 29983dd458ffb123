"""Seed-OSS (https://github.com/ByteDance-Seed/seed-oss).

By default, queries, keys and values have biases.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import UNSET, UnsetType

from ..fields import Flag, ModelConfig, Size
from ..layers import DenseMlp, GroupedQueryAttention, Layer
from .family import Family


class SeedOssConfig(ModelConfig, frozen=True, kw_only=True):
    # The defaults of transformers are those of its class, not of a model.
    num_key_value_heads: Size | None
    head_dim: Size
    attention_out_bias: Flag | UnsetType = UNSET
    mlp_bias: Flag | UnsetType = UNSET

    @property
    def has_qkv_bias(self) -> bool:
        return self.attention_bias is not False  # transformers' default is true


def _layers(config: SeedOssConfig) -> Iterator[Layer]:
    heads = (config.num_attention_heads, config.kv_heads, config.head_dim)
    mixer = GroupedQueryAttention(*heads, config.has_qkv_bias, bool(config.attention_out_bias))
    yield Layer(mixer, DenseMlp(config.intermediate_size, bool(config.mlp_bias)), config.num_hidden_layers)


FAMILY = Family("seed_oss", "SeedOssForCausalLM", SeedOssConfig, _layers, positions=524288)
