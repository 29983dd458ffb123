"""Small models of families with Mamba-2 layers, with random weights, as transformers writes them."""

from functools import partial

from dense_families import SCALES
from mixture import saved

# Two heads in each of two groups. A chunk is shorter than most rows.
MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 24, "n_groups": 2, "ssm_state_size": 12, "chunk_size": 4}
# Transformers replaces time steps below the first bound, but only where it computes several tokens at once.
MAMBA |= {"time_step_min": 1e-9, "time_step_max": 0.5}
NEMOTRON = ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"]
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "routed_scaling_factor": 2.5}
ROUTED |= {"moe_shared_expert_intermediate_size": 48}
GRANITE = {"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_chunk_size": 4, "num_hidden_layers": 3}
GRANITE |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
GRANITE |= {"shared_intermediate_size": 48, "attention_multiplier": 0.3} | SCALES
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}
DENSE = {"num_local_experts": 0, "num_experts_per_tok": 0}


def nemotron_h(folder, **changes):
    """A Nemotron-H of five layers: two of Mamba-2, two MLPs, one of attention."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    stated = {"layers_block_type": NEMOTRON} | MAMBA
    return saved(folder, NemotronHConfig, NemotronHForCausalLM, **(stated | changes))


def granite4(folder, **changes):
    """A Granite 4 of three layers: two of Mamba-2, one of attention, without experts."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    return saved(folder, GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, **(GRANITE | DENSE | changes))


def nemotron_h_experts(folder, **changes):
    """A Nemotron-H of four layers, two of them of four experts and a shared one."""
    kinds = ["linear_attention", "moe", "full_attention", "moe"]
    return nemotron_h(folder, **({"layers_block_type": kinds} | ROUTED | changes))


def granite4_experts(folder, **changes):
    """A Granite 4 of three layers with four experts and a shared MLP."""
    return granite4(folder, **(EXPERTS | changes))


WRITTEN = {
    "nemotron_h": nemotron_h,
    "nemotron_h with biases": partial(nemotron_h, mlp_bias=True),
    "nemotron_h with experts": nemotron_h_experts,
    "granitemoehybrid": granite4,
    "granitemoehybrid with one group": partial(granite4, mamba_n_groups=1, mamba_conv_bias=False),
    "granitemoehybrid with experts": granite4_experts,
    "granitemoehybrid without Mamba-2": partial(
        granite4_experts, layer_types=3 * ["full_attention"], position_embedding_type="rope"
    ),
}
