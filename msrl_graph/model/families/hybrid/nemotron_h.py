"""Nemotron-H (arXiv:2504.03624), and models of this architecture.

These are Nemotron Nano 2 (arXiv:2508.14444) and Nemotron 3 Nano (arXiv:2512.20848).
Each layer is a Mamba-2 mixer, attention without rotary positions, an MLP or experts. The layers for multi-token
prediction are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from msgspec import UNSET, UnsetType

from ...config_parts.grouped_router import check_groups
from ...config_parts.mamba import ATTENTION, MAMBA, check_kinds, check_mamba, rename_kinds
from ...fields import Above, Act, Config, ConfigError, Count, Flag, ModelConfig, Names, Size, format_value
from ...layers import (
    DenseMlp,
    ExpertMlp,
    GroupedQueryAttention,
    Layer,
    LayerNorms,
    Mamba2,
    Mixer,
    Mlp,
    NoMixer,
    NoMlp,
    group_layers,
)
from ..family import Family

MLP = "mlp"
EXPERTS = "moe"
LETTERS = {"M": MAMBA, "*": ATTENTION, "-": MLP, "E": EXPERTS}  # of a published pattern of layers
EXPERT_SIZES = (
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "moe_shared_expert_intermediate_size",
)
NORM = LayerNorms(before=("norm",))


class NemotronHConfig(ModelConfig, frozen=True, kw_only=True):
    # The defaults of transformers are those of its class, not of a model.
    num_key_value_heads: Size | None
    layers_block_type: Names
    hybrid_override_pattern: object = UNSET
    head_dim: Size = 128
    mamba_num_heads: Size
    mamba_head_dim: Size
    n_groups: Size
    ssm_state_size: Size
    conv_kernel: Size = 4
    chunk_size: Size = 128
    use_conv_bias: Flag = True
    use_bias: Flag = False
    mlp_bias: Flag = False
    mlp_hidden_act: Act = "relu2"
    mamba_hidden_act: Act = "silu"
    layer_norm_epsilon: Above = 1e-5
    # Of experts, if there are any.
    n_routed_experts: Count = 0
    num_experts_per_tok: Count = 0
    moe_intermediate_size: Count = 0
    moe_shared_expert_intermediate_size: Count = 0
    moe_latent_size: Size | UnsetType = UNSET
    n_group: Size = 1
    topk_group: Size = 1
    norm_topk_prob: Flag = True
    routed_scaling_factor: Above = 1.0
    sliding_window: Count | UnsetType = UNSET

    @classmethod
    def complete(cls, config: Config) -> Config:
        """Return a config.json with a list of layers, and their number.

        Published files have a pattern with a letter for each layer, and other names of some fields.
        """
        kinds = config.get("layers_block_type")
        if kinds is None and isinstance(pattern := config.get("hybrid_override_pattern"), str):
            kinds = [LETTERS.get(letter, letter) for letter in pattern]
        more: dict[str, Any] = {}
        if isinstance(kinds, list):
            more["layers_block_type"] = rename_kinds(kinds)
            more["num_hidden_layers"] = config.get("num_hidden_layers") or len(kinds)
        if config.get("head_dim") is None and config.get("attention_head_dim") is not None:
            more["head_dim"] = config["attention_head_dim"]
        return {**config, **more}

    def find_errors(self) -> Iterator[ConfigError]:
        yield from super().find_errors()
        yield from check_kinds("layers_block_type", self.layers_block_type, self.num_hidden_layers, LETTERS.values())
        yield from check_mamba(self.mamba_num_heads, self.n_groups, "use_bias", self.use_bias)
        if self.mamba_hidden_act not in ("silu", "swish"):
            message = f"has {format_value(self.mamba_hidden_act)} for `mamba_hidden_act`: only `silu` is supported yet"
            yield ConfigError(message, f"Mamba-2 layers with the activation `{self.mamba_hidden_act}`")
        if self.sliding_window:
            yield ConfigError("has a `sliding_window`, which is not supported yet", "windows next to Mamba-2 layers")
        if EXPERTS in self.layers_block_type:
            yield from self._find_expert_errors()

    def _find_expert_errors(self) -> Iterator[ConfigError]:
        if self.moe_latent_size is not UNSET:
            message = "has a `moe_latent_size`: experts of latent vectors are not supported yet"
            yield ConfigError(message, "experts of latent vectors")
        if self.mlp_bias:
            message = "has true for `mlp_bias`: next to experts, only MLPs without biases are supported yet"
            yield ConfigError(message, "biases of shared experts")
        if missing := [name for name in EXPERT_SIZES if not getattr(self, name)]:
            yield ConfigError(f"has layers of experts, but no `{missing[0]}`")
        else:
            yield from check_groups(self.n_routed_experts, self.n_group, self.topk_group, self.num_experts_per_tok)


def _layers(config: NemotronHConfig) -> Iterator[Layer]:
    heads = (config.num_attention_heads, config.kv_heads, config.head_dim)
    sizes = (config.mamba_num_heads, config.mamba_head_dim, config.n_groups, config.ssm_state_size)
    mamba = Mamba2(*sizes, config.conv_kernel, config.chunk_size, config.use_conv_bias)
    dense = DenseMlp(config.intermediate_size, config.mlp_bias, ungated=True)
    of_kind: dict[str, tuple[Mixer, Mlp]] = {
        MAMBA: (mamba, NoMlp()),
        ATTENTION: (GroupedQueryAttention(*heads, no_rope=True), NoMlp()),
        MLP: (NoMixer(), dense),
    }
    if config.n_routed_experts:
        routed = (config.n_routed_experts, config.num_experts_per_tok, config.moe_intermediate_size)
        shared = config.moe_shared_expert_intermediate_size
        of_kind[EXPERTS] = (NoMixer(), ExpertMlp(*routed, shared, "grouped_sigmoid", ungated=True))
    return group_layers((of_kind[kind] for kind in config.layers_block_type), NORM)


def _name_in_files(name: str) -> str:
    """Return the name of a tensor in the files, which call all kinds of layers mixers."""
    name = re.sub(r"^(model\.layers\.\d+)\.(?:self_attn|mamba|mlp)\.", r"\1.mixer.", name)
    renamed = {"model.embed_tokens.weight": "model.embeddings.weight", "model.norm.weight": "model.norm_f.weight"}
    return re.sub(r"^model\.", "backbone.", renamed.get(name, name))


FAMILY = Family(
    "nemotron_h",
    "NemotronHForCausalLM",
    NemotronHConfig,
    _layers,
    positions=4096,
    name_in_files=_name_in_files,
    unused=lambda layers: ("mtp.",),
)
