"""What Megatron holds in an infer or an update beside weights and optimizer states at rest, moment by moment, as
engine.py runs it: eager layers without Transformer Engine, sequence parallelism with tp, 1F1B.

Invariant: a moment is what lives at one instant on the busiest rank of one stage: storages of tensors, each derived
from what autograd, or a variable of a layer that is under way, keeps of it. bench/memory.py --engines "megatron vllm"
tells whether it still is so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from ...ir.workload import Workload, in_flight
from ...model.architecture import copied
from ...sharding.layout import Side, TensorKind, box_at, elements, stage_parts
from ..sizes import CHUNK, GRADIENT, Sizes, context_parallel_extra, optimizer_step
from ..spec import Moments

# To a multiple of this a rank's part of the vocabulary is padded (make_vocab_size_divisible_by).
PADDED = 128


def moments(verb: str, work: Workload) -> Moments:
    """The moments of an infer or an update, stage by stage; of stages with equally many layers the first, which has
    most micro-batches under way."""
    found: Moments = {}
    seen = set()
    for stage in range(work.layout.pp):
        s = _Stage(work, stage)
        if (alike := (s.layers, s.first, s.last_stage)) in seen:
            continue
        seen.add(alike)
        where = f", stage {stage + 1} of {work.layout.pp}" if work.layout.pp > 1 else ""
        every = _update(s) if verb == "update" else _infer(s)
        found |= {name + where: {"rows": s.rows, **items} for name, items in every}
        if verb == "update":
            found |= {name + where: items for name, items in (optimizer_step(s) | _sum(s)).items()}
    return found


def _sum(s: _Stage) -> Moments:
    """Gradients of copies, added up over tp bucket by bucket."""
    own = tuple(k for k in s.work.model.kinds if copied(k.tensor))
    if s.work.layout.tp == 1 or not own:
        return {}
    bucket = min(sum(s.parts(own)), max(CHUNK, max(k.tensor.elements for k in own)))
    return {"the sum of copies' gradients": {"gradients": s.gradients, "workspace": GRADIENT * bucket}}


def stored(work: Workload) -> int:
    """Bytes that the layers of the fullest stage keep between forward and backward, of all micro-batches under way."""
    stages = [_Stage(work, stage) for stage in range(work.layout.pp)]
    return max(round(s.stored * s.flying) for s in stages)


@dataclass(frozen=True)
class _Stage(Sizes):
    """What a stage's layers keep. Between attention and the feed-forward half a rank of tp has a `part` of the tokens,
    within them all."""

    stage: int = 0

    @cached_property
    def side(self) -> Side:
        return Side(self.work.layout, multiple=PADDED)

    def parts(self, found: tuple[TensorKind, ...]) -> tuple[int, int]:
        return stage_parts(found, self.side)[self.stage]

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last_stage(self) -> bool:
        return self.stage == self.work.layout.pp - 1

    @cached_property
    def layers(self) -> tuple[int, int]:
        """How many layers without experts and with them."""
        model = self.work.model
        stretches = self.work.layout.stage_layers(self.stage, self.work.model.layers)
        begin = model.experts.first if model.experts else model.layers
        dense = sum(max(0, min(stop, begin) - start) for start, stop in stretches)
        return dense, sum(stop - start for start, stop in stretches) - dense

    @cached_property
    def gradients(self) -> int:
        return GRADIENT * self.elements

    @cached_property
    def part(self) -> int:
        """One hidden state of this rank's part of the tokens."""
        return self.split(self.tokens) * self.work.model.hidden * self.item

    @cached_property
    def whole_part(self) -> int:
        """The same of all tokens, where they are gathered out of parts. There is a buffer for it as long as passes
        last, and another where the gradient of a row-parallel product is gathered."""
        return self.hidden if self.work.layout.tp > 1 else 0

    @cached_property
    def norm(self) -> int:
        """torch.nn.RMSNorm: its input (in bf16 a copy in float32), what is normed, in float32 too, and that scaled."""
        return (3 if self.item == 4 else 5) * self.part

    @cached_property
    def both(self) -> int:
        """Queries, keys and values as one product makes them."""
        return self.tokens * (self.query + 2 * self.keys)

    @cached_property
    def heads(self) -> int:
        """What norms of heads keep: views of the product, which hold all of it (in bf16 copies in float32 instead), and
        what is normed."""
        pair = self.tokens * (self.query + self.keys)
        return (self.both + pair if self.item == 4 else 4 * pair) * self.work.model.norms_heads

    @cached_property
    def latents(self) -> int:
        """Latent attention keeps its latents too, normed as well (arXiv:2405.04434)."""
        found = self.work.model.latent
        return self.tokens * (3 * (found.q_rank + found.kv_rank) + found.rope) * self.item if found else 0

    def feed(self, routes: bool) -> int:
        """What the feed-forward half keeps: gate and up as one product, silu of gate, up plus an offset of 0, and their
        product. Of experts that for each token that they get, the product scaled by the router's weight, and the tokens
        sorted by expert; the place of each, and the router's weights and map, twice: as they are, and turned."""
        found = self.work.model.experts
        if found is None or not routes:
            return 5 * self.wide
        map_of = self.split(self.router) * 2 * (self.item + 1) // self.item
        return 6 * self.inner + self.received + 8 * self.sent + map_of + 5 * self.shared

    @cached_property
    def received(self) -> int:
        """Hidden states that a rank's experts get; of etp ranks each has those of all."""
        return self.routed * self.work.layout.etp

    def saved(self, routes: bool) -> int:
        return 2 * self.norm + self.attention + self.heads + self.latents + self.feed(routes)

    @cached_property
    def kept(self) -> int:
        """On the device, of a micro-batch's layers."""
        return 0 if self.work.activations_away else self.stored

    @cached_property
    def stored(self) -> int:
        """Of a micro-batch's layers; with recomputation the input of each."""
        dense, routed = self.layers
        if self.work.recompute:
            return (dense + routed) * self.part
        return dense * self.saved(False) + routed * self.saved(True)

    @cached_property
    def flying(self) -> float:
        """Micro-batches under way at once, in wholes of the stage's layers."""
        return in_flight(self.work, self.stage)

    @cached_property
    def beside(self) -> int:
        """Of micro-batches under way: angles of positions, and of each chunk that is not the last of all its output,
        which the schedule holds until its gradient is there. What a layer is computed again from holds angles as long
        as its loss is known."""
        vpp = self.work.layout.vpp
        outputs = ceil(self.flying * vpp) - self.last_stage
        angles = ceil(self.flying) + (self.work.recompute and self.work.batches > 1)
        return angles * self.angles + outputs * self.part * (self.work.layout.pp > 1) + self.whole_part

    @cached_property
    def states(self) -> int:
        """What the last norm keeps but for its result, and the states whose logits are asked for."""
        return self.norm - self.part + self.asked

    @cached_property
    def asked(self) -> int:
        return self.scored * self.work.model.hidden * self.item

    @cached_property
    def logits(self) -> int:
        """Of all scored tokens, in float32, of this rank's part of the vocabulary; or their values."""
        rows = 1 if self.work.model.scores else self.head // self.work.model.hidden
        return 4 * self.scored * rows

    @cached_property
    def head(self) -> int:
        """Elements of the head, or of the embedding."""
        kind = next(k for k in self.work.model.kinds if k.tensor.padded)
        return elements(box_at(kind.tensor, self.side, (0, 0, 0)))


