"""Cases of walk.py whose gradients or optimizer states are bf16."""

import walk
from walk import ROUTED, WIDE
from walk_adapters import adapted

SHAPE = (128, 2, 4, 2, 256, 2048)
BOTH = ", gradients = bf16, moments = bf16"
SHORT = {"tokens": (6, 8), "rows": (2, 2, 4)}


def case(name, update, engine, dtype="bf16", **more):
    ranks = 2 if "2" in update else 1
    return walk.case(
        name, "llama", SHAPE, update, f"dp = {ranks}", 1, 1, engine, dtype=dtype, ranks=ranks, **SHORT | more
    )


CASES = [
    case("both", "dp = 1", BOTH),
    case("moments", "dp = 2, zero = 1", ", moments = bf16"),
    case("away", "dp = 1", f"{BOTH}, offload = optimizer"),
    case("gradients of float32 weights", "dp = 1", ", gradients = bf16", dtype="f32"),
    case("matrices", "dp = 1", BOTH, changes=walk.by("muon(lr = 1e-4)")),
    case("divided", "dp = 2, zero = 3", BOTH),
    case("an adapter", "dp = 1", BOTH, changes=adapted()),
    walk.case("experts", "qwen3_moe", WIDE, "dp = 1", engine=BOTH, dtype="bf16", experts=ROUTED),
]
