"""The spec of training and inference by torch FSDP2 (fsdp.py)."""

from __future__ import annotations

from collections.abc import Iterator

from ..ir.workload import RECOMPUTED
from ..model.features import SUPPORTED
from ..sharding.layout import Layout
from . import expert_placement
from .memory import trainer
from .memory.sizes import LOGITS
from .optimizer.step_calls import step_calls
from .spec import Act, Capabilities, EngineSpec, Lint, MemoryModel, OperatorCalls, Situation, TimeModel, WeightSharding


def _lints(situation: Situation) -> Iterator[Lint]:
    if situation.verb == "update" and situation.layout.zero == 2 and situation.layout.dp > 1:
        message = "zero = 2 also shards the weights at rest and gathers them once a step: less memory than ZeRO 2 needs"
        yield Lint(message, "zero = 3 needs even less memory, zero = 1 less communication")


def _calls(act: Act, layout: Layout) -> OperatorCalls:
    """Return how many operators Python calls in one call of the engine.

    `act` is the kind of the call. Torch's profiler counted the operators on Qwen2 models.
    """
    if act == "step":
        return step_calls(layout)
    # With sharded weights FSDP2 has hooks around each layer and around the model. In a forward pass the hooks cost
    # Python as much time as a hundred operators. Each collective of a backward pass costs another hundred.
    if act == "update":
        hooks = SPEC.divides_weights(layout) * (300 if layout.zero >= 3 else 200)
        counts = OperatorCalls(232 + hooks, 178 + hooks)
    else:
        hooks = SPEC.divides_weights(layout) * 100
        counts = OperatorCalls(73 + hooks, 110 + hooks)
    if layout.tp > 1:  # gathers and scatters of tokens, with their functions
        layer, rest = (159, 92) if act == "update" else (87, 51)
        counts = OperatorCalls(counts.layer + layer, counts.rest + rest)
    if layout.cp > 1:  # operators on tensors: a ring's blocks, the sharding of the tree, the gathering of outputs
        forward, forward_backward = (24 * layout.cp, 54 * layout.cp) if layout.cp_kind == "ring" else (18, 39)
        counts = OperatorCalls(counts.layer + (forward_backward if act == "update" else forward), counts.rest + 30)
    return counts


def _adapter_calls(act: Act, projections: int) -> float:
    """Return how many operators the adapters of a layer add.

    Torch's profiler counted them on a Qwen2 model, with two and with seven adapted projections. In an update, the
    frozen weights of a layer save operators.
    """
    return 31 * projections - 62 if act == "update" else 6 * projections


SPEC = EngineSpec(
    name="fsdp",
    verbs=("infer", "update"),
    build="msrl_graph.backends.fsdp:FsdpEngine",
    capabilities=Capabilities(
        axes=("tp", "cp", "dp", "ep"),
        options=(
            "micro_batch",
            "micro_batch_tokens",
            "recompute",
            "dtype",
            "offload",
            "activations",
            "gradients",
            "moments",
            "compile",
        ),
        zero=(0, 1, 2, 3),
        routes=True,
        features=SUPPORTED,
        planned_features=SUPPORTED,
        lints=_lints,
        chosen=("host", "device"),
        recomputes=RECOMPUTED,
    ),
    sharding=WeightSharding(
        divided_from=2,
        spread=expert_placement.WHOLE,
    ),
    memory=MemoryModel(
        divides_sequence=True,
        peaks=trainer.peaks,
        stored=trainer.stored,
    ),
    time=TimeModel(
        calls=_calls,
        shares_beginnings=("host", "device"),
        adapter_calls=_adapter_calls,
        logits_at_once=LOGITS,
    ),
)
