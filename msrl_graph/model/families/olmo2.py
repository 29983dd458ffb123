"""OLMo 2 (arXiv:2501.00656).

Norms follow attention and MLP instead of preceding them. Queries and keys are normalized over all heads together.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..fields import ModelConfig
from ..layers import DenseMlp, GroupedQueryAttention, Layer, LayerNorms
from .family import Family

NORMS = LayerNorms((), ("post_attention_layernorm", "post_feedforward_layernorm"))


class Olmo2Config(ModelConfig, frozen=True, kw_only=True):
    pass


def _layers(config: Olmo2Config) -> Iterator[Layer]:
    bias = bool(config.attention_bias)
    heads = (config.num_attention_heads, config.kv_heads, config.size_of_head, bias, bias)
    mixer = GroupedQueryAttention(*heads, head_norms=True, joint_norms=True)
    yield Layer(mixer, DenseMlp(config.intermediate_size), config.num_hidden_layers, NORMS)


FAMILY = Family("olmo2", "Olmo2ForCausalLM", Olmo2Config, _layers, positions=2048)
