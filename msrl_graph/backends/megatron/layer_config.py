"""Megatron's config of the layers of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...model.layers import MultiHeadLatentAttention
from .. import hf_modules
from . import latent_attention

if TYPE_CHECKING:
    from ...model.architecture import Model
    from ...sharding.layout import Layout


def make_config(model: Model, layout: Layout, hf_config: Any, layers: int, recomputed: int = 0, **options: Any) -> Any:
    """Make Megatron's config for `layers` layers of a model.

    `hf_config` is the model's config in transformers. The backward pass recomputes the first `recomputed` layers.
    """
    import torch
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig
    from transformers.activations import ACT2FN

    mixer = model.mixer
    latent = isinstance(mixer, MultiHeadLatentAttention)
    if isinstance(mixer, MultiHeadLatentAttention):
        options |= latent_attention.make_size_options(mixer)
    if experts := model.expert_mlp:
        options |= {
            "num_moe_experts": experts.number,
            "moe_router_topk": experts.active,
            "moe_ffn_hidden_size": experts.intermediate,
            # Whether the weights of a token's experts are a softmax over all experts, or over the chosen experts only.
            "moe_router_pre_softmax": not getattr(hf_config, "norm_topk_prob", True),
            "moe_router_load_balancing_type": "none",
            "expert_model_parallel_size": layout.ep,
            "expert_tensor_parallel_size": layout.etp,
            "moe_shared_expert_intermediate_size": experts.shared or None,
        }
        if experts.corrected:
            options |= latent_attention.make_router_options(experts, hf_config)
    dtype = getattr(torch, hf_modules.DTYPES[model.dtype])
    return (MLATransformerConfig if latent else TransformerConfig)(
        **options,
        num_layers=layers,
        hidden_size=model.hidden,
        num_attention_heads=mixer.heads,
        num_query_groups=mixer.kv_heads,
        kv_channels=mixer.head_dim,
        ffn_hidden_size=next(iter(model.mlps)).width,
        normalization="RMSNorm",
        layernorm_epsilon=hf_config.rms_norm_eps,
        moe_token_dispatcher_type="alltoall",  # required for varying lengths, with or without experts
        activation_func=ACT2FN[hf_config.hidden_act],
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=mixer.qkv_bias,
        qk_layernorm=mixer.head_norms,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=layout.tp > 1,
        params_dtype=dtype,
        bf16=model.dtype == "bf16",
        use_cpu_initialization=False,
        perform_initialization=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        recompute_granularity="full" if recomputed else None,
        recompute_method="block" if recomputed else None,
        recompute_num_layers=recomputed or None,
    )
