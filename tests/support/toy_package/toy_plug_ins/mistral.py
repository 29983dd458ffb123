"""Mistral (arXiv:2310.06825), without sliding windows."""

from msgspec import UNSET, UnsetType

from msrl_graph.model.families import Family
from msrl_graph.model.fields import ConfigError, ModelConfig, Size
from msrl_graph.model.layers import DenseMlp, GroupedQueryAttention, Layer


class MistralConfig(ModelConfig, frozen=True, kw_only=True):
    sliding_window: Size | UnsetType | None = UNSET

    def find_errors(self):
        yield from super().find_errors()
        if self.sliding_window is UNSET or self.sliding_window:
            yield ConfigError("has sliding windows", "sliding windows of attention")


def _layers(config):
    mixer = GroupedQueryAttention(config.num_attention_heads, config.kv_heads, config.size_of_head)
    yield Layer(mixer, DenseMlp(config.intermediate_size), config.num_hidden_layers)


FAMILY = Family("mistral", "MistralForCausalLM", MistralConfig, _layers, positions=131072)
