"""Granite 3 without experts (https://huggingface.co/ibm-granite).

Four constants scale a model's embedding, attention scores, residual branches and logits.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import UNSET, UnsetType

from ..fields import Above, Flag, ModelConfig
from ..layers import DenseMlp, GroupedQueryAttention, Layer
from .family import Family

SCALES = {
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logits_scale",
}


class GraniteConfig(ModelConfig, frozen=True, kw_only=True):
    mlp_bias: Flag | UnsetType = UNSET
    embedding_multiplier: Above = 1.0
    attention_multiplier: Above = 1.0
    residual_multiplier: Above = 1.0
    logits_scaling: Above = 1.0

    def list_features(self) -> Iterator[str]:
        plain = {"attention_multiplier": self.size_of_head**-0.5}
        return (feature for name, feature in SCALES.items() if getattr(self, name) != plain.get(name, 1.0))


def _layers(config: GraniteConfig) -> Iterator[Layer]:
    bias = bool(config.attention_bias)
    mixer = GroupedQueryAttention(config.num_attention_heads, config.kv_heads, config.size_of_head, bias, bias)
    yield Layer(mixer, DenseMlp(config.intermediate_size, bool(config.mlp_bias)), config.num_hidden_layers)


FAMILY = Family("granite", "GraniteForCausalLM", GraniteConfig, _layers, positions=2048)
