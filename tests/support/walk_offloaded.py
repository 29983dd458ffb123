"""Cases of walk.py in which something lies in host memory while others compute."""

from walk import DEEP, FLAT, SHORT, WIDE, by, case, heavy

CASES = (
    case(
        "llama, optimizer and reference away",
        "llama",
        FLAT,
        "dp = 1",
        engine=", offload = optimizer",
        reference="offload = weights",
        **SHORT,
    ),
    case("qwen2, bf16, optimizer away", "qwen2", FLAT, "dp = 1", dtype="bf16", engine=", offload = optimizer", **SHORT),
    case(
        "llama, muon away",
        "llama",
        FLAT,
        "dp = 1",
        engine=", offload = optimizer",
        changes=by("muon(lr = 2e-4)"),
        **SHORT,
    ),
    case(
        "llama, dp 2, zero 1, optimizer away",
        "llama",
        FLAT,
        "dp = 2, zero = 1",
        "dp = 2",
        2,
        1,
        ", offload = optimizer",
        ranks=2,
        **SHORT,
    ),
    case("llama, activations away", "llama", DEEP, "dp = 1", engine=", activations = offload"),
    case("qwen2, bf16, activations away", "qwen2", DEEP, "dp = 1", dtype="bf16", engine=", activations = offload"),
    case(
        "llama, dp 2, zero 3, recompute, all away",
        "llama",
        DEEP,
        "dp = 2, zero = 3",
        "tp = 2",
        4,
        2,
        ", recompute = full, offload = all, activations = offload",
        "offload = all",
        ranks=2,
    ),
    heavy("llama, all away", "llama", WIDE, "dp = 1", engine=", offload = all, activations = offload"),
)
