"""Gemma 2 (arXiv:2408.00118)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from msgspec import UNSET, UnsetType

from ..config_parts.windows import AlternatingWindowConfig
from ..fields import Above, Act, ConfigError, Flag, Size, check_head_division
from ..layers import DenseMlp, GroupedQueryAttention, Layer, LayerNorms, group_layers
from .family import Family
from .gemma import FEATURES

NORMS = LayerNorms(
    ("input_layernorm", "pre_feedforward_layernorm"), ("post_attention_layernorm", "post_feedforward_layernorm")
)
CAP = 50.0  # transformers' default of `attn_logit_softcapping`
HEAD_CAP = 30.0  # transformers' default of `final_logit_softcapping`
SCALAR = 256  # transformers' default of `query_pre_attn_scalar`


class SandwichConfig(AlternatingWindowConfig, frozen=True, kw_only=True):
    """What Gemma 2 and Gemma 3 have in common."""

    # The defaults of transformers are those of its class, not of a model.
    num_key_value_heads: Size | None
    head_dim: Size
    tie_word_embeddings: Flag = True
    hidden_activation: Act | UnsetType = UNSET
    query_pre_attn_scalar: Size = SCALAR
    final_logit_softcapping: Above | UnsetType | None = UNSET
    attn_logit_softcapping: Above | UnsetType | None = UNSET
    use_bidirectional_attention: Flag | UnsetType = UNSET
    head_cap: ClassVar[float] = 0.0  # the cap of logits if the config states none

    def list_features(self) -> Iterator[str]:
        yield from super().list_features()
        if self.query_pre_attn_scalar != self.head_dim:
            yield "attention_scale"
        if self.head_cap if self.final_logit_softcapping is UNSET else self.final_logit_softcapping:
            yield "logits_cap"

    def find_errors(self) -> Iterator[ConfigError]:
        yield from check_head_division(self)  # transformers requires it even if `head_dim` is stated
        yield from super().find_errors()
        if self.use_bidirectional_attention:
            yield ConfigError("has `use_bidirectional_attention`", "attention to later tokens")


class Gemma2Config(SandwichConfig, frozen=True, kw_only=True):
    period: ClassVar[int] = 2
    head_cap: ClassVar[float] = HEAD_CAP

    @property
    def cap(self) -> float:
        """The cap of attention scores; 0 for none."""
        return CAP if self.attn_logit_softcapping is UNSET else self.attn_logit_softcapping or 0.0


def _layers(config: Gemma2Config) -> Iterator[Layer]:
    bias = bool(config.attention_bias)
    heads = (config.num_attention_heads, config.kv_heads, config.head_dim, bias, bias)
    mixers = (GroupedQueryAttention(*heads, window=window, cap=config.cap) for window in config.windows)
    return group_layers(((mixer, DenseMlp(config.intermediate_size)) for mixer in mixers), NORMS)


FAMILY = Family("gemma2", "Gemma2ForCausalLM", Gemma2Config, _layers, FEATURES, positions=8192)
