"""gpt-oss (arXiv:2508.10925)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from msgspec import UNSET, UnsetType

from ..config_parts.windows import AlternatingWindowConfig
from ..fields import Above, ConfigError, Size, complete_rope
from ..layers import ClampedExpertMlp, GroupedQueryAttention, Layer, group_layers
from .family import Family
from .mixtral import check_active

# Transformers' defaults.
WINDOW = 128
ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class GptOssConfig(AlternatingWindowConfig, frozen=True, kw_only=True):
    # The defaults of transformers are those of its class, not of a model.
    num_key_value_heads: Size | None
    head_dim: Size
    num_local_experts: Size
    num_experts_per_tok: Size
    swiglu_alpha: Above | UnsetType = UNSET
    swiglu_limit: Above | UnsetType = UNSET
    rope_theta: Above = 150_000.0
    period: ClassVar[int] = 2

    @property
    def window(self) -> int | UnsetType:
        return WINDOW if self.sliding_window is UNSET else super().window

    @property
    def rope(self) -> dict[str, Any]:
        return complete_rope(self.rope_parameters or self.rope_scaling or ROPE, self.rope_theta)

    def find_errors(self) -> Iterator[ConfigError]:
        yield from super().find_errors()
        yield from check_active(self.num_experts_per_tok, self.num_local_experts)


def _layers(config: GptOssConfig) -> Iterator[Layer]:
    heads = (config.num_attention_heads, config.kv_heads, config.head_dim)
    bias = config.attention_bias is not False  # transformers' default is true
    mixers = (
        GroupedQueryAttention(*heads, qkv_bias=bias, output_bias=bias, window=window, sinks=True)
        for window in config.windows
    )
    experts = ClampedExpertMlp(config.num_local_experts, config.num_experts_per_tok, config.intermediate_size)
    return group_layers((mixer, experts) for mixer in mixers)


FAMILY = Family("gpt_oss", "GptOssForCausalLM", GptOssConfig, _layers, positions=131072)
