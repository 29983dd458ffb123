"""A small model and small mixtures of experts with weights at random, as transformers writes them, and the example's
tokenizer."""

import shutil

import torch
from place import EXAMPLE

SIZES = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 16, "max_position_embeddings": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
# Layers of attention with a window, and with all tokens before it.
WINDOW = 4
SLIDING = {"use_sliding_window": True, "sliding_window": WINDOW}
WINDOWED = SLIDING | {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
# All with a window, in turn with and without experts.
MIXED = SLIDING | {"num_hidden_layers": 3, "mlp_only_layers": [1]}
TOKENS = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}


def mixture(folder, width=32, **changes):
    """A Qwen3-MoE: two layers of four experts, two of them for each token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    routed = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": width}
    return saved(folder, Qwen3MoeConfig, Qwen3MoeForCausalLM, **({"num_hidden_layers": 2} | routed | changes))


def tied(folder):
    """A Qwen3-MoE whose routers score experts in pairs, up to the rounding of a float32.

    Of eight experts a token has three: both of the best pair, and one of the next, as rounding decides. The experts of
    a pair differ by so little that the probe of delivered weights accepts another choice.
    """
    from safetensors.torch import load_file, save_file

    path = mixture(folder, num_experts=8, num_experts_per_tok=3)
    weights = load_file(f"{path}/model.safetensors")
    for name, value in weights.items():
        if name.endswith("mlp.gate.weight"):
            value[1::2] = value[::2] * (1 + 1e-7 * torch.randn(value[::2].shape).sign())
        elif ".experts." in name and (number := int(name.split(".experts.")[1].split(".")[0])) % 2:
            even = weights[name.replace(f".experts.{number}.", f".experts.{number - 1}.")]
            value.copy_(even + 0.003 * even.std() * torch.randn(even.shape))
    save_file(weights, f"{path}/model.safetensors", {"format": "pt"})
    return path


def dense(folder, **changes):
    """A Qwen3 of four layers; its attention has no biases, unless it is asked for."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    changes |= {"num_hidden_layers": 4, "tie_word_embeddings": False}
    return saved(folder, Qwen3Config, Qwen3ForCausalLM, **changes)


def llama(folder, **changes):
    """A Llama of two layers, its attention with biases where it is asked for."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return saved(folder, LlamaConfig, LlamaForCausalLM, num_hidden_layers=2, **changes)


def gemma(folder, **changes):
    """A Gemma of two layers."""
    from transformers import GemmaConfig, GemmaForCausalLM

    return saved(folder, GemmaConfig, GemmaForCausalLM, num_hidden_layers=2, **changes)


def mistral(folder, **changes):
    """A Mistral of two layers, without windows unless they are asked for."""
    from transformers import MistralConfig, MistralForCausalLM

    return saved(
        folder, MistralConfig, MistralForCausalLM, **({"num_hidden_layers": 2, "sliding_window": None} | changes)
    )


def qwen2(folder, **changes):
    """A Qwen2 of two layers."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    # Heads of 32 elements, which make 64: vLLM knows no other heads of Qwen2, and no smaller ones on a CPU.
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return saved(folder, Qwen2Config, Qwen2ForCausalLM, **({"num_hidden_layers": 2} | heads | changes))


def saved(folder, config, model, **stated):
    torch.manual_seed(0)
    stated = SIZES | HEADS | TOKENS | {"initializer_range": 0.2} | stated
    return written(model(config(dtype="float32", **stated)), folder)


def latent(folder, **more):
    """A DeepSeek-V3: latent attention; a layer without experts, and two with sixteen in four groups, of which a token
    has four and the shared one; a correction that changes what is chosen; positions stretched by YaRN."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16}
    heads |= {"qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16, "vocab_size": 16}
    routed = {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
    routed |= {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 1.5}
    stretch = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
    stretch |= {"mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1}
    tokens = {**TOKENS, "max_position_embeddings": 64}
    stated = {"initializer_range": 0.2, "rope_parameters": stretch, **sizes, **heads, **routed, **tokens}
    torch.manual_seed(0)
    return written(DeepseekV3ForCausalLM(DeepseekV3Config(dtype="float32", **(stated | more))), folder)


def written(made, folder):
    for name, value in made.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(value, std=0.3)
    for name, value in made.named_parameters():
        if name.endswith("A_log"):  # states that last for some tokens
            torch.nn.init.normal_(value, mean=-2.0, std=0.5)
    for value in made.parameters():
        # Biases of zero and norms of one would hide an engine that ignores them.
        if value.unique().numel() == 1:
            value.data += torch.randn_like(value) * 0.2
    made.save_pretrained(folder)
    for file in (EXAMPLE / "model").glob("tokenizer*"):
        shutil.copy(file, folder)
    return str(folder)
