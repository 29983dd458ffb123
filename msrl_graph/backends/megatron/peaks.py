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
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from ...ir.workload import Workload, in_flight
from ...model.architecture import is_copied
from ...sharding.layout import Side, TensorKind, box_at, elements, stage_parts
from ..sizes import CHUNK, GRADIENT, Sizes, context_parallel_extra, optimizer_step
from ..spec import Moments

# A rank's part of the vocabulary is padded to a multiple of this (make_vocab_size_divisible_by).
PADDED = 128


def moments(verb: str, work: Workload) -> Moments:
    """Return the bytes at each moment (instant) of an `infer` or `update` node.

    Each pipeline stage has its own moments. If several stages have the same number of layers, only the first of them is
    counted, because it has the most micro-batches in flight.
    """
    all_moments: Moments = {}
    seen = set()
    for stage in range(work.layout.pp):
        sizes = _Stage(work, stage)
        if (signature := (sizes.layers, sizes.first, sizes.last_stage)) in seen:
            continue
        seen.add(signature)
        where = f", stage {stage + 1} of {work.layout.pp}" if work.layout.pp > 1 else ""
        stage_moments = _update(sizes) if verb == "update" else _infer(sizes)
        all_moments |= {name + where: {"rows": sizes.rows, **items} for name, items in stage_moments}
        if verb == "update":
            all_moments |= {name + where: items for name, items in (optimizer_step(sizes) | _sum(sizes)).items()}
    return all_moments


def _sum(s: _Stage) -> Moments:
    """Return the bytes that exist while replicated weights' gradients are summed.

    The sum is over tp, and is computed bucket by bucket.
    """
    own = tuple(kind for kind in s.work.model.kinds if is_copied(kind.tensor))
    if s.work.layout.tp == 1 or not own:
        return {}
    bucket = min(sum(s.parts(own)), max(CHUNK, max(kind.tensor.elements for kind in own)))
    return {"the sum of copies' gradients": {"gradients": s.gradients, "workspace": GRADIENT * bucket}}


def stored(work: Workload) -> int:
    """Return the bytes that the fullest pipeline stage saves for the backward pass.

    The bytes are the saved activations of all micro-batches that the stage has in flight.
    """
    stages = [_Stage(work, stage) for stage in range(work.layout.pp)]
    return max(round(sizes.stored * sizes.in_flight_batches) for sizes in stages)


