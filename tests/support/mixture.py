"""A small mixture of experts with weights at random, as transformers writes it, and the example's tokenizer."""

import shutil

import torch
from place import EXAMPLE


def mixture(folder):
    """A Qwen3-MoE: two layers of four experts, two of them for each token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 16}
    routed = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    tokens = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    torch.manual_seed(0)
    config = Qwen3MoeConfig(dtype="float32", initializer_range=0.2, **sizes, **heads, **routed, **tokens)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    for file in (EXAMPLE / "model").glob("tokenizer*"):
        shutil.copy(file, folder)
    return str(folder)