Named = Iterator[tuple[str, dict[str, int]]]


def _infer(s: _Stage) -> Named:
    """Forward alone. Beside what a layer makes there are its input, the input of the stage's first layer, and what the
    stage gave of the micro-batch before."""
    several = sum(s.layers) > s.work.layout.vpp
    before = (s.work.batches > 1) * (s.asked if s.last_stage else s.part)
    if s.work.layout.vpp > 1:  # what another chunk gave, and what was received for the next
        before = 2 * s.part
    beside = s.angles + (1 + several) * s.part + s.whole_part + before
    # The input normed; all in one product, turned queries and keys, all laid out, and the output.
    turned = s.tokens * (s.query + s.keys) * (2 if s.work.model.norms_heads else 1)
    attention = (
        s.part
        + s.both
        + turned
        + s.row_tokens * (2 * s.query + 2 * s.attended_keys)
        + context_parallel_extra(s, False)
        + s.latents
    )
    yield "in attention", {"activations": beside + attention}
    dense, routed = s.layers
    if dense:
        yield "in a feed-forward half", {"activations": beside + 2 * s.part + 5 * s.wide}
    if routed:
        yield "in experts", {"activations": beside + 2 * s.part + _routed(s)}
    if s.last_stage:
        # Logits, the same less the highest, and their exponentials; what the stage received is there still.
        received = (s.work.layout.pp > 1) * s.part
        yield "in the head", {"logits": 3 * s.logits, "activations": s.asked + s.whole_part + before + received}