@dataclass(frozen=True)
class _Stage(Sizes):
    """Sizes of the tensors on a rank of one pipeline stage.

    Inside attention and the feed-forward half of a layer, a tp rank has all tokens. In all other places, a tp rank has
    only its own share of the tokens (`part`), because of sequence parallelism.
    """

    stage: int = 0

    @cached_property
    def side(self) -> Side:
        return Side(self.work.layout, multiple=PADDED)

    def parts(self, tensor_kinds: tuple[TensorKind, ...]) -> tuple[int, int]:
        return stage_parts(tensor_kinds, self.side)[self.stage]

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last_stage(self) -> bool:
        return self.stage == self.work.layout.pp - 1

    @cached_property
    def layers(self) -> tuple[int, int]:
        """The number of the stage's dense layers, and of its layers with experts."""
        model = self.work.model
        stretches = self.work.layout.stage_layers(self.stage, self.work.model.layers)
        dense = sum(max(0, min(stop, model.dense_layers) - start) for start, stop in stretches)
        return dense, sum(stop - start for start, stop in stretches) - dense

    @cached_property
    def gradients(self) -> int:
        return GRADIENT * self.elements

    @cached_property
    def part(self) -> int:
        """Bytes of the hidden states of this rank's share of the tokens, at one layer.

        With tensor parallelism, each tp rank has a share of the tokens (sequence parallelism).
        """
        return self.split(self.tokens) * self.work.model.hidden * self.item

    @cached_property
    def whole_part(self) -> int:
        """Bytes of the hidden states of all tokens, gathered from all tp ranks.

        The result is 0 without tp. A pass has one buffer of this size. The backward pass has a second buffer of this
        size while the gradient of a row-parallel product is gathered.
        """
        return self.hidden if self.work.layout.tp > 1 else 0

    @cached_property
    def norm(self) -> int:
        """Bytes of the tensors that a torch.nn.RMSNorm keeps for the backward pass.

        The tensors are the norm's input, the normed input and the scaled result. In bf16 the norm keeps a float32 copy
        of its input, and the normed input in float32.
        """
        return (3 if self.item == 4 else 5) * self.part

    @cached_property
    def qkv(self) -> int:
        """Bytes of queries, keys and values together, which one matrix product computes."""
        return self.tokens * (self.query + 2 * self.keys)

    @cached_property
    def heads(self) -> int:
        """Bytes of the tensors that the norms of query heads and of key heads keep.

        The tensors are the norms' inputs and the normed values. In float32 the inputs are views of the queries, keys
        and values (`qkv`), so all of `qkv` is kept. In bf16 the inputs are float32 copies.
        """
        pair = self.tokens * (self.query + self.keys)
        return (self.qkv + pair if self.item == 4 else 4 * pair) * self.work.model.norms_heads

    @cached_property
    def latents(self) -> int:
        """Bytes of latent attention's latents, and of tensors that norms of latents keep."""
        latent = self.work.model.latent
        return self.tokens * (3 * (latent.q_rank + latent.kv_rank) + latent.rope) * self.item if latent else 0

    def feed(self, routes: bool) -> int:
        """Return the bytes of the tensors that a layer's feed-forward half keeps.

        - Without `routes`, the half is dense. It keeps the concatenation of gate and up, silu(gate), up + 0 (Megatron
          adds an offset), and silu(gate) * (up + 0).
        - With `routes`, the half has experts. It keeps the tensors of a dense half for the tokens that the rank's
          experts receive. It also keeps the product scaled by the router's weight, the tokens sorted by expert, the
          index of each token, the router's weights, the router's map, and the transposes of these weights and of this
          map.
        """
        experts = self.work.model.experts
        if experts is None or not routes:
            return 5 * self.wide
        map_of = self.split(self.router) * 2 * (self.item + 1) // self.item
        return 6 * self.inner + self.received + 8 * self.sent + map_of + 5 * self.shared

    @cached_property
    def received(self) -> int:
        """Bytes of the hidden states that a rank's experts receive.

        Each etp rank receives the hidden states that are sent to any of the etp ranks.
        """
        return self.routed * self.work.layout.etp

    def saved(self, routes: bool) -> int:
        return 2 * self.norm + self.attention + self.heads + self.latents + self.feed(routes)

    @cached_property
    def kept(self) -> int:
        """Bytes that layers save on the device; 0 if activations are offloaded.

        The bytes are for one micro-batch. Without offload, the result equals `stored`.
        """
        return 0 if self.work.activations_away else self.stored

    @cached_property
    def stored(self) -> int:
        """Bytes that the stage's layers save for the backward pass of one micro-batch.

        With recomputation, each layer saves only its input.
        """
        dense, routed = self.layers
        if self.work.recompute:
            return (dense + routed) * self.part
        return dense * self.saved(False) + routed * self.saved(True)

    @cached_property
    def in_flight_batches(self) -> float:
        """The number of micro-batches whose activations the stage holds at the same time.

        A micro-batch counts as a fraction if only some of the stage's chunks hold its activations.
        """
        return in_flight(self.work, self.stage)

    @cached_property
    def schedule_state(self) -> int:
        """Bytes that micro-batches in flight hold in addition to saved activations.

        The bytes are for the rotary angles, the gather buffer (`whole_part`), and the output of each chunk except the
        model's last chunk. The schedule holds an output until the output's gradient arrives. The autograd graph of a
        recomputed layer holds the angles as long as the loss exists.
        """
        vpp = self.work.layout.vpp
        outputs = ceil(self.in_flight_batches * vpp) - self.last_stage
        angles = ceil(self.in_flight_batches) + (self.work.recompute and self.work.batches > 1)
        return angles * self.angles + outputs * self.part * (self.work.layout.pp > 1) + self.whole_part

    @cached_property
    def states(self) -> int:
        """Bytes of the requested states, and of the tensors that the last norm keeps.

        The requested states are the hidden states for which logits are computed. The result of the last norm is not
        included.
        """
        return self.norm - self.part + self.requested_states

    @cached_property
    def requested_states(self) -> int:
        return self.scored * self.work.model.hidden * self.item

    @cached_property
    def logits(self) -> int:
        """Bytes of the float32 logits on this rank, for all tokens that have outputs.

        The rank has the logits of its part of the vocabulary. A scoring model has one float32 value per token instead.
        """
        rows = 1 if self.work.model.scores else self.head // self.work.model.hidden
        return 4 * self.scored * rows

    @cached_property
    def head(self) -> int:
        """The number of elements of the head on this rank; the embedding is as large."""
        kind = next(candidate for candidate in self.work.model.kinds if candidate.tensor.padded)
        return elements(box_at(kind.tensor, self.side, (0, 0, 0)))


