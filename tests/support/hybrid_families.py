"""Small models of families with recurrent layers, with random weights, as transformers writes them."""

from functools import partial

import torch
from mixture import HEADS, SIZES, TOKENS, saved, written

# Two value heads for each key head, and values of another size than keys.
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24}
DELTA |= {"linear_conv_kernel_dim": 4, "num_hidden_layers": 4}
# Of larger weights, states and their norms have gradients in which transformers itself rounds too much.
DELTA |= {"initializer_range": 0.1}
# vLLM supports no narrower experts on a CPU.
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
ROUTED |= {"shared_expert_intermediate_size": 32}


def qwen3_next(folder, **changes):
    """A Qwen3-Next of four layers: three of delta nets, one of attention, with four experts and a shared one."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    return saved(folder, Qwen3NextConfig, Qwen3NextForCausalLM, **(DELTA | ROUTED | changes))


def qwen3_5(folder, **changes):
    """A Qwen3.5 of four layers without experts: three of delta nets, one of attention."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    return saved(folder, Qwen3_5TextConfig, Qwen3_5ForCausalLM, **(DELTA | changes))


def qwen3_5_moe(folder, **changes):
    """A Qwen3.5 of four layers with four experts and a shared one: three of delta nets, one of attention."""
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    return saved(folder, Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, **(DELTA | ROUTED | changes))


WRITTEN = {
    "qwen3_next": qwen3_next,
    "qwen3_next with mixed layers": partial(qwen3_next, mlp_only_layers=[1], norm_topk_prob=False),
    "qwen3_5_text": qwen3_5,
    "qwen3_5_text with a tied head": partial(qwen3_5, tie_word_embeddings=True),
    "qwen3_5_moe_text": qwen3_5_moe,
}


def qwen3_5_with_images(folder):
    """A Qwen3.5 as published: with a part for images, whose weights have another beginning of their names."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = SIZES | HEADS | TOKENS | DELTA | {"dtype": "float32"}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"num_position_embeddings": 16}
    torch.manual_seed(0)
    config = Qwen3_5Config(text_config=text, vision_config=vision, dtype="float32", tie_word_embeddings=False)
    return written(Qwen3_5ForConditionalGeneration(config), folder)
