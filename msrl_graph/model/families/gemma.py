"""Gemma (arXiv:2403.08295)."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import UNSET, UnsetType

from ..fields import Act, ConfigError, Flag, ModelConfig, Size
from ..layers import DenseMlp, GroupedQueryAttention, Layer
from .family import Family


class GemmaConfig(ModelConfig, frozen=True, kw_only=True):
    # The defaults of transformers are those of its class, not of a model.
    num_key_value_heads: Size | None
    head_dim: Size
    hidden_act: Act
    tie_word_embeddings: Flag = True
    use_bidirectional_attention: Flag | UnsetType = UNSET

    def find_errors(self) -> Iterator[ConfigError]:
        yield from super().find_errors()
        if self.use_bidirectional_attention:
            yield ConfigError("has `use_bidirectional_attention`", "attention to later tokens")


def _layers(config: GemmaConfig) -> Iterator[Layer]:
    bias = bool(config.attention_bias)
    mixer = GroupedQueryAttention(config.num_attention_heads, config.kv_heads, config.head_dim, bias, bias)
    yield Layer(mixer, DenseMlp(config.intermediate_size), config.num_hidden_layers)


FEATURES = frozenset(("embedding_scale", "offset_norms"))
FAMILY = Family("gemma", "GemmaForCausalLM", GemmaConfig, _layers, FEATURES, positions=8192)