Named = Iterator[tuple[str, dict[str, int]]]


def _infer(s: _Stage) -> Named:
    """Yield the bytes at each moment of a forward pass without a backward pass.

    At each moment, the tensors of the running layer exist. The layer's input, the input of the stage's first layer, and
    the stage's output for the previous micro-batch also exist.
    """
    several = sum(s.layers) > s.work.layout.vpp
    before = (s.work.batches > 1) * (s.requested_states if s.last_stage else s.part)
    if s.work.layout.vpp > 1:  # another chunk's output, and the input that was received for the next chunk
        before = 2 * s.part
    base = s.angles + (1 + several) * s.part + s.whole_part + before
    # The normed input; the product of query, key and value; rotated queries and keys; all laid out; and the output.
    turned = s.tokens * (s.query + s.keys) * (2 if s.work.model.norms_heads else 1)
    attention = (
        s.part
        + s.qkv
        + turned
        + s.row_tokens * (2 * s.query + 2 * s.attended_keys)
        + context_parallel_extra(s, False)
        + s.latents
    )
    yield "in attention", {"activations": base + attention}
    dense, routed = s.layers
    if dense:
        yield "in a feed-forward half", {"activations": base + 2 * s.part + 5 * s.wide}
    if routed:
        yield "in experts", {"activations": base + 2 * s.part + _routed(s)}
    if s.last_stage:
        # Logits, logits minus their maximum, and exponentials; the received input still exists.
        received = (s.work.layout.pp > 1) * s.part
        yield (
            "in the head",
            {"logits": 3 * s.logits, "activations": s.requested_states + s.whole_part + before + received},
        )


def _routed(s: _Stage) -> int:
    """Return the bytes that experts need in a pass without gradients.

    The bytes are for the hidden states that were sent, the received hidden states, the received hidden states sorted by
    expert, each expert's result, and the concatenation of the results.
    """
    return s.routed * (s.work.layout.ep > 1) + 4 * s.received + 8 * s.sent


