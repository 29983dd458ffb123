"""DeepSeek-V3 and R1 (arXiv:2412.19437), and models of this architecture.

These are Moonlight (arXiv:2502.16982) and Kimi K2 (arXiv:2507.20534).
The layer for multi-token prediction is left out.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import UNSET, UnsetType

from ..config_parts.grouped_router import GroupedRouterConfig, list_layers, list_prediction_weights
from ..fields import ConfigError, Flag, Size, check_rope, check_tokens
from ..layers import Layer, MultiHeadLatentAttention
from .family import Family


class DeepseekV3Config(GroupedRouterConfig, frozen=True, kw_only=True):
    num_key_value_heads: Size | None
    q_lora_rank: Size | None  # null: queries have no latent
    kv_lora_rank: Size
    qk_nope_head_dim: Size
    qk_rope_head_dim: Size
    v_head_dim: Size
    rope_interleave: Flag | UnsetType = UNSET

    def find_errors(self) -> Iterator[ConfigError]:
        if self.kv_heads != (heads := self.num_attention_heads):
            yield ConfigError(
                f"has {self.kv_heads:,} key-value heads: latent attention needs one for each of its {heads:,} heads"
            )
        if (rotated := self.qk_rope_head_dim) % 2:
            yield ConfigError(f"rotates {rotated:,} elements of a head, but rotary positions need pairs")
        yield from self.find_router_errors()
        yield from check_rope(self)
        yield from check_tokens(self)


def _layers(config: DeepseekV3Config) -> Iterator[Layer]:
    mixer = MultiHeadLatentAttention(
        config.num_attention_heads,
        config.q_lora_rank or 0,
        config.kv_lora_rank,
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.v_head_dim,
        bool(config.attention_bias),
    )
    return list_layers(config, mixer)


FAMILY = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    DeepseekV3Config,
    _layers,
    positions=4096,
    unused=list_prediction_weights,
    other_names=("kimi_k2",),
)
