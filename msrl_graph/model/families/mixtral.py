"""Mixtral (arXiv:2401.04088)."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import UNSET, UnsetType

from ..config_parts.windows import check_window
from ..fields import Above, ConfigError, Count, ModelConfig, Size
from ..layers import ExpertMlp, GroupedQueryAttention, Layer
from .family import Family


class MixtralConfig(ModelConfig, frozen=True, kw_only=True):
    num_key_value_heads: Size | None  # the default of transformers is that of its class, not of a model
    num_local_experts: Size
    num_experts_per_tok: Size
    sliding_window: Count | UnsetType | None = UNSET  # in all layers; absent or null: no window
    rope_theta: Above = 1_000_000.0

    def find_errors(self) -> Iterator[ConfigError]:
        yield from super().find_errors()
        if isinstance(self.sliding_window, int):
            yield from check_window(self.sliding_window)
        yield from check_active(self.num_experts_per_tok, self.num_local_experts)


def check_active(active: int, number: int) -> Iterator[ConfigError]:
    """Report more experts per token than there are."""
    if active > number:
        yield ConfigError(f"has {active:,} experts per token, but only {number:,} to choose from")


def _layers(config: MixtralConfig) -> Iterator[Layer]:
    heads = (config.num_attention_heads, config.kv_heads, config.size_of_head)
    mixer = GroupedQueryAttention(*heads, window=config.sliding_window or 0)
    experts = (config.num_local_experts, config.num_experts_per_tok, config.intermediate_size)
    yield Layer(mixer, ExpertMlp(*experts, block_sparse=True), config.num_hidden_layers)


FAMILY = Family("mixtral", "MixtralForCausalLM", MixtralConfig, _layers, positions=131072)
