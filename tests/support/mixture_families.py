"""Small models of families with experts, with random weights, as transformers writes them."""

from functools import partial

from mixture import WINDOW, saved


def glm4_moe(folder, **changes):
    """A GLM-4.5 of three layers: one without experts, and two with eight and a shared one.

    A correction changes which experts are chosen.
    """
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    routed = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1, "moe_intermediate_size": 64}
    stated = {"num_hidden_layers": 3, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5} | routed
    stated |= {"use_qk_norm": True, "attention_bias": True}
    return saved(folder, Glm4MoeConfig, Glm4MoeForCausalLM, **(stated | changes))


# vLLM supports no narrower experts on a CPU.
ROUTED = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}


def mixtral(folder, **changes):
    """A Mixtral of two layers with four experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    return saved(folder, MixtralConfig, MixtralForCausalLM, **({"num_hidden_layers": 2} | ROUTED | changes))


def minimax_m2(folder, **changes):
    """A MiniMax-M2 of two layers with four experts, of whose heads a half is rotated.

    A correction changes which experts are chosen.
    """
    from transformers import MiniMaxM2Config, MiniMaxM2ForCausalLM

    stated = {"num_hidden_layers": 2, "rotary_dim": 16} | ROUTED
    return saved(folder, MiniMaxM2Config, MiniMaxM2ForCausalLM, **(stated | changes))


def gpt_oss(folder, **changes):
    """A gpt-oss of two layers, with a window and without. A small limit clamps what a large one would not."""
    from transformers import GptOssConfig, GptOssForCausalLM

    stretch = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 150000.0}
    stretch |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    stated = {"num_hidden_layers": 2, "sliding_window": WINDOW, "swiglu_limit": 0.5, "rope_parameters": stretch}
    return saved(folder, GptOssConfig, GptOssForCausalLM, **(stated | ROUTED | changes))


WRITTEN = {
    "gpt_oss": gpt_oss,
    "minimax_m2": minimax_m2,
    "mixtral": mixtral,
    "glm4_moe": glm4_moe,
    "mixtral with windows": partial(mixtral, sliding_window=WINDOW),
}
