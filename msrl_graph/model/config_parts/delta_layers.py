"""Gated delta nets and attention in turn, as configs of Qwen models state them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from msgspec import UNSET, UnsetType

from ..fields import ConfigError, Flag, Names, Size, format_value
from ..layers import ExpertMlp, GatedDeltaNet, GroupedQueryAttention, Layer, Mixer, Mlp, group_layers
from .partial_rotary import PartialRotaryConfig
from .windows import FULL

LINEAR = "linear_attention"
INTERVAL = 4  # transformers' default of `full_attention_interval`


class DeltaLayersConfig(PartialRotaryConfig, frozen=True, kw_only=True):
    # The defaults of transformers are those of its class, not of a model.
    num_key_value_heads: Size | None
    head_dim: Size
    linear_conv_kernel_dim: Size
    linear_key_head_dim: Size
    linear_value_head_dim: Size
    linear_num_key_heads: Size
    linear_num_value_heads: Size
    layer_types: Names | UnsetType = UNSET
    full_attention_interval: Size | UnsetType = UNSET
    attn_output_gate: Flag | UnsetType = UNSET
    whole: ClassVar[float] = 0.25
    split: ClassVar[bool] = False  # of the projections of a delta net

    @property
    def kinds(self) -> list[str]:
        """The kind of each layer."""
        if self.layer_types:
            return self.layer_types
        interval = self.full_attention_interval or INTERVAL
        return [LINEAR if (layer + 1) % interval else FULL for layer in range(self.num_hidden_layers)]

    @property
    def mixers(self) -> Iterator[Mixer]:
        """The mixer of each layer."""
        bias = bool(self.attention_bias)
        heads = (self.num_attention_heads, self.kv_heads, self.head_dim)
        attention = GroupedQueryAttention(*heads, bias, bias, head_norms=True, output_gate=True)
        delta = GatedDeltaNet(
            self.linear_num_key_heads,
            self.linear_num_value_heads,
            self.linear_key_head_dim,
            self.linear_value_head_dim,
            self.linear_conv_kernel_dim,
            self.split,
        )
        return (attention if kind == FULL else delta for kind in self.kinds)

    def find_errors(self) -> Iterator[ConfigError]:
        yield from super().find_errors()
        layers = self.num_hidden_layers
        keys = self.linear_num_key_heads
        if len(self.kinds) != layers:
            yield ConfigError(f"has {len(self.kinds):,} `layer_types` for {layers:,} layers")
        elif other := [kind for kind in self.kinds if kind not in (FULL, LINEAR)]:
            message = f"has layers of {format_value(other[0])}: only `{FULL}` and `{LINEAR}` are supported yet"
            yield ConfigError(message, f"layers of `{other[0]}`")
        elif FULL not in self.kinds:
            yield ConfigError(f"has no layer of `{FULL}`", "models without attention")
        if self.linear_num_value_heads % keys:
            values = f"{self.linear_num_value_heads:,} `linear_num_value_heads`"
            yield ConfigError(f"has {keys:,} `linear_num_key_heads`, which do not divide its {values}")
        if self.attn_output_gate is False:
            yield ConfigError("has no `attn_output_gate`", "attention of this family without output gates")


class DeltaExpertsConfig(DeltaLayersConfig, frozen=True, kw_only=True):
    """Layers with experts, of which a shared one has a gate."""

    num_experts: Size
    num_experts_per_tok: Size
    moe_intermediate_size: Size
    shared_expert_intermediate_size: Size

    @property
    def expert_mlp(self) -> ExpertMlp:
        experts = (self.num_experts, self.num_experts_per_tok, self.moe_intermediate_size)
        return ExpertMlp(*experts, self.shared_expert_intermediate_size, shared_gate=True)

    def find_errors(self) -> Iterator[ConfigError]:
        yield from super().find_errors()
        if (active := self.num_experts_per_tok) > self.num_experts:
            yield ConfigError(f"has {active:,} experts per token, but only {self.num_experts:,} experts")


def list_layers(config: DeltaLayersConfig, mlps: Iterable[Mlp]) -> Iterator[Layer]:
    """Yield the layers, with the MLP of each."""
    return group_layers(zip(config.mixers, mlps, strict=True))


def list_prediction_weights(layers: int) -> tuple[str, ...]:
    """Return how the names of the modules for multi-token prediction begin.

    No engine reads them.
    """
    return ("mtp.",)
