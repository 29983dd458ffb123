"""Cases of walk.py with features that change what is stored: norms after both halves, norms of all heads together,
capped scores and logits, and projections that are concatenated."""

from walk import case

SHAPE = (256, 4, 8, 4, 704, 2048)
# So few tokens and so narrow MLPs that attention holds most.
NARROW = (256, 4, 8, 4, 128, 32)
# An expert is as narrow as all of a layer's in walk.py.
ROUTED = (256, 4, 8, 4, 256, 2048)
HEADS = ("head_dim", 32)
PAD = ("pad_token_id", 0)
LOCAL = (HEADS, ("num_local_experts", 8), ("num_experts_per_tok", 2), ("bos_token_id", 0), ("eos_token_id", 1))
CAPS = (("attn_logit_softcapping", 50.0), ("sliding_window", 16), HEADS)

CASES = (
    case("granite", "granite", SHAPE, "dp = 1", config=(("logits_scaling", 8.0), ("residual_multiplier", 0.2))),
    case("olmo2, tp 2", "olmo2", SHAPE, "tp = 2", "tp = 2", ranks=2, config=(PAD,)),
    case("phi3", "phi3", SHAPE, "dp = 1", config=(PAD,)),
    case("phi3, tp 2", "phi3", SHAPE, "tp = 2", "tp = 2", ranks=2, config=(PAD,)),
    case("glm4", "glm4", SHAPE, "dp = 1", config=(HEADS, PAD)),
    case("gemma2", "gemma2", SHAPE, "dp = 1", tied=True, config=CAPS),
    case("gemma2, long rows", "gemma2", NARROW, "dp = 1", tied=True, tokens=(60, 60), rows=(2, 4, 8), config=CAPS),
    case("minimax_m2", "minimax_m2", ROUTED, "dp = 1", config=(*LOCAL, ("rotary_dim", 16))),
    case("gpt_oss", "gpt_oss", ROUTED, "dp = 1", config=(*LOCAL, ("sliding_window", 16))),
    case("gpt_oss, tp 2 x ep 2", "gpt_oss", ROUTED, "tp = 2, ep = 2", "tp = 2", ranks=2, config=LOCAL),
    case("gemma3, bf16", "gemma3_text", SHAPE, "dp = 1", tied=True, dtype="bf16", config=(HEADS, CAPS[1])),
)
