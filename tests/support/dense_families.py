"""Small models of families without experts, with random weights, as transformers writes them."""

from functools import partial

from mixture import SLIDING, saved

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


WRITTEN = {
    "granite": granite,
    "granite with biases": partial(granite, attention_bias=True, mlp_bias=True),
    "granite with one scale": partial(granite, **dict.fromkeys(SCALES, 1.0), attention_multiplier=0.3),
    "seed_oss": seed_oss,
    "seed_oss with biases": partial(seed_oss, attention_out_bias=True, mlp_bias=True),
    "smollm3": smollm3,
    "smollm3 with windows": partial(smollm3, **SLIDING, no_rope_layers=[1, 0, 1, 0], tie_word_embeddings=False),
    "olmo2": olmo2,
}