def _update(s: _Stage) -> Named:
    """Yield the bytes at each moment of forward and backward passes.

    With several micro-batches, the gradients of earlier micro-batches exist during the whole pass. With a single
    micro-batch, gradients appear one by one, from the last layer to the first layer.
    """
    work = s.work
    summed = s.work.batches > 1
    layers = sum(s.layers)
    rest = s.gradients if summed else 0
    others = round((s.in_flight_batches - 1) * s.kept)  # micro-batches whose turn comes later
    base = s.schedule_state + others
    # Whether a parameter's gradient exists next to its float32 sum: always with bf16 weights, with float32 weights only
    # if the sum exists already.
    separate = summed or s.item == 2
    table = s.head * s.item if s.last_stage or s.first else 0
    if s.last_stage:
        states = s.states
        # Logits, their exponentials, which are kept, and for an entropy the probabilities and their product with the
        # logits.
        yield "the end of forward", {"gradients": rest, "activations": base + s.kept + states, "logits": 4 * s.logits}
        # Gradients of the token's logit and of the divisor; an entropy with a graph keeps logits and probabilities,
        # and each has a gradient.
        yield (
            "backward in the head",
            {
                "gradients": rest,
                "activations": base + s.kept + states,
                "logits": (3 + 3 * work.entropy) * s.logits,
            },
        )
        yield (
            "the head's gradient",
            {
                "gradients": rest + s.head * (s.item * separate + 4 * (not summed)),
                "activations": base + s.kept + states + s.requested_states,
                "logits": s.logits * s.item // 4,
            },
        )
    ends = [("the last", layers - 1, s.layers[1] > 0), ("the first", 0, s.layers[0] == 0)]
    of_layers = s.gradients - 4 * s.head * (s.last_stage + s.first * (not work.model.tied or work.layout.pp > 1))
    for name, index, routes in ends if layers else ():
        above = layers - 1 - index
        done = rest if summed else of_layers * above // layers + 4 * s.head * s.last_stage
        saved = s.saved(routes)
        # A recomputed layer has its input already, and its output twice.
        layers_on_device = min(index + 1, 2) if work.activations_away else index + 1  # number of layers on the device
        layer_activations = (
            layers_on_device * s.part + saved - (s.item == 4) * s.part + s.part
            if work.recompute
            else _sum_saved(s, index, layers_on_device)
        )
        for half, items in _backward(s, routes, separate, summed):
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
                "gradients": s.gradients + table * (separate or work.model.tied),
                "activations": s.schedule_state + s.part + s.hidden + s.whole_part,
            },
        )
    if s.layers[1]:
        # Gradients of experts' parameters are copied together, matrix by matrix; gate and up are one parameter.
        yield "experts' gradients are joined", {"gradients": s.gradients + 2 * s.matrix // s.item * 4}


def _sum_saved(s: _Stage, index: int, count: int) -> int:
    """Return the bytes that `count` consecutive layers of a stage save.

    The last of these layers has the number `index` in the stage.
    """
    dense = max(0, min(index + 1, s.layers[0]) - (index + 1 - count))
    return dense * s.saved(False) + (count - dense) * s.saved(True)


def _backward(s: _Stage, routes: bool, separate: bool, summed: bool) -> Named:
    """Yield the change in bytes during each part of a layer's backward pass.

    The change is relative to the start of the layer's backward pass. At that start, all tensors saved by the layer and
    the gradient of the layer's output exist. A change is negative if more bytes are freed than allocated.
    """

    def gradients(before: int, now: int) -> int:
        """Return the bytes of the gradients of some of a layer's weight matrices.

        `before` is the number of matrices whose gradients are complete. `now` is the number of matrices whose gradients
        are being computed. If the weights are not float32, the gradients that are being computed also
        exist in the weights' dtype, before they are added to their float32 sums.
        """
        return s.matrix // s.item * (4 * (0 if summed else before + now) + s.item * now * separate)

    if routes:
        number = s.work.model.experts.number // s.work.layout.ep if s.work.model.experts else 1
        yield "backward in experts", {"activations": 2 * s.received + 3 * s.inner // number, "gradients": 0}
    else:
        yield "backward in gate times up", {"activations": 2 * s.wide, "gradients": gradients(1, 0)}
        yield (
            "the gradient of gate and up",
            {
                "activations": s.hidden + (s.work.layout.tp > 1) * s.part - 3 * s.wide,
                "gradients": gradients(1, 2),
            },
        )
        yield "the gradient of down", {"activations": s.whole_part + s.wide, "gradients": gradients(0, 1)}
    freed = s.feed(routes) + s.norm + s.tokens * s.query
    yield (
        "backward in attention",
        {
            "activations": s.row_tokens * (2 * s.query + 2 * s.attended_keys) + context_parallel_extra(s, True) - freed,
            "gradients": gradients(3, 0),
        },
    )
