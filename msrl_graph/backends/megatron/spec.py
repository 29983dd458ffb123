"""The spec of training and inference by Megatron-Core (engine.py)."""

from __future__ import annotations

from ...model.features import SUPPORTED
from ...sharding.layout import Layout
from ..expert_placement import ExpertPlacement, divides
from ..memory.sizes import LOGITS
from ..optimizer.step_calls import step_calls
from ..spec import Act, Capabilities, EngineSpec, MemoryModel, OperatorCalls, TimeModel, WeightSharding
from . import peaks, stage_sizes
from .packages import PACKAGES

# Python's cost of a pass besides its operators, in operators that take as long: Megatron's modules and schedule, for
# an update in both passes. By processor time of models of 2 and 6 layers on two tokens; an operator is that of
# probes.launch.
PYTHON = {"infer": OperatorCalls(21, 90), "update": OperatorCalls(37, 176), "step": OperatorCalls(0, 0)}


def _calls(act: Act, layout: Layout) -> OperatorCalls:
    """Return how many operators Python calls in one call of the engine.

    `act` is the kind of the call. Torch's profiler counted the operators on Qwen2 models of 2 and 6 layers.
    """
    if act == "step":
        return step_calls(layout)
    counts, python = (
        (OperatorCalls(198, 151), PYTHON["update"]) if act == "update" else (OperatorCalls(78, 96), PYTHON["infer"])
    )
    if layout.tp > 1:  # sequence parallelism, and the sharded vocabulary
        counts = OperatorCalls(268, 183) if act == "update" else OperatorCalls(102, 114)
    return OperatorCalls(counts.layer + python.layer, counts.rest + python.rest)


def _adapter_calls(act: Act, projections: int) -> float:
    """Return how many operators the adapters of a layer add.

    Torch's profiler counted them on a Qwen2 model, with one, two, four and seven adapted projections. In an update, the
    frozen weights of a layer save operators.
    """
    return 27 * projections - 43 if act == "update" else 6 * projections


# Megatron's expert_tensor_parallel_size defaults to tensor_model_parallel_size.
EXPERTS = ExpertPlacement("ep · etp divides tp · cp · dp; etp defaults to tp", lambda layout: layout.tp, divides)
# Features of models that can be planned, not run.
LACKING = {
    "output_bias",
    "mlp_bias",
    "sliding_window",
    "mixed_layers",
    "embedding_scale",
    "residual_scale",
    "logits_scale",
    "attention_cap",
    "logits_cap",
    "rope_by_window",
    "offset_norms",
    "joint_norms",
    "no_rope",
    "rope_partial",
    "rope_interleaved",
    "post_norms",
    "sandwich_norms",
    "sigmoid_router",
    "attention_sinks",
    "clamped_experts",
    "gated_delta_net",
    "output_gate",
    "gated_shared_experts",
    "mamba2",
    "single_layers",
    "ungated_mlp",
    "linear_mlp",
}
SPEC = EngineSpec(
    name="megatron",
    verbs=("infer", "update"),
    build="msrl_graph.backends.megatron.engine:MegatronEngine",
    capabilities=Capabilities(
        axes=("tp", "cp", "pp", "dp", "ep", "etp", "vpp"),
        options=(
            "micro_batch",
            "micro_batch_tokens",
            "recompute",
            "dtype",
            "offload",
            "activations",
            "gradients",
            "moments",
        ),
        zero=(0, 1),
        routes=True,
        features=SUPPORTED - LACKING,
        planned_features=SUPPORTED,
        chosen=("device",),
        recomputes=("attention", "mlp", "moe", "norms"),
    ),
    packages=PACKAGES,
    sharding=WeightSharding(
        spread=EXPERTS,
        vocabulary_multiple=stage_sizes.PADDED,
    ),
    memory=MemoryModel(
        groups=lambda layout: (
            (layout.pp > 1) + 2 * (layout.ep > 1) + (layout.etp > 1)
        ),  # of the ends, of experts, and of both
        divides_sequence=True,
        peaks=peaks.moments,
        stored=peaks.stored,
    ),
    time=TimeModel(
        calls=_calls,
        fused=("device",),
        adapter_calls=_adapter_calls,
        logits_at_once=LOGITS,
        shares_beginnings=("host",),  # on devices, where it has not run, plans count rows without sharing
    ),
)
