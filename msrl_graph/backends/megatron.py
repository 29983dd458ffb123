"""Training and inference by Megatron-Core (with MindSpeed on Ascend): planned for, not run yet.

Invariant: the spec says what Megatron-Core 0.16 can divide; weights at rest are whole in each data-parallel replica, and its distributed
optimizer divides the optimizer's states (zero 1).
"""

from __future__ import annotations

from ..engine import EngineSpec

SPEC = EngineSpec(
    name="megatron",
    verbs=("infer", "update"),
    axes=("tp", "cp", "pp", "dp", "ep", "etp", "vpp"),
    options={"micro_batch": "int", "recompute": ("none", "full"), "dtype": ("f32", "bf16")},
    zero=(0, 1),
    vocabulary_multiple=128,  # make_vocab_size_divisible_by, of each rank's part
    families=("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"),
    runs=False,
)
