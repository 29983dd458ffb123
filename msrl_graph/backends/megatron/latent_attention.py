"""Changes to Megatron-Core's modules for latent attention.

The changed modules implement latent attention (arXiv:2405.04434) over the nodes of a prefix tree (prefix_tree.py), and
routers with corrected scores (arXiv:2412.19437).

Invariant: each tp rank has whole copies of the projections down to the latents, and applies them to its own part of the
tokens. The projections up from the latents are sharded by heads over tp. Without the changes, Megatron would shard both
kinds of projections. It would also choose rotary angles by a token's position in the input, not by a node's depth.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...model.layers import ExpertMlp, MultiHeadLatentAttention
from .chunk_spec import ChunkSpec

if TYPE_CHECKING:
    import torch


def make_size_options(latent: MultiHeadLatentAttention) -> dict[str, Any]:
    """Convert the sizes of latent attention to options of Megatron's config.

    Rotary angles are not options of the config, because attention gets them with the micro-batch (`Nodes` in chunk.py).
    """
    return {
        "q_lora_rank": latent.q_rank or None,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.nope,
        "qk_pos_emb_head_dim": latent.rope,
        "v_head_dim": latent.value,
        "rope_type": "rope",
    }


def make_router_options(experts: ExpertMlp, hf_config: Any) -> dict[str, Any]:
    """Return options that make Megatron's router compute as transformers' router does.

    The options are for Megatron's config. The router of transformers applies a sigmoid to the router's logits. Raises
    ValueError if no options make Megatron's router compute the same as transformers' router.
    """
    if not hf_config.norm_topk_prob or experts.active == 1:
        raise ValueError(
            "Megatron normalizes the weights of a token's experts if it has several, and only then; this model "
            "does not (`norm_topk_prob`, `num_experts_per_tok`): use `fsdp`"
        )
    options: dict[str, Any] = {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": hf_config.routed_scaling_factor,
        "moe_router_dtype": "fp32",
    }
    if hf_config.topk_group < hf_config.n_group:
        if (best := experts.active // hf_config.topk_group) != 2:
            raise ValueError(
                f"Megatron scores a group of experts by its best {best} (`num_experts_per_tok` over `topk_group`), but "
                "this model by its best 2: use `fsdp`"
            )
        options |= {"moe_router_num_groups": hf_config.n_group, "moe_router_group_topk": hf_config.topk_group}
    return options


def specify(attention: Any, latent: MultiHeadLatentAttention, spec: ChunkSpec, norm: Any) -> None:
    """Change Megatron's spec `attention` to compute the same as transformers.

    - `attention`: Megatron's spec of a layer's attention, changed in place. `spec`: the description of the layer's
      chunk.
    - `norm`: the class of the chunk's norms.
    """
    import torch
    from megatron.core.tensor_parallel import mappings
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling

    hf_attention = spec.hf_attention
    nope = latent.nope
    rope = latent.rope
    value = latent.value
    tp = spec.groups.tp
    rotate = modeling.apply_rotary_pos_emb
    if hf_attention.config.rope_interleave:
        rotate = modeling.apply_rotary_pos_emb_interleave

    class LatentNorm(norm):  # type: ignore[misc]
        """A norm of latents, with the epsilon that transformers uses for such norms."""

        def __init__(self, config: Any, hidden_size: int, **_: Any) -> None:
            super().__init__(config, hidden_size, hf_attention.kv_a_layernorm.variance_epsilon)

    class Down(torch.nn.Linear):
        def __init__(self, size: int, config: Any) -> None:
            super().__init__(spec.model.hidden, size, latent.qkv_bias, device=spec.place, dtype=config.params_dtype)

        def forward(self, states: torch.Tensor) -> Any:
            return super().forward(states), None

    class Columns(ColumnParallelLinear):  # type: ignore[misc]
        """A column-parallel linear layer that fills in its own tensor-parallel group.

        Megatron constructs this layer without the argument `tp_group`.
        """

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
            packed_seq_params: Any = None,  # this package's nodes
            inference_context: Any = None,
            **_: Any,
        ) -> tuple[Any, ...]:
            if latent.q_rank:
                query_states, _none = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden_states)[0]))
            else:
                query_states, _none = self.linear_q_proj(hidden_states)
            down, key = torch.split(self.linear_kv_down_proj(hidden_states)[0], [latent.kv_rank, rope], -1)
            if self.config.sequence_parallel:
                key = mappings.gather_from_sequence_parallel_region(key, group=tp)
            up, _none = self.linear_kv_up_proj(self.kv_layernorm(down))

            def heads(states: torch.Tensor, size: int) -> torch.Tensor:
                """Reshape `states` to the shape that transformers' rotary functions expect.

                The shape is [1, heads, nodes, size].
                """
                return states.reshape(1, states.shape[0], -1, size).transpose(1, 2)

            query = heads(query_states, nope + rope)
            keys = heads(up, nope + value)
            query_nope, query_rope = torch.split(query, [nope, rope], -1)
            query_rope, key_rope = rotate(query_rope, heads(key, rope), *packed_seq_params.angles)
            key_nope, values = torch.split(keys, [nope, value], -1)
            query_key_value = (
                torch.cat([query_nope, query_rope], -1),
                torch.cat([key_nope, key_rope.expand(-1, key_nope.shape[1], -1, -1)], -1),
                values,
            )
            # Megatron expects [nodes, 1, heads, size], and the latents, which nothing uses here.
            return *(tensor.permute(2, 0, 1, 3) for tensor in query_key_value), None, None

    attention.module = LatentAttention
    attention.submodules.q_layernorm = attention.submodules.kv_layernorm = LatentNorm
    attention.submodules.linear_q_proj = Columns
