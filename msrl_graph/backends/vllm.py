"""Generation by vLLM (vllm-ascend on Ascend): planned for, not run yet.

Invariant: the spec says what vLLM 0.23 can divide. Its data-parallel replicas share the experts among all their ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

from .spec import EngineSpec, Lint, Situation


def _lints(situation: Situation) -> Iterator[Lint]:
    others = sorted(situation.beside - {"vllm"})
    if situation.backend == "ascend" and others:
        # github.com/Ascend/pytorch/issues/166 and github.com/modelscope/ms-swift/issues/6636
        message = f"vllm sleeps on devices that `{others[0]}` works on: on Ascend, groups of HCCL cannot be made meanwhile"
        help = "make all groups before it first sleeps, and set PYTORCH_NPU_ALLOC_CONF=expandable_segments:False; or put them `apart`"
        yield Lint(message, help)


SPEC = EngineSpec(
    name="vllm",
    verbs=("generate",),
    axes=("tp", "pp", "dp", "ep"),
    options={"micro_batch": "int", "dtype": ("f32", "bf16"), "memory": "share"},
    vocabulary_multiple=64,
    replicates_kv_heads=True,
    families=("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"),
    runs=(),
    lints=_lints,
    continuous=True,
)
