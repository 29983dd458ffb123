"""Names of the weights of a layer: this package's names, by Megatron's names.

Several names of this package for one of Megatron's: Megatron concatenates these weights.
"""

from __future__ import annotations

from ...model.architecture import Model
from ...model.layers import MultiHeadLatentAttention

NAMES = {
    "input_layernorm": ("input_layernorm",),
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.q_layernorm": ("self_attn.q_norm",),
    "self_attention.k_layernorm": ("self_attn.k_norm",),
    "self_attention.linear_proj": ("self_attn.o_proj",),
    "pre_mlp_layernorm": ("post_attention_layernorm",),
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2": ("mlp.down_proj",),
    "mlp.router": ("mlp.gate",),
    "mlp.shared_experts.linear_fc1": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "mlp.shared_experts.linear_fc2": ("mlp.shared_experts.down_proj",),
}
# The same for experts, whose parameters become parts of one parameter each.
EXPERTS = {"linear_fc1": ("gate_proj", "up_proj"), "linear_fc2": ("down_proj",)}
# In addition, for latent attention.
LATENT = {
    "self_attention.linear_q_proj": ("self_attn.q_proj",),
    "self_attention.linear_q_down_proj": ("self_attn.q_a_proj",),
    "self_attention.q_layernorm": ("self_attn.q_a_layernorm",),
    "self_attention.linear_q_up_proj": ("self_attn.q_b_proj",),
    "self_attention.linear_kv_down_proj": ("self_attn.kv_a_proj_with_mqa",),
    "self_attention.kv_layernorm": ("self_attn.kv_a_layernorm",),
    "self_attention.linear_kv_up_proj": ("self_attn.kv_b_proj",),
}


def list_names(model: Model) -> dict[str, tuple[str, ...]]:
    """Return the names of the weights of a model's layers that are not of experts."""
    return NAMES | (LATENT if isinstance(model.mixer, MultiHeadLatentAttention) else {})
