"""What sets DeepSeek-V3 apart in Megatron-Core's modules: latent attention (arXiv:2405.04434) over the nodes of a tree
(prefix_tree.py), and routers whose scores are corrected (arXiv:2412.19437).

Invariant: what goes down to the latents is whole on each rank of tp, which it gives its own part of the tokens; of what
comes up from them a rank has its heads. Megatron's own would divide both, and turn keys by their place in a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...model.architecture import ExpertSizes, Latent, Model

if TYPE_CHECKING:
    import torch

# Our names within a layer, by Megatron's, where attention is latent.
NAMES = {
    "self_attention.linear_q_proj": ("self_attn.q_proj",),
    "self_attention.linear_q_down_proj": ("self_attn.q_a_proj",),
    "self_attention.q_layernorm": ("self_attn.q_a_layernorm",),
    "self_attention.linear_q_up_proj": ("self_attn.q_b_proj",),
    "self_attention.linear_kv_down_proj": ("self_attn.kv_a_proj_with_mqa",),
    "self_attention.kv_layernorm": ("self_attn.kv_a_layernorm",),
    "self_attention.linear_kv_up_proj": ("self_attn.kv_b_proj",),
}


def sizes(latent: Latent) -> dict[str, Any]:
    """What Megatron's config says of it. Positions are none of its business: angles come with the nodes."""
    return {
        "q_lora_rank": latent.q_rank or None,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.nope,
        "qk_pos_emb_head_dim": latent.rope,
        "v_head_dim": latent.value,
        "rope_type": "rope",
    }


def router(experts: ExpertSizes, stated: Any) -> dict[str, Any]:
    """What Megatron's config says of a router by sigmoids, as `stated`, transformers' config, has it. Raises
    ValueError: Megatron has no such one."""
    if not stated.norm_topk_prob or experts.active == 1:
        raise ValueError(
            "Megatron divides the weights of a token's experts by their sum where it has several, and only there; this "
            "model (`norm_topk_prob`, `num_experts_per_tok`) does not: use `fsdp`"
        )
    found: dict[str, Any] = {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": stated.routed_scaling_factor,
        "moe_router_dtype": "fp32",
    }
    if stated.topk_group < stated.n_group:
        if (best := experts.active // stated.topk_group) != 2:
            raise ValueError(
                f"Megatron judges a group of experts by its best {best} (`num_experts_per_tok` over `topk_group`), and "
                "this model by its best 2: use `fsdp`"
            )
        found |= {"moe_router_num_groups": stated.n_group, "moe_router_group_topk": stated.topk_group}
    return found


def put(attention: Any, model: Model, latent: Latent, theirs: Any, norm: Any, groups: Any, place: Any) -> None:
    """Makes a layer's `attention`, as Megatron specifies it, the one of `theirs`, the module of transformers; `norm` is
    the class of norms."""
    import torch
    from megatron.core.tensor_parallel import mappings
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling

    nope = latent.nope
    rope = latent.rope
    value = latent.value
    tp = groups.tp
    turned = modeling.apply_rotary_pos_emb
    if theirs.config.rope_interleave:
        turned = modeling.apply_rotary_pos_emb_interleave

    class LatentNorm(norm):  # type: ignore[misc]
        """Of latents, whose epsilon is no other norm's."""

        def __init__(self, config: Any, hidden_size: int, **_: Any) -> None:
            super().__init__(config, hidden_size, theirs.kv_a_layernorm.variance_epsilon)

    class Down(torch.nn.Linear):
        def __init__(self, size: int, config: Any) -> None:
            super().__init__(model.hidden, size, model.qkv_bias, device=place, dtype=config.params_dtype)

        def forward(self, states: torch.Tensor) -> Any:
            return super().forward(states), None

    class Columns(ColumnParallelLinear):  # type: ignore[misc]
        """Where Megatron names no group."""

        def __init__(self, *sizes: int, **more: Any) -> None:
            super().__init__(*sizes, **{**more, "tp_group": tp})

    class LatentAttention(MLASelfAttention):  # type: ignore[misc]
        def __init__(self, config: Any, *parts: Any, **more: Any) -> None:
            super().__init__(config, *parts, **more)
            if latent.q_rank:
                self.linear_q_down_proj = Down(latent.q_rank, config)
            self.linear_kv_down_proj = Down(latent.kv_rank + rope, config)

        def get_query_key_value_tensors(
            self,
            hidden_states: torch.Tensor,
            key_value_states: Any = None,
            position_ids: Any = None,
            packed_seq_params: Any = None,  # our nodes
            inference_context: Any = None,
            **_: Any,
        ) -> tuple[Any, ...]:
            if latent.q_rank:
                both, _none = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden_states)[0]))
            else:
                both, _none = self.linear_q_proj(hidden_states)
            down, key = torch.split(self.linear_kv_down_proj(hidden_states)[0], [latent.kv_rank, rope], -1)
            if self.config.sequence_parallel:
                key = mappings.gather_from_sequence_parallel_region(key, group=tp)
            up, _none = self.linear_kv_up_proj(self.kv_layernorm(down))

            def heads(states: torch.Tensor, size: int) -> torch.Tensor:
                """[1, heads, nodes, size], as transformers turns them."""
                return states.reshape(1, states.shape[0], -1, size).transpose(1, 2)

            query = heads(both, nope + rope)
            keys = heads(up, nope + value)
            ahead, turning = torch.split(query, [nope, rope], -1)
            turning, one = turned(turning, heads(key, rope), *packed_seq_params.angles)
            own, values = torch.split(keys, [nope, value], -1)
            found = torch.cat([ahead, turning], -1), torch.cat([own, one.expand(-1, own.shape[1], -1, -1)], -1), values
            # [nodes, 1, heads, size], as Megatron takes them, and the latents, which nobody asks for here.
            return *(x.permute(2, 0, 1, 3) for x in found), None, None

    attention.module = LatentAttention
    attention.submodules.q_layernorm = attention.submodules.kv_layernorm = LatentNorm
    attention.submodules.linear_q_proj = Columns
