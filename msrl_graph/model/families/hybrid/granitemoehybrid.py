"""Granite 4 (https://huggingface.co/ibm-granite).

Models have Mamba-2 layers or only attention, and experts or only dense MLPs. An MLP that all tokens share stands next
to the experts. The four constants of Granite 3 scale these models, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from msgspec import UNSET, UnsetType

from ...config_parts.mamba import ATTENTION, MAMBA, check_kinds, check_mamba, rename_kinds
from ...config_parts.scales import ScaledConfig
from ...fields import Config, ConfigError, Count, Flag, Names, Size, format_value
from ...layers import DenseMlp, ExpertMlp, GroupedQueryAttention, Layer, Mamba2, Mixer, Mlp, group_layers
from ..family import Family
from ..mixtral import check_active

AUTO = "auto"
UNLIMITED = ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}])  # in published files, and as transformers writes it


class GraniteMoeHybridConfig(ScaledConfig, frozen=True, kw_only=True):
    layer_types: Names | UnsetType = UNSET  # absent: Mamba-2 only
    position_embedding_type: str | UnsetType = UNSET
    shared_intermediate_size: Size
    # The defaults of transformers are those of its class, not of a model.
    num_local_experts: Count
    num_experts_per_tok: Count
    mamba_n_heads: Size = 128
    mamba_n_groups: Size = 1
    mamba_d_state: Size = 256
    mamba_d_head: Size | Literal["auto"] = "auto"
    mamba_d_conv: Size = 4
    mamba_expand: Size = 2
    mamba_chunk_size: Size = 256
    mamba_conv_bias: Flag = True
    mamba_proj_bias: Flag = False
    time_step_limit: object = UNSET

    @classmethod
    def complete(cls, config: Config) -> Config:
        kinds = config.get("layer_types") or config.get("layers_block_type")
        more: dict[str, Any] = {"layer_types": rename_kinds(kinds)} if isinstance(kinds, list) else {}
        if config.get("time_step_limit") in UNLIMITED:  # transformers cannot read what it writes
            more["time_step_limit"] = None
        return {**config, **more}

    @property
    def kinds(self) -> list[str]:
        """The kind of each layer."""
        return self.layer_types or [MAMBA] * self.num_hidden_layers

    @property
    def mamba_width(self) -> int:
        return self.mamba_expand * self.hidden_size

    @property
    def rotates(self) -> bool:
        """Whether queries and keys have rotary positions."""
        return self.position_embedding_type == "rope"

    def find_errors(self) -> Iterator[ConfigError]:
        yield from super().find_errors()
        yield from check_kinds("layer_types", self.kinds, self.num_hidden_layers, (MAMBA, ATTENTION))
        if self.position_embedding_type not in (UNSET, "rope", "nope"):
            value = format_value(self.position_embedding_type)
            yield ConfigError(f"has {value} for `position_embedding_type`, which must be `rope`, `nope` or null")
        if MAMBA in self.kinds:
            yield from self._find_mamba_errors()
        if self.num_local_experts:
            yield from check_active(self.num_experts_per_tok, self.num_local_experts)
            if not self.num_experts_per_tok:
                yield ConfigError("has experts, but 0 for `num_experts_per_tok`")

    def _find_mamba_errors(self) -> Iterator[ConfigError]:
        heads = self.mamba_n_heads
        size = self.mamba_d_head
        if self.mamba_width % heads or size not in (AUTO, self.mamba_width // heads):
            sized = f"{heads:,} Mamba-2 heads" if size == AUTO else f"{heads:,} Mamba-2 heads of {size:,} elements"
            yield ConfigError(f"has {sized}, which do not make {self.mamba_expand:,} x {self.hidden_size:,} elements")
        yield from check_mamba(heads, self.mamba_n_groups, "mamba_proj_bias", self.mamba_proj_bias)
        if self.time_step_limit is not UNSET:
            message = f"has {format_value(self.time_step_limit)} for `time_step_limit`: only no limit is supported yet"
            yield ConfigError(message, "limits of the time steps of Mamba-2 layers")


def _layers(config: GraniteMoeHybridConfig) -> Iterator[Layer]:
    bias = bool(config.attention_bias)
    heads = (config.num_attention_heads, config.kv_heads, config.size_of_head)
    attention = GroupedQueryAttention(*heads, bias, bias, no_rope=not config.rotates)
    mamba = Mamba2(
        config.mamba_n_heads,
        config.mamba_width // config.mamba_n_heads,
        config.mamba_n_groups,
        config.mamba_d_state,
        config.mamba_d_conv,
        config.mamba_chunk_size,
        config.mamba_conv_bias,
    )
    shared = config.shared_intermediate_size
    mlp: Mlp = DenseMlp(shared, linear=True)
    if number := config.num_local_experts:
        mlp = ExpertMlp(number, config.num_experts_per_tok, config.intermediate_size, shared, linear=True)
    mixers: dict[str, Mixer] = {MAMBA: mamba, ATTENTION: attention}
    return group_layers((mixers[kind], mlp) for kind in config.kinds)


FAMILY = Family("granitemoehybrid", "GraniteMoeHybridForCausalLM", GraniteMoeHybridConfig, _layers, positions=2048)
