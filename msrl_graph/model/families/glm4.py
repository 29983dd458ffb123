"""GLM-4-0414: GLM-4 with norms of outputs, too.

Source: https://huggingface.co/zai-org/GLM-4-9B-0414.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..layers import BEFORE, Layer, LayerNorms
from .family import Family
from .glm import FEATURES, GlmConfig, list_layers

NORMS = LayerNorms(BEFORE.before, ("post_self_attn_layernorm", "post_mlp_layernorm"))


def _layers(config: GlmConfig) -> Iterator[Layer]:
    return list_layers(config, NORMS)


FAMILY = Family("glm4", "Glm4ForCausalLM", GlmConfig, _layers, FEATURES, positions=131072)
