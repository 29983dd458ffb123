"""Qwen3 without experts (arXiv:2505.09388)."""

from __future__ import annotations

from collections.abc import Iterator

from ..config_parts.windows import WindowConfig
from ..fields import Size
from ..layers import DenseMlp, GroupedQueryAttention, Layer, group_layers
from .family import Family


class Qwen3Config(WindowConfig, frozen=True, kw_only=True):
    # The defaults of transformers are those of its class, not of a model.
    num_key_value_heads: Size | None
    head_dim: Size

    @property
    def mixers(self) -> Iterator[GroupedQueryAttention]:
        """The attention of each layer."""
        bias = bool(self.attention_bias)
        heads = (self.num_attention_heads, self.kv_heads, self.head_dim)
        return (GroupedQueryAttention(*heads, bias, bias, head_norms=True, window=window) for window in self.windows)


def _layers(config: Qwen3Config) -> Iterator[Layer]:
    return group_layers((mixer, DenseMlp(config.intermediate_size)) for mixer in config.mixers)


FAMILY = Family("qwen3", "Qwen3ForCausalLM", Qwen3Config, _layers)
