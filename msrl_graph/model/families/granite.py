"""Granite 3 without experts (https://huggingface.co/ibm-granite).

Four constants scale a model's embedding, attention scores, residual branches and logits.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import UNSET, UnsetType

from ..config_parts.scales import ScaledConfig
from ..fields import Flag
from ..layers import DenseMlp, GroupedQueryAttention, Layer
from .family import Family


class GraniteConfig(ScaledConfig, frozen=True, kw_only=True):
    mlp_bias: Flag | UnsetType = UNSET


def _layers(config: GraniteConfig) -> Iterator[Layer]:
    bias = bool(config.attention_bias)
    mixer = GroupedQueryAttention(config.num_attention_heads, config.kv_heads, config.size_of_head, bias, bias)
    yield Layer(mixer, DenseMlp(config.intermediate_size, bool(config.mlp_bias)), config.num_hidden_layers)


FAMILY = Family("granite", "GraniteForCausalLM", GraniteConfig, _layers, positions=2048)
