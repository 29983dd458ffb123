"""Megatron's bytes of memory at each moment of an `infer` or `update` node.

A moment is one instant of a pass, such as "in attention". For each moment, this file counts the bytes of all tensors
except weights and optimizer states. The counts assume the setup of engine.py: eager layers without Transformer Engine,
sequence parallelism if tp > 1, and the 1F1B schedule.

Invariant: all tensors of a moment exist at the same time, on the busiest rank of one pipeline stage. The file counts
the tensor storages that are kept by autograd or by a variable of a running layer. bench/memory.py with the option
--engines "megatron vllm" compares these bytes with measurements.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...ir.workload import Workload
from ..memory.sizes import optimizer_step, sum_copies
from ..spec import Moments
from .stage_sizes import StageLayer, StageSizes


def moments(verb: str, work: Workload) -> Moments:
    """Return the bytes at each moment (instant) of an `infer` or `update` node.

    Each pipeline stage has its own moments. If several stages have the same number of layers, only the first of them is
    counted, because it has the most micro-batches in flight.
    """
    all_moments: Moments = {}
    seen = set()
    first = StageSizes(work)
    for stage in range(work.layout.pp):
        sizes = StageSizes(work, stage, first) if stage else first
        if (signature := (sizes.layers, sizes.trained_layers, sizes.first, sizes.last_stage)) in seen:
            continue
        seen.add(signature)
        where = f", stage {stage + 1} of {work.layout.pp}" if work.layout.pp > 1 else ""
        stage_moments = _update(sizes) if verb == "update" else _infer(sizes)
        all_moments |= {name + where: {"rows": sizes.rows, **items} for name, items in stage_moments}
        if verb == "update":
            all_moments |= {name + where: items for name, items in (optimizer_step(sizes) | sum_copies(sizes)).items()}
    return all_moments


def stored(work: Workload) -> int:
    """Return the bytes that the fullest pipeline stage saves for the backward pass.

    The bytes are the saved activations of all micro-batches that the stage has in flight.
    """
    first = StageSizes(work)
    stages = [first, *(StageSizes(work, stage, first) for stage in range(1, work.layout.pp))]
    return max(round(sizes.stored * sizes.in_flight_batches) for sizes in stages)


Named = Iterator[tuple[str, dict[str, int]]]


def _infer(s: StageSizes) -> Named:
    """Yield the bytes at each moment of a forward pass without a backward pass.

    At each moment, the tensors of the running layer exist. The layer's input, the input of the stage's first layer, and
    the stage's output for the previous micro-batch also exist.
    """
    several = sum(s.layers) > s.work.layout.vpp
    before = (s.work.batches > 1) * (s.requested_states if s.last_stage else s.part)
    if s.work.layout.vpp > 1:  # another chunk's output, and the input that was received for the next chunk
        before = 2 * s.part
    base = s.angles + (1 + several) * s.part + s.buffer + before
    kinds = [kind for kind, count in zip(s.kinds, s.layers, strict=True) if count]
    yield "in attention", {"activations": base + max(map(_attention, kinds), default=0)}
    if dense := [kind.wide for kind in kinds if kind.experts is None]:
        yield "in a feed-forward half", {"activations": base + 2 * s.part + 5 * max(dense)}
    if routed := [_routed(kind) for kind in kinds if kind.experts]:
        yield "in experts", {"activations": base + 2 * s.part + max(routed)}
    if s.last_stage:
        # The received input still exists.
        received = (s.work.layout.pp > 1) * s.part
        yield (
            "in the head",
            {"logits": s.head_sizes.inference, "activations": s.requested_states + s.buffer + before + received},
        )


def _attention(layer: StageLayer) -> int:
    """Return the bytes that attention needs in a pass without gradients.

    The bytes are for the normed input, the product of query, key and value, rotated queries and keys, all of them laid
    out by row, and the output.
    """
    s = layer.whole
    turned = s.tokens * (layer.query + layer.keys) * (2 if layer.mixer.head_norms else 1)
    by_row = s.row_tokens * (2 * layer.query + 2 * layer.attended_keys)
    return s.part + layer.qkv + turned + by_row + layer.context_parallel_extra(False) + layer.latents


def _routed(layer: StageLayer) -> int:
    """Return the bytes that experts need in a pass without gradients.

    The bytes are for the hidden states that were sent, the received hidden states, the received hidden states sorted by
    expert, each expert's result, and the concatenation of the results. With etp, each rank's part of the results is
    copied before and after the ranks add them up.
    """
    layout = layer.whole.work.layout
    copies = layer.routed * ((layout.ep > 1) + 2 * (layout.etp > 1))
    return copies + 4 * layer.received + 8 * layer.sent


def _update(s: StageSizes) -> Named:
    """Yield the bytes at each moment of forward and backward passes.

    With several micro-batches, the gradients of earlier micro-batches exist during the whole pass. With a single
    micro-batch, gradients appear one by one, from the last layer to the first layer.
    """
    work = s.work
    summed = s.work.batches > 1
    layers = [layer for stretch in s.trained_stretches for layer in range(*stretch)]
    rest = s.gradients if summed else 0
    others = round((s.in_flight_batches - 1) * s.kept)  # micro-batches whose turn comes later
    base = s.schedule_state + others
    # Whether a parameter's gradient exists next to its sum: always if they differ in type, else only if the sum exists
    # already.
    separate = summed or s.item != s.gradient
    head = s.head * bool(s.head_gradient)
    embedding = s.head * bool(s.embedding_gradient)
    if s.last_stage:
        states = s.states
        logits = s.head_sizes.forward
        yield "the end of forward", {"gradients": rest, "activations": base + s.kept + states, "logits": logits}
        yield (
            "backward in the head",
            {
                "gradients": rest + head * s.item,
                "activations": base + s.kept + states + s.head_sizes.states_gradients,
                "logits": s.head_sizes.backward,
            },
        )
        yield (
            "the head's gradient",
            {
                "gradients": rest + head * (s.item * separate + s.gradient * (not summed)),
                "activations": base + s.kept + states + s.requested_states,
            },
        )
    of_layers = s.gradients - s.gradient * (
        head * s.last_stage + embedding * s.first * (not work.model.tied or work.layout.pp > 1)
    )
    named = {0: "the first", len(layers) - 1: "the last"} if layers else {}
    if changes := [
        i for i in range(len(layers) - 1) if layers[i] in s.whole_layers and layers[i + 1] not in s.whole_layers
    ]:
        named.setdefault(changes[-1], "the last recomputed")
    for index, name in named.items():
        layer = s.kinds[work.model.kind_of_layer[layers[index]]]
        above = len(layers) - 1 - index
        done = rest if summed else of_layers * above // len(layers) + s.gradient * head * s.last_stage
        # The layers whose activations are on the device.
        layer_activations = s.sum_kept(layers[max(0, index - 1) if work.activations_away else 0 : index + 1])
        if is_whole := layers[index] in s.whole_layers:  # it has its input already, and its output twice
            layer_activations += layer.saved - (s.item == 4) * s.part + s.part
        for half, items in _backward(layer, separate, summed, is_whole):
            yield (
                f"{half} of {name} layer",
                {
                    "gradients": done + items["gradients"],
                    "activations": base + layer_activations + s.part + items["activations"],
                },
            )
    if s.first:
        # The gradient of a sharded embedding's output is gathered, and other ranks' rows are masked.
        yield (
            "the embedding's gradient",
            {
                "gradients": s.gradients + embedding * s.item * (separate or work.model.tied),
                "activations": s.schedule_state + s.part + s.hidden + s.whole_part,
            },
        )
    if matrices := [kind.matrix for kind, count in zip(s.kinds, s.layers, strict=True) if kind.experts and count]:
        # Gradients of experts' parameters are copied together, matrix by matrix; gate and up are one parameter.
        joined = s.largest if s.is_adapted else 2 * max(matrices) // s.item
        yield "experts' gradients are joined", {"gradients": s.gradients + s.gradient * joined}


def _backward(layer: StageLayer, separate: bool, summed: bool, is_whole: bool) -> Named:
    """Yield the change in bytes during each part of a layer's backward pass.

    The change is relative to the start of the layer's backward pass. At that start, all tensors saved by the layer and
    the gradient of the layer's output exist, also if the layer is recomputed as a whole (`is_whole`). Recomputed parts
    of another layer do not exist yet. A change is negative if more bytes are freed than allocated.
    """

    s = layer.whole

    def gradients(before: int, now: int) -> int:
        """Return the bytes of the gradients of some of a layer's weight matrices.

        `before` is the number of matrices whose gradients are complete. `now` is the number of matrices whose gradients
        are being computed. If the weights have another type than the sums of gradients, the gradients that are being
        computed also exist in the weights' type, before they are added to their sums. Gradients of an adapter's
        matrices are so small that they are left out.
        """
        if s.is_adapted:
            return 0
        return layer.matrix // s.item * (s.gradient * (0 if summed else before + now) + s.item * now * separate)

    again = 0 if is_whole else layer.recomputed_feed
    if layer.experts:
        number = layer.experts.number // s.work.layout.ep
        yield (
            "backward in experts",
            {"activations": again + 2 * layer.received + 3 * layer.inner // number, "gradients": 0},
        )
    else:
        yield "backward in gate times up", {"activations": again + 2 * layer.wide, "gradients": gradients(1, 0)}
        yield (
            "the gradient of gate and up",
            {
                "activations": again + s.hidden + (s.work.layout.tp > 1) * s.part - 3 * layer.wide,
                "gradients": gradients(1, 2),
            },
        )
        yield "the gradient of down", {"activations": again + s.whole_part + layer.wide, "gradients": gradients(0, 1)}
    freed = layer.feed + s.norm + s.tokens * layer.query
    by_row = s.row_tokens * (2 * layer.query + 2 * layer.attended_keys)
    activations = by_row + layer.context_parallel_extra(True) - freed
    if not is_whole:
        activations += layer.recomputed_feed + layer.recomputed_norms + layer.recomputed_attention
    yield "backward in attention", {"activations": activations, "gradients": gradients(3, 0)}
