"""Memory of infer and update nodes whose engine has no memory formula of its own.

An infer node computes one forward pass. The tensors that a layer's backward pass needs are counted as in
arXiv:2205.05198. Attention scores are never stored. Invariant: the formulas return the peak memory of each pipeline
stage, as a dictionary from items, such as "activations", to bytes. For every stage, the weights and gradients of the
largest stage are counted. The embedding on the first stage and the head on the last stage have the same size.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from operator import mul

from ..backends.spec import BYTES, EngineSpec, Moments
from ..ir.workload import Workload, in_flight
from ..model.layers import ExpertMlp, Layer
from ..sharding.layout import Side, count_busiest_elements


def moments(verb: str, work: Workload, spec: EngineSpec) -> Moments:
    """Return the peak memory of an infer or update node, by pipeline stage and item.

    The memory of a pipeline stage is a dictionary from items, such as "activations", to bytes.
    """
    items = {"gathered weights": _gathered_bytes(work), "gradients": gradients(work, spec) if verb == "update" else 0}
    layout = work.layout
    by_stage = {}
    for stage in range(layout.pp):
        name = f"stage {stage + 1} of {layout.pp}" if layout.pp > 1 else ""
        last = stage == layout.pp - 1
        by_stage[name] = {
            **items,
            "activations": _activation_bytes(verb, work, spec, stage),
            "logits": _logits_bytes(verb, work) if last else 0,
        }
    return by_stage


def gradients(work: Workload, spec: EngineSpec) -> int:
    """Return the bytes of the sums of gradients on the busiest rank.

    From ZeRO 2 on, gradients are sharded over dp.
    """
    return BYTES[work.gradients] * count_busiest_elements(
        work.model.trained_kinds, Side(work.layout, work.layout.zero >= 2, spec.multiple(work.layout))
    )


def _gathered_bytes(work: Workload) -> int:
    """Return the bytes of the gathered weights on a device during computation.

    The result is 0 if the weights are not sharded over dp. At ZeRO 3, a device holds two gathered layers: one that is
    in use, and one that is being gathered. Below ZeRO 3, a device holds all layers.
    """
    if not work.divided:
        return 0
    unsharded = count_busiest_elements(work.model.kinds, Side(work.layout)) * BYTES[work.dtype]
    return unsharded if work.layout.zero < 3 else unsharded * 2 // max(2, work.model.layers)


def _micro_batch_tokens(work: Workload) -> int:
    """Return how many tokens of a micro-batch one context-parallel rank computes."""
    return -(-work.cap_tokens(work.rows * (work.prompt + work.response)) // work.layout.cp)


def layer_elements(work: Workload, spec: EngineSpec, layer: Layer, recomputed: Collection[str] = ()) -> int:
    """Return how many elements per token a layer saves for its backward pass.

    Each half of a layer saves 2 h elements (h: the hidden size), and what the mixer or the MLP counts (layers.py). If
    the engine shards sequences over tp, the 2 h and other elements that each tp rank saves are also sharded.

    Of the parts `recomputed`, attention and MLPs save nothing. Other parts are counted as if they were not recomputed.
    """
    tp = work.layout.tp
    hidden = work.model.hidden
    mlp = "moe" if isinstance(layer.mlp, ExpertMlp) else "mlp"
    parts = (
        (0, 0) if "attention" in recomputed else layer.mixer.count_saved(),
        (0, 0) if mlp in recomputed else layer.mlp.count_saved(hidden, work.layout.etp),
    )
    replicated = 2 * layer.halves * hidden + sum(part[0] for part in parts)
    sharded = sum(part[1] for part in parts)
    return -(-replicated // (tp if spec.memory.divides_sequence else 1)) + -(-sharded // tp)


def _activation_bytes(verb: str, work: Workload, spec: EngineSpec, stage: int) -> int:
    """Return the activation bytes of a pipeline stage, in all micro-batches in flight.

    An update saves the activations of all layers. Of a layer that is recomputed as a whole, an update saves only the
    input. While something is recomputed, all activations of one layer exist. If activations are offloaded, only the
    activations of two layers are on the device. An infer node holds the activations of one layer.
    """
    model = work.model
    layout = work.layout
    begin = model.first_trained if verb == "update" else 0
    stretches = [(max(start, begin), max(stop, begin)) for start, stop in layout.stage_layers(stage, model.layers)]
    counts = model.count_kinds(*stretches)
    sizes = [layer_elements(work, spec, kind) for kind in model.layer_kinds]
    largest = max((size for size, count in zip(sizes, counts, strict=True) if count), default=0)
    whole = [work.recompute.find_whole_layers(*stretch) for stretch in stretches]
    kept = [layer_elements(work, spec, kind, work.recompute.parts) for kind in model.layer_kinds]
    others = model.count_kinds(*((layers.stop, stop) for layers, (_, stop) in zip(whole, stretches, strict=True)))
    layer_input = -(-model.hidden // (layout.tp if spec.memory.divides_sequence else 1))
    if verb != "update":
        elements = largest
    elif work.activations_away:  # two layers at a time have their activations on the device
        largest_kept = max((size for size, count in zip(kept, others, strict=True) if count), default=layer_input)
        elements = 2 * largest_kept + largest if work.recompute else 2 * largest
    else:
        saved = layer_input * sum(map(len, whole)) + sum(map(mul, others, kept))
        elements = round(saved * in_flight(work, stage)) + largest * bool(work.recompute)
    return _micro_batch_tokens(work) * elements * BYTES[work.dtype]


def stored(work: Workload, spec: EngineSpec) -> int:
    """Return the bytes of activations that a device saves for later backward passes.

    The bytes are those of the pipeline stage that saves the most. They include all micro-batches whose forward pass is
    done and whose backward pass is not.
    """
    once = replace(work, activations_away=False)
    most = max(_activation_bytes("update", once, spec, stage) for stage in range(work.layout.pp))
    largest = max(layer_elements(work, spec, kind) for kind in work.model.layer_kinds)
    return most - _micro_batch_tokens(work) * largest * BYTES[work.dtype] * bool(work.recompute)


def _logits_bytes(verb: str, work: Workload) -> int:
    """Return the bytes of a micro-batch's logits on one device.

    The logits exist in the weights' type and in float32. In an update, their float32 gradient is added.
    """
    per_logit = BYTES[work.dtype] + (8 if verb == "update" else 4)
    scored = -(-work.scored_tokens // work.layout.cp)
    return scored * -(-work.model.outputs // work.layout.tp) * per_logit
