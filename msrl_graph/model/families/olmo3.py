"""OLMo 3 (arXiv:2512.13961): OLMo 2 with sliding windows in three of four layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from ..config_parts.windows import FULL, SLIDING, WindowRotaryConfig
from ..layers import DenseMlp, GroupedQueryAttention, Layer, group_layers
from .family import Family
from .olmo2 import NORMS

THETA = 500_000.0


class Olmo3Config(WindowRotaryConfig, frozen=True, kw_only=True):
    period: ClassVar[int] = 4
    thetas: ClassVar[dict[str, float]] = {FULL: THETA, SLIDING: THETA}


def _layers(config: Olmo3Config) -> Iterator[Layer]:
    bias = bool(config.attention_bias)
    heads = (config.num_attention_heads, config.kv_heads, config.size_of_head, bias, bias)
    mixers = (GroupedQueryAttention(*heads, head_norms=True, joint_norms=True, window=w) for w in config.windows)
    return group_layers(((mixer, DenseMlp(config.intermediate_size)) for mixer in mixers), NORMS)


FAMILY = Family("olmo3", "Olmo3ForCausalLM", Olmo3Config, _layers, positions=2048)
