"""DeepSeek-V3 and R1 (arXiv:2412.19437).

The layer for multi-token prediction is left out.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import UNSET, UnsetType

from ..fields import Above, ConfigError, Count, Flag, ModelConfig, Size, check_rope, check_tokens, format_value
from ..layers import DenseMlp, ExpertMlp, Layer, MultiHeadLatentAttention
from .family import Family

# Fields of the router that no engine reads, because the family has one kind of router only.
ROUTER = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}


class DeepseekV3Config(ModelConfig, frozen=True, kw_only=True):
    num_key_value_heads: Size | None
    q_lora_rank: Size | None  # null: queries have no latent
    kv_lora_rank: Size
    qk_nope_head_dim: Size
    qk_rope_head_dim: Size
    v_head_dim: Size
    rope_interleave: Flag | UnsetType = UNSET
    moe_intermediate_size: Size
    num_experts_per_tok: Size
    n_routed_experts: Size
    n_shared_experts: Size
    first_k_dense_replace: Count
    n_group: Size
    topk_group: Size
    norm_topk_prob: Flag
    routed_scaling_factor: Above
    scoring_func: object = UNSET
    topk_method: object = UNSET
    moe_layer_freq: object = UNSET

    def find_errors(self) -> Iterator[ConfigError]:
        if self.kv_heads != (heads := self.num_attention_heads):
            yield ConfigError(
                f"has {self.kv_heads:,} key-value heads: latent attention needs one for each of its {heads:,} heads"
            )
        if (rotated := self.qk_rope_head_dim) % 2:
            yield ConfigError(f"rotates {rotated:,} elements of a head, but rotary positions need pairs")
        yield from self._find_router_errors()
        yield from check_rope(self)
        yield from check_tokens(self)

    def _find_router_errors(self) -> Iterator[ConfigError]:
        """Check a router that first chooses groups, and then experts in these groups.

        A group is chosen by the scores of its two best experts, so a group must have two or more experts.
        """
        for name, only in ROUTER.items():
            if (value := getattr(self, name)) not in (UNSET, only):
                message = f"has {format_value(value)} for `{name}`: only `{only}` is supported yet"
                known = isinstance(value, str | int)
                yield ConfigError(message, f"routers with `{name} = {value}`" if known else "")
        number = self.n_routed_experts
        groups = self.n_group
        chosen = self.topk_group
        layers = self.num_hidden_layers
        first = self.first_k_dense_replace
        if first >= layers:
            yield ConfigError(f"has {first:,} layers without experts, but only {layers:,} layers")
        if number % groups or number // groups < 2:
            equal = "groups must be equal, with 2 or more experts each"
            yield ConfigError(f"has {number:,} experts in {groups:,} groups: {equal}")
        if chosen > groups:
            yield ConfigError(f"chooses {chosen:,} of {groups:,} groups of experts")
        if (active := self.num_experts_per_tok) > (reachable := number // groups * chosen):
            yield ConfigError(f"has {active:,} experts per token, but only {reachable:,} to choose from")


def _layers(config: DeepseekV3Config) -> Iterator[Layer]:
    first = config.first_k_dense_replace
    width = config.moe_intermediate_size
    mixer = MultiHeadLatentAttention(
        config.num_attention_heads,
        config.q_lora_rank or 0,
        config.kv_lora_rank,
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.v_head_dim,
        bool(config.attention_bias),
    )
    shared = config.n_shared_experts * width
    experts = ExpertMlp(config.n_routed_experts, config.num_experts_per_tok, width, shared, "grouped_sigmoid")
    if first:
        yield Layer(mixer, DenseMlp(config.intermediate_size), first)
    yield Layer(mixer, experts, config.num_hidden_layers - first)


FAMILY = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    DeepseekV3Config,
    _layers,
    positions=4096,
    unused=lambda layers: (f"model.layers.{layers}.",),  # the layer for multi-token prediction
)
