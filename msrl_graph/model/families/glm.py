"""GLM-4 as it was first published (arXiv:2406.12793)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from ..config_parts.partial_rotary import PartialRotaryConfig
from ..fields import Size
from ..layers import BEFORE, DenseMlp, GroupedQueryAttention, Layer, LayerNorms
from .family import Family


class GlmConfig(PartialRotaryConfig, frozen=True, kw_only=True):
    # The defaults of transformers are those of its class, not of a model.
    num_key_value_heads: Size | None
    head_dim: Size
    whole: ClassVar[float] = 0.5


def list_layers(config: GlmConfig, norms: LayerNorms = BEFORE) -> Iterator[Layer]:
    heads = (config.num_attention_heads, config.kv_heads, config.head_dim)
    mixer = GroupedQueryAttention(*heads, qkv_bias=config.attention_bias is not False)  # transformers' default is true
    yield Layer(mixer, DenseMlp(config.intermediate_size, fused=True), config.num_hidden_layers, norms)


FEATURES = frozenset(("rope_interleaved",))
FAMILY = Family("glm", "GlmForCausalLM", GlmConfig, list_layers, FEATURES, positions=131072)
