"""The bytes of memory that the engine `fsdp` needs, moment by moment.

A moment is one instant of a call, such as "in the head". A call is the work of an `infer` or `update` node. For each
moment, this file counts the bytes of all tensors except weights and optimizer states.

Invariant: all tensors of a moment exist at the same time. So the memory that a call needs is the memory of its fullest
moment, never a sum over moments. If the engine keeps other tensors, this file must change; bench/memory.py compares
these bytes with measurements. Sizes are bytes on the busiest rank, with every column at its maximum length.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...ir.workload import Workload
from ...model.architecture import Model
from ...model.layers import MultiHeadLatentAttention
from ..spec import Moments
from .pass_sizes import PassLayer, PassSizes
from .sizes import optimizer_step, sum_copies


def peaks(verb: str, work: Workload) -> Moments:
    """Return the bytes at each moment when FSDP2 computes an `infer` or `update` node.

    A moment is one instant of the computation in fsdp.py. `verb` is "infer" or "update".
    """
    s = PassSizes(work)
    return _update(s) if verb == "update" else _infer(s)


def stored(work: Workload) -> int:
    """Return the bytes that all layers keep from the forward to the backward pass."""
    return PassSizes(work).sum_kept(work.model.first_trained, work.model.layers)


def _infer(s: PassSizes) -> Moments:
    """Return the bytes at each moment of a forward pass without a backward pass.

    Sharded weights are gathered layer by layer. A layer's weights are first gathered into a flat buffer, and then
    copied from the buffer to tensors. The flat buffer exists until the copy for the next layer is done. For a trained
    model, ZeRO 2 keeps the gathered weights until the end of the pass.
    """
    work = s.work
    # In addition to a layer's input there are either the second half's input, its norm, and products; or queries, keys
    # and values, both by token and laid out by row. With tp, the embeddings are not small next to them.
    states = 4 * s.part if s.whole_part else 3 * s.part
    layer = s.common + max(max(states + kind.products, _attention(kind), kind.scattered) for kind in s.kinds)
    head = s.scored * work.model.hidden * s.item + s.head.inference
    first = kept_weights = gathered = 0
    if work.divided:
        first = 2 * s.ends + 2 * s.layer
        kept_weights = s.all_weights if work.trained and work.layout.zero < 3 else s.ends
        gathered = s.all_weights + s.layer if work.trained and work.layout.zero < 3 else s.ends + 2 * s.layer
    return {
        "the first layer is gathered": {"rows": s.rows, "gathered weights": first, "activations": s.part + s.common},
        "a layer is gathered": {
            "rows": s.rows,
            "gathered weights": gathered + s.layer if work.divided else 0,
            "activations": s.part,
        },
        "in a layer": {"rows": s.rows, "gathered weights": gathered, "activations": layer},
        "in the head": {
            "rows": s.rows,
            "gathered weights": kept_weights + s.layer if work.divided else 0,
            "logits": head,
        },
    } | ({"routes are returned": {"rows": s.rows + 4 * s.routes}} if work.records_routes else {})


def _attention(layer: PassLayer) -> int:
    """Return the peak bytes of a layer's attention in a pass without gradients.

    With a window, the outputs of blocks exist next to their concatenation.
    """
    s = layer.whole
    if layer.recurrent:
        return 3 * s.part + layer.recurrent.inputs + layer.recurrent.scanned
    latent = isinstance(layer.mixer, MultiHeadLatentAttention)
    by_token = s.tokens * (2 * layer.query + (3 if latent else 2) * layer.keys)
    by_row = s.row_tokens * ((2 + layer.is_banded) * layer.query + 2 * layer.attended_keys)
    # Of capped scores: as products, scaled, and the results of two more operators.
    attending = by_row + layer.context_parallel_extra(False) + 4 * 4 * layer.chunk_scores
    return 2 * s.part + by_token + max(attending, s.whole_part)


def _update(s: PassSizes) -> Moments:
    work = s.work
    layers = work.model.layers
    first = work.model.first_trained  # the lowest layer that a backward pass reaches
    summed = work.batches > 1
    kept_activations = 0 if work.activations_away else s.sum_kept(first, layers)
    base = s.common + kept_activations
    states = s.last - s.part * (layers - 1 in s.whole_layers and s.item == 4)
    # Gradients at rest, from the first micro-batch on. If their sums have another type than the weights, each gradient
    # is computed in the weights' type before it is added.
    joins = s.item != s.gradient and not work.divided
    gradients = s.elements * s.gradient
    rest = gradients if summed else 0
    of_layers = gradients - (0 if work.divided else s.end_gradients // s.item * s.gradient)
    # Gathered weights. ZeRO 3: the ends, a layer, and the next layer in a flat buffer. ZeRO 2: all weights, and in
    # forward the last layer's buffer.
    zero3 = work.divided and work.layout.zero >= 3
    top = (s.ends + s.layer if zero3 else s.all_weights) if work.divided else 0
    forward = top + s.layer if work.divided and not zero3 else top
    below = (s.ends + 2 * s.layer if zero3 else s.all_weights) if work.divided else 0
    # In backward, gradients of the ends stay whole to the end. A layer's gradients are reduced from a flat buffer
    # after the layer.
    # The head's gradient waits for the embedding's part (tied), or for the other gradients (sharded).
    pending = work.divided or work.model.tied
    table = s.head_gradient if pending else s.head_gradient // s.item * s.gradient * (not summed)
    moments = {
        "the end of forward": {
            "gathered weights": forward,
            "gradients": rest,
            "activations": base + states,
            "logits": s.head.forward,
        },
        "backward in the head": {
            "gathered weights": top,
            "gradients": rest + s.head_gradient,
            "activations": base + states + s.head.states_gradients,
            "logits": s.head.backward,
        },
        "the head's gradient": {
            "gathered weights": top,
            "gradients": rest + s.head_gradient + (table if joins and not pending else 0),
            "activations": base + states + s.scored * work.model.hidden * s.item,
        },
    }
    if s.whole_part:  # all tokens' states, of which those of the requested tokens are selected
        sums = s.whole_part * (1 + work.on_host)
        made = {
            "the last sums are scattered": (forward, rest, base + sums + s.part),
            "the states are gathered": (forward, rest, base + states + s.whole_part),
            "the states' gradients": (top, rest + s.head_gradient, base + states + 2 * s.whole_part),
        }
        for name, (weights, own, activations) in made.items():
            moments[name] = {"gathered weights": weights, "gradients": own, "activations": activations}
    flat_layer = s.layer_gradients if work.divided else 0
    if work.divided:
        moments["the last layer is gathered"] = {
            "gathered weights": s.ends + 3 * s.layer if zero3 else s.all_weights + 2 * s.layer,
            "gradients": rest,
            "activations": s.common + (0 if work.activations_away else s.sum_kept(first, max(first, layers - 1))),
        }
    # Where gradients are scattered, the last layer but one is the first next to another layer's flat buffer.
    for name, index in _iterate_fullest_layers(work.model, s.whole_layers):
        layer = s.kinds[work.model.kind_of_layer[index]]
        # The gradients of the layer before this one are still in their flat buffer.
        flat_buffer = flat_layer if index + 1 < layers else 0
        complete = s.sum_gradients(index + (2 if flat_buffer else 1))
        gradient_bytes = rest if summed else of_layers * complete // max(1, s.sum_gradients(first))
        # The lowest layer whose activations are on the device.
        held = s.sum_kept(max(first, index - 1) if work.activations_away else first, index + 1)
        is_whole = index in s.whole_layers
        recomputed = layer.saved - (s.part if s.item == 4 else 0) if is_whole else 0
        if layer.experts and (is_whole or layer.mlp_part in work.recompute.parts):
            moments[f"experts' second forward pass in {name}"] = {
                "gathered weights": below - (0 if zero3 else (layers - 1 - index) * flat_layer),
                "gradients": gradient_bytes + table,  # those of the layer before this one are scattered by now
                "activations": s.common + held + recomputed + _count_second_pass(layer, is_whole),
            }
        changes = _backward(layer, is_whole)
        if is_whole and s.whole_part:
            changes["recomputed attention"] = {"activations": _recomputed(layer) - recomputed, "gradients": 0}
        for half, more in changes.items():
            moments[f"backward in {half} of {name}"] = {
                "gathered weights": below - (0 if zero3 else (layers - 1 - index) * flat_layer),
                "gradients": gradient_bytes + table + flat_buffer + more["gradients"],
                "activations": s.common + held + recomputed + more["activations"],
            }
    if work.divided:
        # The ends have gradients, then a flat buffer (twice, because gloo sums a copy of it), and a rank's result
        # from it. The head's gradient is freed last.
        before = gradients if summed else gradients - s.end_gradients // s.item * s.gradient // work.layout.dp
        scattered = s.head_gradient + s.end_gradients // work.layout.dp if work.on_host else 0
        moments["the gradients of the ends are scattered"] = {
            "gradients": before + 2 * s.end_gradients + scattered,
            "activations": s.part,
        }
    else:
        before = gradients
    # The gradient of an embedding is its sum, unless it is added to one.
    embedding = s.embedding_gradient * (summed or joins or work.divided or work.model.tied)
    # The gradient of a tied embedding is added to the head's, and their sum to that of earlier micro-batches.
    ends = s.head_gradient * (1 + work.model.tied if work.divided else work.model.tied * (1 + summed))
    moments["the embedding's gradient"] = {
        "gathered weights": s.ends if work.divided else 0,
        "gradients": before + flat_layer + ends + embedding,
        "activations": s.hidden,
    }
    return {name: {"rows": s.rows, **items} for name, items in moments.items()} | sum_copies(s) | optimizer_step(s)


def _iterate_fullest_layers(model: Model, whole: range) -> Iterator[tuple[str, int]]:
    """Yield the layers whose backward pass may hold the most, with their names.

    These are the first and the last layer that the backward pass reaches, of all layers and of each kind. The layer
    before the last one is the first whose gradients exist next to another layer's. `whole` are the layers that are
    recomputed as a whole.
    """
    last = model.layers - 1
    named = {"the last layer": last, "the last but one layer": last - 1, "the first layer": model.first_trained}
    named |= {f"layer {layer + 1}": layer for layer in (*model.ends_of_kinds, *whole[-1:])}
    names = {layer: name for name, layer in reversed(named.items())}
    return ((name, layer) for name, layer in named.items() if model.first_trained <= layer and names[layer] == name)


def _count_second_pass(layer: PassLayer, is_whole: bool) -> int:
    """Return the bytes that experts need when their outputs are recomputed.

    Next to what they save there are hidden states before and after each exchange.
    """
    s = layer.whole
    exchanged = 4 * layer.routed * (s.work.layout.ep > 1)
    return s.part + exchanged + (0 if is_whole else layer.recomputed_feed)


def _recomputed(layer: PassLayer) -> int:
    """Return the bytes of a recomputed layer while attention's sums are scattered.

    The gradient of the layer's output is already gathered. Queries, keys and values exist by token, too.
    """
    s = layer.whole
    attention = layer.saved - layer.feed - layer.inputs // layer.kind.halves * layer.kind.has_mlp
    if not layer.recurrent:
        attention += s.tokens * (layer.query + 2 * layer.keys)
    return attention + s.part + s.whole_part * (2 + s.work.on_host)


def _backward(layer: PassLayer, is_whole: bool) -> dict[str, dict[str, int]]:
    """Return the change in bytes during the backward pass of each half of a layer.

    The change is relative to the start of the layer's backward pass. At that start, all tensors saved by the layer
    exist, also if the layer is recomputed as a whole (`is_whole`). Recomputed parts of another layer do not exist yet.
    A change is negative if more bytes are freed than allocated.
    """
    s = layer.whole
    # With tp, the gradient of all tokens is gathered; later the input is, next to the sum of its gradients.
    gathered = max(layer.wide + s.whole_part, 2 * s.whole_part - layer.wide) if s.whole_part else 0
    dense = max(2 * layer.wide, gathered)
    feed = s.part + (max(2 * layer.routed, 2 * layer.inner - layer.routed) if layer.experts else dense)
    freed = layer.feed + layer.inputs // layer.kind.halves * layer.kind.has_mlp + s.tokens * layer.query
    by_row = s.row_tokens * ((2 + layer.is_banded) * layer.query + 2 * layer.attended_keys)
    made = by_row + layer.context_parallel_extra(True) + 5 * 4 * layer.chunk_scores
    if s.whole_part:  # the projections' inputs and their gradients, when what attention keeps is freed
        made = max(made, 2 * s.whole_part + s.tokens * (layer.query + 2 * layer.keys) - layer.attention)
    slope = s.tokens * layer.query if s.whole_part else s.hidden
    attention = s.part + slope + (layer.recurrent.backward if layer.recurrent else made) - freed
    if not is_whole:
        feed += layer.recomputed_feed
        attention += layer.recomputed_feed + layer.recomputed_norms + layer.recomputed_attention
    matrix = layer.matrix if s.work.divided else layer.matrix // s.item * s.gradient * (s.work.batches == 1)
    halves = {"the feed-forward half": {"activations": feed, "gradients": matrix}} if layer.kind.has_mlp else {}
    if layer.kind.has_mixer:
        halves["the attention half"] = {"activations": attention, "gradients": layer.kind.mlp.projections * matrix}
    return halves
