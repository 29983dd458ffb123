"""Cases of walk.py with recurrent layers, which keep other tensors than attention does."""

from walk import case

SHAPE = (256, 4, 8, 4, 704, 512)
# So narrow MLPs that recurrent layers hold most.
NARROW = (256, 4, 8, 4, 128, 32)
PAD = (("pad_token_id", 0), ("bos_token_id", 0), ("eos_token_id", 1), ("head_dim", 32))
DELTA = (
    *(("linear_num_key_heads", 4), ("linear_num_value_heads", 8), ("linear_key_head_dim", 32)),
    *(("linear_value_head_dim", 64), ("linear_conv_kernel_dim", 4), *PAD),
)
ROUTED = (
    *(("num_experts", 8), ("num_experts_per_tok", 2), ("moe_intermediate_size", 256)),
    *(("shared_expert_intermediate_size", 256), *DELTA),
)

CASES = (
    case("qwen3_5", "qwen3_5_text", SHAPE, "dp = 1", config=DELTA),
    case("qwen3_5, long rows", "qwen3_5_text", NARROW, "dp = 1", tokens=(60, 60), rows=(4, 2, 8), config=DELTA),
    case("qwen3_5, tp 2", "qwen3_5_text", NARROW, "tp = 2", "tp = 2", ranks=2, config=DELTA),
    case("qwen3_5, bf16", "qwen3_5_text", NARROW, "dp = 1", dtype="bf16", config=DELTA),
    case("qwen3_5, recomputed", "qwen3_5_text", NARROW, "dp = 1", engine=", recompute = full", config=DELTA),
    case(
        "qwen3_5, zero 3", "qwen3_5_text", SHAPE, "dp = 2, zero = 3", "dp = 2", ranks=2, rows=(8, 2, 16), config=DELTA
    ),
    case("qwen3_next", "qwen3_next", SHAPE, "dp = 1", config=ROUTED),
)
