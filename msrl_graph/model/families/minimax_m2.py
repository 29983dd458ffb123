"""MiniMax-M2 and its successors with the same architecture.

Source: https://huggingface.co/MiniMaxAI/MiniMax-M2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import UNSET, UnsetType

from ..config_parts.partial_rotary import FIELD, PartialRotaryConfig
from ..fields import Above, ConfigError, Size, format_value
from ..layers import ExpertMlp, GroupedQueryAttention, Layer
from .family import Family
from .mixtral import check_active

# Fields that no engine reads, because the family has one kind of router and of norms only.
FIXED: dict[str, object] = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0,
}


class MiniMaxM2Config(PartialRotaryConfig, frozen=True, kw_only=True):
    # The defaults of transformers are those of its class, not of a model.
    num_key_value_heads: Size | None
    head_dim: Size
    num_local_experts: Size
    num_experts_per_tok: Size
    rotary_dim: Size | UnsetType = UNSET  # what published configs have in place of `partial_rotary_factor`
    rope_theta: Above = 5_000_000.0
    scoring_func: object = UNSET
    use_routing_bias: object = UNSET
    use_qk_norm: object = UNSET
    qk_norm_type: object = UNSET
    shared_intermediate_size: object = UNSET

    @property
    def rope(self) -> dict[str, Any]:
        table = super().rope
        stated = (self.rope_parameters or self.rope_scaling or {}).get(FIELD) or self.partial_rotary_factor
        return {**table, FIELD: self.rotary_dim / self.head_dim} if self.rotary_dim and not stated else table

    def find_errors(self) -> Iterator[ConfigError]:
        yield from super().find_errors()
        yield from check_active(self.num_experts_per_tok, self.num_local_experts)
        for name, only in FIXED.items():
            if (value := getattr(self, name)) not in (UNSET, only):
                message = f"has {format_value(value)} for `{name}`: only {format_value(only)} is supported yet"
                yield ConfigError(message, f"models of this family with another `{name}`")


def _layers(config: MiniMaxM2Config) -> Iterator[Layer]:
    heads = (config.num_attention_heads, config.kv_heads, config.head_dim)
    mixer = GroupedQueryAttention(*heads, head_norms=True, joint_norms=True)
    experts = (config.num_local_experts, config.num_experts_per_tok, config.intermediate_size)
    yield Layer(mixer, ExpertMlp(*experts, router="sigmoid", block_sparse=True), config.num_hidden_layers)


FAMILY = Family(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    MiniMaxM2Config,
    _layers,
    positions=196608,
    other_names=("minimax",),
)
