"""Cases of walk.py in which an adapter is trained."""

from walk import DEEP, EVEN, ROUTED, WIDE, case, heavy


def adapted(rank=8, targets="all_linear", dropout=0):
    lora = f"{{ adapter = lora(rank = {rank}, targets = {targets}, dropout = {dropout}) }}"
    return (("worker actor     : policy", f"worker actor     : policy {lora}"),)


SHARDED = ("dp = 2, zero = 3", "tp = 2", 4, 2)
BY_ROWS = "engine actor.infer, reference.infer = megatron { micro_batch = 8 }"
COPIED = ("dp = 2, zero = 3", "dp = 2", 4, 2)
LIGHT = (
    case("llama, adapter", "llama", EVEN, "dp = 1", changes=adapted()),
    case("llama, wide, adapter", "llama", WIDE, "dp = 1", changes=adapted()),
    case("llama, adapter, dropout", "llama", WIDE, "dp = 1", changes=adapted(dropout=0.1)),
    case("llama, tp 2, adapter, dropout", "llama", EVEN, "tp = 2", "tp = 2", ranks=2, changes=adapted(dropout=0.1)),
    case("llama, attention's adapter", "llama", WIDE, "dp = 1", changes=adapted(4, "[q_proj, v_proj]")),
    case("qwen2, bf16, adapter", "qwen2", WIDE, "dp = 1", dtype="bf16", changes=adapted()),
    case("llama, dp 2, zero 3, adapter", "llama", WIDE, *SHARDED, ranks=2, changes=adapted()),
    case("llama, tp 2, adapter", "llama", EVEN, "tp = 2", "tp = 2", ranks=2, changes=adapted()),
    case("llama, recompute, adapter", "llama", DEEP, "dp = 1", engine=", recompute = full", changes=adapted()),
    case("experts, adapter", "qwen3_moe", WIDE, "dp = 1", experts=ROUTED, changes=adapted()),
    case("phi3, adapter", "phi3", WIDE, "dp = 1", config=(("pad_token_id", 0),), changes=adapted()),
)
# The generation's ranks hold the same weights, or two ranks each half.
SHARED = (
    case("llama, dp 2, adapter", "llama", WIDE, *COPIED, ranks=2, changes=adapted()),
    case("llama, dp 2 x tp 2, adapter", "llama", WIDE, "dp = 4", "dp = 2, tp = 2", 2, 2, ranks=4, changes=adapted()),
)
HEAVY = (
    heavy("llama, adapter", "llama", WIDE, "dp = 1", changes=adapted()),
    heavy("qwen2, bf16, tp 2, adapter", "qwen2", WIDE, "tp = 2", "tp = 2", ranks=2, dtype="bf16", changes=adapted()),
    heavy(
        "llama, pp 2, attention's adapter",
        "llama",
        DEEP,
        "pp = 2",
        "dp = 2",
        8,
        2,
        ranks=2,
        changes=(
            *adapted(4, "[q_proj, v_proj]"),
            # By tokens, the plan counts rows that share no prompt.
            ("engine actor.generate", f"{BY_ROWS}\n  engine actor.generate"),
        ),
    ),
    heavy("llama, recompute, adapter", "llama", DEEP, "dp = 1", engine=", recompute = full", changes=adapted()),
    heavy("experts, adapter", "qwen3_moe", WIDE, "dp = 1", experts=ROUTED, changes=adapted()),
)
