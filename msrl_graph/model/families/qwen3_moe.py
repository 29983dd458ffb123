"""Qwen3 with experts (arXiv:2505.09388)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from ..config_parts.windows import SLIDING
from ..fields import ConfigError, Count, Flag, Size
from ..layers import DenseMlp, ExpertMlp, Layer, group_layers
from .family import Family
from .qwen3 import Qwen3Config


class Qwen3MoeConfig(Qwen3Config, frozen=True, kw_only=True):
    num_experts: Size | UnsetType = UNSET
    num_local_experts: Size | UnsetType = UNSET  # transformers' name for what published models call `num_experts`
    num_experts_per_tok: Size
    moe_intermediate_size: Size
    norm_topk_prob: Flag | UnsetType = UNSET
    mlp_only_layers: Annotated[list[Count], Meta(description="a list of layers")] | UnsetType = UNSET
    decoder_sparse_step: Size | UnsetType = UNSET

    @property
    def slides(self) -> list[bool]:
        # Transformers' classes of this family have a window in all layers or in none.
        return [bool(self.use_sliding_window)] * self.num_hidden_layers

    def find_errors(self) -> Iterator[ConfigError]:
        yield from super().find_errors()
        if self.layer_types and [kind == SLIDING for kind in self.layer_types] != self.slides:
            yield ConfigError("has `layer_types` that differ from its `use_sliding_window`")
        if not (self.num_experts or self.num_local_experts):
            yield ConfigError("has no `num_experts`")


def _layers(config: Qwen3MoeConfig) -> Iterator[Layer]:
    number = config.num_experts or config.num_local_experts
    assert isinstance(number, int)
    experts = ExpertMlp(number, config.num_experts_per_tok, config.moe_intermediate_size)
    dense = config.mlp_only_layers or []
    step = config.decoder_sparse_step or 1
    mlps = (
        DenseMlp(config.intermediate_size) if layer in dense or (layer + 1) % step else experts
        for layer in range(config.num_hidden_layers)
    )
    return group_layers(zip(config.mixers, mlps, strict=True))


FAMILY = Family("qwen3_moe", "Qwen3MoeForCausalLM", Qwen3MoeConfig, _layers)
