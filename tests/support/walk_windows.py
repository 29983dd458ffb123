"""Cases of walk.py with layers of several kinds: sliding windows, which are shorter than rows, and full attention."""

from walk import case

# So few tokens and so narrow MLPs that attention and its cache hold most.
NARROW = (256, 4, 8, 4, 128, 32)
WINDOW = 16
WINDOWED = (
    ("use_sliding_window", True),
    ("sliding_window", WINDOW),
    ("layer_types", ["sliding_attention"] * 3 + ["full_attention"]),
)
# All with a window, in turn with and without experts.
MIXED = (("use_sliding_window", True), ("sliding_window", WINDOW), ("mlp_only_layers", [0, 2]), ("head_dim", 32))


def windowed(name, *arguments, config=WINDOWED, **more):
    return case(name, "qwen3_moe" if "experts" in more else "qwen2", NARROW, *arguments, config=config, **more)


CASES = (
    windowed("windows", "dp = 1"),
    windowed("windows, long responses", "dp = 1", tokens=(6, 120), rows=(2, 4, 8)),
    windowed("windows, bf16, recompute", "dp = 1", dtype="bf16", engine=", recompute = full"),
    windowed("windows, tp 2", "tp = 2", "tp = 2", ranks=2),
    windowed("windows, dp 2, zero 3", "dp = 2, zero = 3", "dp = 2", 4, 2, ranks=2),
    windowed("windows, cp 2", "cp = 2", "dp = 2", 4, 2, ranks=2, tokens=(60, 40)),
    windowed("windows, cp 2 by Ulysses", "cp = 2, cp_kind = ulysses", "tp = 2", ranks=2),
    windowed("mixed layers", "dp = 1", config=MIXED, experts=(8, 2, 256)),
)
