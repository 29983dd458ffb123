"""GLM-4.5 (arXiv:2508.06471) and GLM-4.6.

The layer for multi-token prediction is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from msgspec import UNSET, UnsetType

from ..config_parts.grouped_router import GroupedRouterConfig, list_layers, list_prediction_weights
from ..config_parts.partial_rotary import FIELD, Part, check_part, complete_part, list_part_features
from ..fields import ConfigError, Flag, Size
from ..layers import GroupedQueryAttention, Layer
from .family import Family


class Glm4MoeConfig(GroupedRouterConfig, frozen=True, kw_only=True):
    num_key_value_heads: Size | None  # the default of transformers is that of its class, not of a model
    use_qk_norm: Flag | UnsetType = UNSET
    partial_rotary_factor: Part | UnsetType = UNSET
    rope_fields: ClassVar[tuple[str, ...]] = (FIELD,)

    @property
    def rope(self) -> dict[str, Any]:
        return complete_part(super().rope, self.partial_rotary_factor, 0.5)

    def list_features(self) -> Iterator[str]:
        return list_part_features(self)

    def find_rope_errors(self) -> Iterator[ConfigError]:
        yield from super().find_rope_errors()
        yield from check_part(self)

    def find_errors(self) -> Iterator[ConfigError]:
        yield from super().find_errors()
        yield from self.find_router_errors()


def _layers(config: Glm4MoeConfig) -> Iterator[Layer]:
    heads = (config.num_attention_heads, config.kv_heads, config.size_of_head)
    bias = bool(config.attention_bias)
    return list_layers(config, GroupedQueryAttention(*heads, qkv_bias=bias, head_norms=bool(config.use_qk_norm)))


FAMILY = Family(
    "glm4_moe", "Glm4MoeForCausalLM", Glm4MoeConfig, _layers, positions=131072, unused=list_prediction_weights
)
