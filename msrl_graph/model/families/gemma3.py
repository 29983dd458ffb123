"""Gemma 3 (arXiv:2503.19786), its models of text.

A model that also reads images is published in another architecture; its part for text can be saved in this one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from msgspec import UNSET, UnsetType

from ..config_parts.windows import FULL, SLIDING, WindowRotaryConfig
from ..fields import Above, ConfigError, Size
from ..layers import DenseMlp, GroupedQueryAttention, Layer, group_layers
from .family import Family
from .gemma import FEATURES
from .gemma2 import NORMS, SandwichConfig


class Gemma3Config(SandwichConfig, WindowRotaryConfig, frozen=True, kw_only=True):
    rope_local_base_freq: Above | UnsetType = UNSET
    sliding_window_pattern: Size | UnsetType = UNSET
    period: ClassVar[int] = 6
    thetas: ClassVar[dict[str, float]] = {FULL: 1_000_000.0, SLIDING: 10_000.0}

    @property
    def full_period(self) -> int:
        return self.sliding_window_pattern or self.period

    @property
    def sliding_theta(self) -> float:
        return self.rope_local_base_freq or self.thetas[SLIDING]

    def find_errors(self) -> Iterator[ConfigError]:
        yield from super().find_errors()
        if self.attn_logit_softcapping is not UNSET and self.attn_logit_softcapping is not None:
            # transformers' class reads this field and ignores it
            yield ConfigError("has `attn_logit_softcapping`", "capped attention scores of Gemma 3")


def _layers(config: Gemma3Config) -> Iterator[Layer]:
    bias = bool(config.attention_bias)
    heads = (config.num_attention_heads, config.kv_heads, config.head_dim, bias, bias)
    mixers = (GroupedQueryAttention(*heads, head_norms=True, window=window) for window in config.windows)
    return group_layers(((mixer, DenseMlp(config.intermediate_size)) for mixer in mixers), NORMS)


FAMILY = Family("gemma3_text", "Gemma3ForCausalLM", Gemma3Config, _layers, FEATURES, positions=131072)
