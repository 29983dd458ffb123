"""Training and inference by Megatron-Core (with MindSpeed on Ascend): planned for, not run yet.

Invariant: the spec says what Megatron-Core 0.16 can divide; weights at rest are whole in each data-parallel replica, and its distributed
optimizer divides the optimizer's states (zero 1). More ranks than key-value heads are left out: it then cuts within a group's heads.
"""

from __future__ import annotations

from collections.abc import Iterator

from .spec import EngineSpec, Lint, Situation


def _lints(situation: Situation) -> Iterator[Lint]:
    layout, number = situation.layout, situation.micro_batches
    if layout.vpp > 1 and (number < layout.pp or number % layout.pp):
        message = f"interleaved stages take micro-batches {layout.pp} at a time (pp), and an optimizer step has {number}"
        yield Lint(message, "choose `micro_batch` or `mini_batch` so that pp divides their number, or vpp = 1", fatal=True)


SPEC = EngineSpec(
    name="megatron",
    verbs=("infer", "update"),
    axes=("tp", "cp", "pp", "dp", "ep", "etp", "vpp"),
    options={
        "micro_batch": "int",
        "recompute": ("none", "full"),
        "dtype": ("f32", "bf16"),
        "offload": ("none", "optimizer", "weights", "all"),
    },
    zero=(0, 1),
    vocabulary_multiple=128,  # make_vocab_size_divisible_by, of each rank's part
    families=("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"),
    runs=(),
    lints=_lints,
    gradient_bytes=4,  # gradients of micro-batches are summed in float32 (accumulate_allreduce_grads_in_fp32)
    divides_sequence=True,
)
