"""Helium (Kyutai), of which each layer is as one of Llama; pairs of neighbors are rotated."""

from msrl_graph.model.families import Family
from msrl_graph.model.fields import ModelConfig, Size
from msrl_graph.model.layers import DenseMlp, GroupedQueryAttention, Layer


class HeliumConfig(ModelConfig, frozen=True, kw_only=True):
    head_dim: Size


def _layers(config):
    mixer = GroupedQueryAttention(config.num_attention_heads, config.kv_heads, config.head_dim)
    yield Layer(mixer, DenseMlp(config.intermediate_size), config.num_hidden_layers)


FAMILY = Family("helium", "HeliumForCausalLM", HeliumConfig, _layers, positions=4096)
