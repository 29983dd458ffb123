"""Generation by vLLM (vllm-ascend on Ascend): planned for, not run yet.

Invariant: the spec says what vLLM 0.23 can divide. Its data-parallel replicas share the experts among all their ranks.
"""

from __future__ import annotations

from ..engine import EngineSpec

SPEC = EngineSpec(
    name="vllm",
    verbs=("generate",),
    axes=("tp", "pp", "dp", "ep"),
    options={"micro_batch": "int", "dtype": ("f32", "bf16"), "memory": "float"},
    vocabulary_multiple=64,
    replicates_kv_heads=True,
    families=("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"),
    runs=False,
)
