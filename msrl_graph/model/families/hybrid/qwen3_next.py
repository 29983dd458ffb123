"""Qwen3-Next: gated delta nets and attention in turn, with experts.

Source: https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct.

The modules for multi-token prediction are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from ...config_parts.delta_layers import DeltaExpertsConfig, list_layers, list_prediction_weights
from ...fields import Count, Flag, Size
from ...layers import DenseMlp, Layer
from ..family import Family


class Qwen3NextConfig(DeltaExpertsConfig, frozen=True, kw_only=True):
    norm_topk_prob: Flag | UnsetType = UNSET
    mlp_only_layers: Annotated[list[Count], Meta(description="a list of layers")] | UnsetType = UNSET
    decoder_sparse_step: Size | UnsetType = UNSET


def _layers(config: Qwen3NextConfig) -> Iterator[Layer]:
    dense = config.mlp_only_layers or []
    step = config.decoder_sparse_step or 1
    mlps = (
        DenseMlp(config.intermediate_size) if layer in dense or (layer + 1) % step else config.expert_mlp
        for layer in range(config.num_hidden_layers)
    )
    return list_layers(config, mlps)


FAMILY = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    Qwen3NextConfig,
    _layers,
    frozenset(("offset_norms",)),
    unused=list_prediction_weights,
)
