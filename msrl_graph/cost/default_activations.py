"""What an engine that gives no account of its own holds in an infer or an update: the tensors that a layer's backward
needs, with attention scores never stored, counted as arXiv:2205.05198 counts them.

Invariant: a moment is one pipeline stage at its fullest. Weights and gradients are the busiest stage's, of all stages:
first and last hold the embedding and the head, which are alike.
"""

from __future__ import annotations

from dataclasses import replace

from ..backends.sizes import GRADIENT
from ..backends.spec import BYTES, EngineSpec, Moments
from ..ir.workload import Workload, in_flight
from ..model.architecture import Model
from ..sharding.layout import Side, held


def moments(verb: str, work: Workload, spec: EngineSpec) -> Moments:
    """The moments of an infer or an update, one a stage, in bytes."""
    items = {"gathered weights": _gathered(work), "gradients": gradients(work, spec) if verb == "update" else 0}
    layout = work.layout
    found = {}
    # Layers differ only in whether they have experts.
    sizes = layer_elements(work.model, work, spec, 0), layer_elements(work.model, work, spec, work.model.layers - 1)
    for stage in range(layout.pp):
        name = f"stage {stage + 1} of {layout.pp}" if layout.pp > 1 else ""
        last = stage == layout.pp - 1
        found[name] = {
            **items,
            "activations": _activations(verb, work, spec, stage, sizes),
            "logits": _logits(verb, work) if last else 0,
        }
    return found


def gradients(work: Workload, spec: EngineSpec) -> int:
    """As many as weights, divided over dp from ZeRO 2, in float32."""
    return GRADIENT * held(work.model.kinds, Side(work.layout, work.layout.zero >= 2, spec.multiple(work.layout)))


def _gathered(work: Workload) -> int:
    """What computing adds where weights are divided over dp: two layers at ZeRO 3 (one in use, one on its way), all of
    them below."""
    if not work.divided:
        return 0
    whole = held(work.model.kinds, Side(work.layout)) * BYTES[work.dtype]
    return whole if work.layout.zero < 3 else whole * 2 // max(2, work.model.layers)


def _tokens(work: Workload) -> int:
    """Of a micro-batch, on a rank of its context-parallel group."""
    return -(-work.rows * (work.prompt + work.response) // work.layout.cp)


def layer_elements(model: Model, work: Workload, spec: EngineSpec, layer: int) -> int:
    """How many elements for each token a layer keeps for its backward pass.

    - A dense layer: 4 h + (2 a d + 2 k d + 4 f) / tp, with the hidden size h, a heads and k key-value heads of size
      d, and the intermediate size f; the first part over tp too where sequences are divided.
    - Latent attention keeps its latents and the expanded heads (arXiv:2405.04434).
    - Experts see `active` copies of a token, spread evenly over ep; each keeps its input, its output and 4 f.
    """
    tp = work.layout.tp
    whole = 4 * model.hidden
    divided = 0
    if model.latent is None:
        divided += 2 * model.heads * model.head_dim + 2 * model.kv_heads * model.head_dim
    else:
        part = model.latent
        whole += part.q_rank + part.kv_rank + part.rope
        divided += model.heads * (2 * (part.nope + part.rope) + 2 * part.value)
    if model.experts is None or layer < model.experts.first:
        divided += 4 * model.intermediate
    else:
        routed = model.experts
        whole += routed.number  # the router's scores
        # On their way to experts tokens are divided over tp; of an expert's etp ranks each sees them all and holds a
        # part of the width.
        divided += 4 * routed.shared + routed.active * (2 * model.hidden * work.layout.etp + 4 * routed.intermediate)
    return -(-whole // (tp if spec.divides_sequence else 1)) + -(-divided // tp)


def _activations(verb: str, work: Workload, spec: EngineSpec, stage: int, sizes: tuple[int, int]) -> int:
    """Of all micro-batches on their way through a stage, whose layers without experts and with them have `sizes`. Full
    recomputation keeps each layer's input, and one layer whole; inference keeps one layer."""
    model = work.model
    layout = work.layout
    first = model.experts.first if model.experts else model.layers
    stretches = layout.stage_layers(stage, model.layers)
    dense = sum(max(0, min(stop, first) - start) for start, stop in stretches)
    layers = sum(stop - start for start, stop in stretches)
    largest = max([sizes[0]] * (dense > 0) + [sizes[1]] * (layers > dense), default=0)
    each = -(-model.hidden // (layout.tp if spec.divides_sequence else 1))
    if verb != "update":
        elements = largest
    elif work.activations_away:  # two layers at a time have what they keep on the device
        elements = 2 * each + largest if work.recompute else 2 * largest
    elif work.recompute:
        kept = each * layers
        elements = round(kept * in_flight(work, stage)) + largest
    else:
        elements = round((dense * sizes[0] + (layers - dense) * sizes[1]) * in_flight(work, stage))
    return _tokens(work) * elements * BYTES[work.dtype]


def stored(work: Workload, spec: EngineSpec) -> int:
    """Bytes that the layers of the fullest stage keep between forward and backward, of all micro-batches on their
    way."""
    sizes = layer_elements(work.model, work, spec, 0), layer_elements(work.model, work, spec, work.model.layers - 1)
    once = replace(work, activations_away=False)
    most = max(_activations("update", once, spec, stage, sizes) for stage in range(work.layout.pp))
    return most - _tokens(work) * max(sizes) * BYTES[work.dtype] * work.recompute


def _logits(verb: str, work: Workload) -> int:
    """Logits of a micro-batch in the weights' type and in float32, and in an update their gradient in float32."""
    each = BYTES[work.dtype] + (8 if verb == "update" else 4)
    scored = -(-work.rows * work.response // work.layout.cp)
    return scored * -(-work.model.outputs // work.layout.tp) * each