def _routed(s: _Stage) -> int:
    """Of experts at work without gradients: what was sent, what arrived, that sorted by expert, what each expert makes
    of it, and that as one."""
    return s.routed * (s.work.layout.ep > 1) + 4 * s.received + 8 * s.sent


def _update(s: _Stage) -> Named:
    """Forward and backward, at the gradients of all but the first of several micro-batches, or of the only one: then
    they come one by one, from the last layer on."""
    work = s.work
    summed = s.work.batches > 1
    layers = sum(s.layers)
    rest = s.gradients if summed else 0
    others = round((s.flying - 1) * s.kept)  # of micro-batches whose turn is not yet
    base = s.beside + others
    # A parameter's gradient beside the sum that it is added to: in bf16 always, in float32 where there is one already.
    apart = summed or s.item == 2
    table = s.head * s.item if s.last_stage or s.first else 0
    if s.last_stage:
        states = s.states
        # Logits, their exponentials, which are kept, and of an entropy the probabilities and these times the logits.
        yield "the end of forward", {"gradients": rest, "activations": base + s.kept + states, "logits": 4 * s.logits}
        # Gradients of the token's logit and of what it is divided by; an entropy with a graph keeps logits and
        # probabilities, and each has a gradient.
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
                "gradients": rest + s.head * (s.item * apart + 4 * (not summed)),
                "activations": base + s.kept + states + s.asked,
                "logits": s.logits * s.item // 4,
            },
        )
    ends = [("the last", layers - 1, s.layers[1] > 0), ("the first", 0, s.layers[0] == 0)]
    of_layers = s.gradients - 4 * s.head * (s.last_stage + s.first * (not work.model.tied or work.layout.pp > 1))
    for name, index, routes in ends if layers else ():
        above = layers - 1 - index
        done = rest if summed else of_layers * above // layers + 4 * s.head * s.last_stage
        saved = s.saved(routes)
        # A layer that is computed again has its input already, and its output once more.
        there = min(index + 1, 2) if work.activations_away else index + 1  # so many layers' are on the device
        here = there * s.part + saved - (s.item == 4) * s.part + s.part if work.recompute else _below(s, index, there)
        for half, items in _backward(s, routes, apart, summed):
            yield (
                f"{half} of {name} layer",
                {
                    "gradients": done + items["gradients"],
                    "activations": base + here + s.part + items["activations"],
                },
            )
    if s.first:
        # The gradient of a divided embedding's output is gathered, and what is another rank's is masked.
        yield (
            "the embedding's gradient",
            {
                "gradients": s.gradients + table * (apart or work.model.tied),
                "activations": s.beside + s.part + s.hidden + s.whole_part,
            },
        )
    if s.layers[1]:
        # What experts' parameters have is copied together, matrix by matrix, of which gate and up are one parameter.
        yield "experts' gradients are joined", {"gradients": s.gradients + 2 * s.matrix // s.item * 4}


def _below(s: _Stage, index: int, count: int) -> int:
    """What so many layers keep, the last of which is this one of the stage's."""
    dense = max(0, min(index + 1, s.layers[0]) - (index + 1 - count))
    return dense * s.saved(False) + (count - dense) * s.saved(True)


def _backward(s: _Stage, routes: bool, apart: bool, summed: bool) -> Named:
    """What the backward of a layer's halves adds to all that the layer has kept, and has let go of already, beside the
    gradient of its output; and its parameters' gradients."""

    def gradients(before: int, now: int) -> int:
        """Matrices in float32 that were made and are made now, and the latter in the weights' type beside their sum."""
        return s.matrix // s.item * (4 * (0 if summed else before + now) + s.item * now * apart)

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
