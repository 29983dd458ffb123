"""Small models of families without experts, with random weights, as transformers writes them."""

from functools import partial

from mixture import SLIDING, WINDOW, saved

# As Phi-4-mini: of each head, three of four elements are rotated, with factors of their own.
PAIRS = 12
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
LONGROPE |= {"short_factor": [1.0 + 0.1 * i for i in range(PAIRS)], "long_factor": [2.0 + i for i in range(PAIRS)]}

SCALES = {"embedding_multiplier": 3.0, "residual_multiplier": 0.6, "logits_scaling": 1.7}


def granite(folder, **changes):
    """A Granite of two layers, whose four scales differ from what a plain model has."""
    from transformers import GraniteConfig, GraniteForCausalLM

    stated = {"num_hidden_layers": 2, "attention_multiplier": 0.3} | SCALES
    return saved(folder, GraniteConfig, GraniteForCausalLM, **(stated | changes))


def seed_oss(folder, **changes):
    """A Seed-OSS of two layers."""
    from transformers import SeedOssConfig, SeedOssForCausalLM

    return saved(folder, SeedOssConfig, SeedOssForCausalLM, num_hidden_layers=2, **changes)


def smollm3(folder, **changes):
    """A SmolLM3 of four layers: three with rotary positions, one without."""
    from transformers import SmolLM3Config, SmolLM3ForCausalLM

    return saved(folder, SmolLM3Config, SmolLM3ForCausalLM, **({"num_hidden_layers": 4} | changes))


def olmo2(folder, **changes):
    """An OLMo 2 of two layers."""
    from transformers import Olmo2Config, Olmo2ForCausalLM

    return saved(folder, Olmo2Config, Olmo2ForCausalLM, num_hidden_layers=2, **changes)


def phi3(folder, **changes):
    """A Phi-3 of two layers."""
    from transformers import Phi3Config, Phi3ForCausalLM

    return saved(folder, Phi3Config, Phi3ForCausalLM, **({"num_hidden_layers": 2} | changes))


def glm(folder, **changes):
    """A GLM-4 of two layers, as it was first published."""
    from transformers import GlmConfig, GlmForCausalLM

    return saved(folder, GlmConfig, GlmForCausalLM, num_hidden_layers=2, **changes)


def glm4(folder, **changes):
    """A GLM-4-0414 of two layers."""
    from transformers import Glm4Config, Glm4ForCausalLM

    return saved(folder, Glm4Config, Glm4ForCausalLM, num_hidden_layers=2, **changes)


def olmo3(folder, **changes):
    """An OLMo 3 of four layers: three with windows, one without, with other rotary positions."""
    from transformers import Olmo3Config, Olmo3ForCausalLM

    stretch = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 500000.0}
    ropes = {"full_attention": stretch, "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0}}
    stated = {"num_hidden_layers": 4, "sliding_window": WINDOW, "rope_parameters": ropes}
    return saved(folder, Olmo3Config, Olmo3ForCausalLM, **(stated | changes))


def gemma2(folder, **changes):
    """A Gemma 2 of two layers, with a window and without. Small caps change what large ones would not."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 20}
    stated = {"num_hidden_layers": 2, "sliding_window": WINDOW} | caps
    return saved(folder, Gemma2Config, Gemma2ForCausalLM, **(stated | changes))


def gemma3(folder, **changes):
    """A Gemma 3 of four layers: three with windows, one without, with other rotary positions."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    ropes = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0}}
    ropes |= {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    stated = {"num_hidden_layers": 4, "sliding_window": WINDOW, "query_pre_attn_scalar": 20, "rope_parameters": ropes}
    stated |= {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
    return saved(folder, Gemma3TextConfig, Gemma3ForCausalLM, **(stated | changes))


WRITTEN = {
    "granite": granite,
    "granite with biases": partial(granite, attention_bias=True, mlp_bias=True),
    "granite with one scale": partial(granite, **dict.fromkeys(SCALES, 1.0), attention_multiplier=0.3),
    "seed_oss": seed_oss,
    "seed_oss with biases": partial(seed_oss, attention_out_bias=True, mlp_bias=True),
    "smollm3": smollm3,
    "smollm3 with windows": partial(smollm3, **SLIDING, no_rope_layers=[1, 0, 1, 0], tie_word_embeddings=False),
    "olmo2": olmo2,
    "phi3": phi3,
    "phi3 with windows": partial(phi3, sliding_window=WINDOW),
    "phi3 with longrope": partial(phi3, hidden_size=128, rope_parameters=LONGROPE, original_max_position_embeddings=48),
    "glm": glm,
    "glm4": glm4,
    "olmo3": olmo3,
    "gemma2": gemma2,
    "gemma2 without windows": partial(gemma2, layer_types=["full_attention"] * 2, attn_logit_softcapping=None),
    "gemma3_text": gemma3,
    "gemma3_text without windows": partial(gemma3, layer_types=["full_attention"] * 4),
}
