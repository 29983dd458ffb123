"""Llama 3 (arXiv:2407.21783), and models of the same architecture."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import UNSET, UnsetType

from ..fields import ConfigError, Flag, ModelConfig, Size, check_head_division
from ..layers import DenseMlp, GroupedQueryAttention, Layer
from .family import Family


class LlamaConfig(ModelConfig, frozen=True, kw_only=True):
    mlp_bias: Flag | UnsetType = UNSET
    pretraining_tp: Size | UnsetType = UNSET

    def find_errors(self) -> Iterator[ConfigError]:
        yield from check_head_division(self)  # transformers requires it even if `head_dim` is stated
        yield from super().find_errors()


def _layers(config: LlamaConfig) -> Iterator[Layer]:
    bias = bool(config.attention_bias)
    mixer = GroupedQueryAttention(config.num_attention_heads, config.kv_heads, config.size_of_head, bias, bias)
    yield Layer(mixer, DenseMlp(config.intermediate_size, bool(config.mlp_bias)), config.num_hidden_layers)


FAMILY = Family("llama", "LlamaForCausalLM", LlamaConfig, _layers, positions=2048)
