"""Qwen3.5: gated delta nets and attention in turn, with and without experts.

Source: https://huggingface.co/Qwen/Qwen3.5-27B and https://huggingface.co/Qwen/Qwen3.5-35B-A3B.

Published models have images, too. Only their text part is read. The modules for multi-token prediction are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import ClassVar

from ...config_parts.delta_layers import DeltaExpertsConfig, DeltaLayersConfig, list_layers, list_prediction_weights
from ...fields import Size
from ...layers import DenseMlp, Layer
from ..family import Family

# Positions of images, which have three coordinates. Those of text are equal.
IMAGE_POSITIONS = ("mrope_section", "mrope_interleaved")


class Qwen35Config(DeltaLayersConfig, frozen=True, kw_only=True):
    split: ClassVar[bool] = True
    rope_fields: ClassVar[tuple[str, ...]] = (*DeltaLayersConfig.rope_fields, *IMAGE_POSITIONS)


class Qwen35MoeConfig(DeltaExpertsConfig, frozen=True, kw_only=True):
    intermediate_size: Size = 0  # all layers have experts
    split: ClassVar[bool] = True
    rope_fields: ClassVar[tuple[str, ...]] = Qwen35Config.rope_fields


def _layers(config: Qwen35Config) -> Iterator[Layer]:
    return list_layers(config, repeat(DenseMlp(config.intermediate_size), config.num_hidden_layers))


def _expert_layers(config: Qwen35MoeConfig) -> Iterator[Layer]:
    return list_layers(config, repeat(config.expert_mlp, config.num_hidden_layers))


FEATURES = frozenset(("offset_norms",))
FAMILY = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    Qwen35Config,
    _layers,
    FEATURES,
    unused=list_prediction_weights,
    multimodal="qwen3_5",
)
MOE_FAMILY = Family(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    Qwen35MoeConfig,
    _expert_layers,
    FEATURES,
    unused=list_prediction_weights,
    multimodal="qwen3_5_moe",
)
