"""Cases of walk.py in which some of the weights are not trained."""

from walk import DEEP, EVEN, ROUTED, WIDE, by, case, heavy


def keeping(*words):
    listed = ", ".join(f'"{word}"' for word in words)
    return (("worker actor     : policy", f"worker actor     : policy {{ freeze = [{listed}] }}"),)


EMBEDDINGS = keeping("embeddings")
BOTTOM = keeping("embeddings", "model.layers.[0-1].*")

LIGHT = (
    case("llama, frozen embeddings", "llama", EVEN, "dp = 1", changes=EMBEDDINGS),
    case("llama, frozen head", "llama", EVEN, "dp = 1", changes=keeping("head")),
    case("qwen2, bf16, tied, frozen embeddings", "qwen2", EVEN, "dp = 1", dtype="bf16", tied=True, changes=EMBEDDINGS),
    case("llama, frozen layers", "llama", WIDE, "dp = 1", changes=BOTTOM),
    case("llama, frozen attention", "llama", WIDE, "dp = 1", changes=keeping("attention")),
    case(
        "llama, dp 2, zero 1, frozen embeddings",
        "llama",
        EVEN,
        "dp = 2, zero = 1",
        "tp = 2",
        4,
        2,
        ranks=2,
        changes=EMBEDDINGS,
    ),
    case(
        "llama, dp 2, zero 3, frozen embeddings",
        "llama",
        EVEN,
        "dp = 2, zero = 3",
        "tp = 2",
        4,
        2,
        ranks=2,
        changes=EMBEDDINGS,
    ),
    case(
        "llama, dp 2, zero 3, frozen layers", "llama", WIDE, "dp = 2, zero = 3", "dp = 2", 4, 2, ranks=2, changes=BOTTOM
    ),
    case("llama, tp 2, frozen embeddings", "llama", EVEN, "tp = 2", "tp = 2", ranks=2, changes=EMBEDDINGS),
    case("llama, recompute, frozen layers", "llama", DEEP, "dp = 1", engine=", recompute = full", changes=BOTTOM),
    case(
        "llama, optimizer away, frozen layers", "llama", WIDE, "dp = 1", engine=", offload = optimizer", changes=BOTTOM
    ),
    case("llama, muon, frozen embeddings", "llama", WIDE, "dp = 1", changes=(*by("muon(lr = 2e-4)"), *EMBEDDINGS)),
    case(
        "experts, frozen router and attention",
        "qwen3_moe",
        WIDE,
        "dp = 1",
        experts=ROUTED,
        changes=keeping("router", "attention"),
    ),
)
HEAVY = (
    heavy("llama, frozen embeddings", "llama", EVEN, "dp = 1", changes=EMBEDDINGS),
    heavy("llama, frozen layers", "llama", WIDE, "dp = 1", changes=BOTTOM),
    heavy("llama, pp 2, frozen layers", "llama", WIDE, "pp = 2", "tp = 2", ranks=2, changes=BOTTOM),
)
