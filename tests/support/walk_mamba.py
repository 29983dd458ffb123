"""Cases of walk.py with Mamba-2 layers, and with layers that are only a mixer or only an MLP."""

from walk import case

SHAPE = (256, 5, 8, 4, 704, 512)
# So narrow MLPs that Mamba-2 layers hold most.
NARROW = (256, 5, 8, 4, 128, 32)
TOKENS = (("pad_token_id", 0), ("bos_token_id", 0), ("eos_token_id", 1), ("head_dim", 32))
MAMBA = (
    *(("mamba_num_heads", 8), ("mamba_head_dim", 32), ("n_groups", 4), ("ssm_state_size", 16), ("chunk_size", 32)),
    *(("hybrid_override_pattern", "M-*-M"), *TOKENS),
)
EXPERTS = (
    *(("n_routed_experts", 8), ("num_experts_per_tok", 2), ("moe_intermediate_size", 256)),
    *(("moe_shared_expert_intermediate_size", 512), *MAMBA, ("hybrid_override_pattern", "ME*EM")),
)
GRANITE = (
    *(("mamba_n_heads", 16), ("mamba_d_state", 32), ("mamba_chunk_size", 16), ("num_local_experts", 0)),
    *(("num_experts_per_tok", 0), ("shared_intermediate_size", 704), ("position_embedding_type", "nope"), *TOKENS),
    ("layer_types", ["mamba", "mamba", "attention", "mamba"]),
)
GRANITE_EXPERTS = (
    *GRANITE,
    *(("num_local_experts", 8), ("num_experts_per_tok", 2), ("shared_intermediate_size", 512)),
)
GRANITE_SHAPE = (256, 4, 8, 4, 256, 512)

CASES = (
    case("nemotron_h", "nemotron_h", SHAPE, "dp = 1", config=MAMBA),
    case("nemotron_h, long rows", "nemotron_h", NARROW, "dp = 1", tokens=(60, 60), rows=(4, 2, 8), config=MAMBA),
    case("nemotron_h, tp 2", "nemotron_h", NARROW, "tp = 2", "tp = 2", ranks=2, config=MAMBA),
    case("nemotron_h, bf16", "nemotron_h", NARROW, "dp = 1", dtype="bf16", config=MAMBA),
    case("nemotron_h, recomputed", "nemotron_h", NARROW, "dp = 1", engine=", recompute = full", config=MAMBA),
    case("nemotron_h with experts", "nemotron_h", SHAPE, "dp = 1", config=EXPERTS),
    case("granite 4", "granitemoehybrid", GRANITE_SHAPE, "dp = 1", config=GRANITE),
    case("granite 4, tp 2", "granitemoehybrid", GRANITE_SHAPE, "tp = 2", "tp = 2", ranks=2, config=GRANITE),
    case("granite 4, zero 3", "granitemoehybrid", GRANITE_SHAPE, "dp = 2, zero = 3", "dp = 2", ranks=2, config=GRANITE),
    case("granite 4 with experts", "granitemoehybrid", GRANITE_SHAPE, "dp = 1", config=GRANITE_EXPERTS),
)
