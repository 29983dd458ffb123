"""Memory of infer and update nodes whose engine has no memory formula of its own.

An infer node computes one forward pass. The tensors that a layer's backward pass needs are counted as in
arXiv:2205.05198. Attention scores are never stored. Invariant: the formulas return the peak memory of each pipeline
stage, as a dictionary from items, such as "activations", to bytes. For every stage, the weights and gradients of the
largest stage are counted. The embedding on the first stage and the head on the last stage have the same size.
"""

from __future__ import annotations

from dataclasses import replace

from ..backends.sizes import GRADIENT
from ..backends.spec import BYTES, EngineSpec, Moments
from ..ir.workload import Workload, in_flight
from ..model.architecture import Model
from ..sharding.layout import Side, count_busiest_elements


def moments(verb: str, work: Workload, spec: EngineSpec) -> Moments:
    """Return the peak memory of an infer or update node, by pipeline stage and item.

    The memory of a pipeline stage is a dictionary from items, such as "activations", to bytes.
    """
    items = {"gathered weights": _gathered_bytes(work), "gradients": gradients(work, spec) if verb == "update" else 0}
    layout = work.layout
    by_stage = {}
    # Layers differ only in whether they have experts.
    sizes = layer_elements(work.model, work, spec, 0), layer_elements(work.model, work, spec, work.model.layers - 1)
    for stage in range(layout.pp):
        name = f"stage {stage + 1} of {layout.pp}" if layout.pp > 1 else ""
        last = stage == layout.pp - 1
        by_stage[name] = {
            **items,
            "activations": _activation_bytes(verb, work, spec, stage, sizes),
            "logits": _logits_bytes(verb, work) if last else 0,
        }
    return by_stage


def gradients(work: Workload, spec: EngineSpec) -> int:
    """Return the bytes of float32 gradients on the busiest rank.

    From ZeRO 2 on, gradients are sharded over dp.
    """
    return GRADIENT * count_busiest_elements(
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
    return -(-work.rows * (work.prompt + work.response) // work.layout.cp)


def layer_elements(model: Model, work: Workload, spec: EngineSpec, layer: int) -> int:
    """Return how many elements per token a layer saves for its backward pass.

    - A dense layer saves 4 h + (2 a d + 2 k d + 4 f) / tp elements, with the hidden size h, a heads and k key-value
      heads of size d, and the intermediate size f. If the engine shards sequences, the 4 h are also divided by tp.
    - With latent attention, a layer saves the latents and the expanded heads (arXiv:2405.04434).
    - A layer with experts sends a copy of each token to each expert that the router chooses for the token. The copies
      are spread evenly over ep. For each copy, the layer saves the input, the output and 4 f elements.
    """
    tp = work.layout.tp
    replicated = 4 * model.hidden
    sharded = 0
    if model.latent is None:
        sharded += 2 * model.heads * model.head_dim + 2 * model.kv_heads * model.head_dim
    else:
        part = model.latent
        replicated += part.q_rank + part.kv_rank + part.rope
        sharded += model.heads * (2 * (part.nope + part.rope) + 2 * part.value)
    if layer < model.dense_layers or model.experts is None:
        sharded += 4 * model.intermediate
    else:
        routed = model.experts
        replicated += routed.number  # the router's scores
        # Tokens sent to experts are sharded over tp. Each of an expert's etp ranks receives all of them and holds a
        # part of the width.
        sharded += 4 * routed.shared + routed.active * (2 * model.hidden * work.layout.etp + 4 * routed.intermediate)
    return -(-replicated // (tp if spec.memory.divides_sequence else 1)) + -(-sharded // tp)


def _activation_bytes(verb: str, work: Workload, spec: EngineSpec, stage: int, sizes: tuple[int, int]) -> int:
    """Return the activation bytes of a pipeline stage, in all micro-batches in flight.

    `sizes` has the numbers of elements that two kinds of layers save per token: a layer without experts, and a layer
    with experts. An update saves the activations of all layers. With full recomputation, an update saves only the input
    of each layer, and all activations of one layer. If activations are offloaded, only the activations of two layers
    are on the device. An infer node holds the activations of one layer.
    """
    model = work.model
    layout = work.layout
    first = model.dense_layers
    begin = model.first_trained if verb == "update" else 0
    stretches = [(max(start, begin), max(stop, begin)) for start, stop in layout.stage_layers(stage, model.layers)]
    dense = sum(max(0, min(stop, first) - start) for start, stop in stretches)
    layers = sum(stop - start for start, stop in stretches)
    largest = max([sizes[0]] * (dense > 0) + [sizes[1]] * (layers > dense), default=0)
    layer_input = -(-model.hidden // (layout.tp if spec.memory.divides_sequence else 1))
    if verb != "update":
        elements = largest
    elif work.activations_away:  # two layers at a time have their activations on the device
        elements = 2 * layer_input + largest if work.recompute else 2 * largest
    elif work.recompute:
        inputs = layer_input * layers
        elements = round(inputs * in_flight(work, stage)) + largest
    else:
        elements = round((dense * sizes[0] + (layers - dense) * sizes[1]) * in_flight(work, stage))
    return _micro_batch_tokens(work) * elements * BYTES[work.dtype]


def stored(work: Workload, spec: EngineSpec) -> int:
    """Return the bytes of activations that a device saves for later backward passes.

    The bytes are those of the pipeline stage that saves the most. They include all micro-batches whose forward pass is
    done and whose backward pass is not.
    """
    sizes = layer_elements(work.model, work, spec, 0), layer_elements(work.model, work, spec, work.model.layers - 1)
    once = replace(work, activations_away=False)
    most = max(_activation_bytes("update", once, spec, stage, sizes) for stage in range(work.layout.pp))
    return most - _micro_batch_tokens(work) * max(sizes) * BYTES[work.dtype] * work.recompute


def _logits_bytes(verb: str, work: Workload) -> int:
    """Return the bytes of a micro-batch's logits on one device.

    The logits exist in the weights' type and in float32. In an update, their float32 gradient is added.
    """
    per_logit = BYTES[work.dtype] + (8 if verb == "update" else 4)
    scored = -(-work.rows * work.response // work.layout.cp)
    return scored * -(-work.model.outputs // work.layout.tp) * per_logit
