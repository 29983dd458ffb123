"""What the light engines hold in a phase beside weights and optimizer states at rest, moment by moment.

Invariant: each moment is what lives at one instant, so a phase needs its fullest moment and never a sum over moments.
Counted are the storages of tensors, as transformers' Llama and Qwen2 and autograd make and keep them: a change of what
an engine keeps is a change here, and bench/memory.py tells. Sizes are bytes of the busiest rank, at the columns'
bounds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import gcd

from ..ir import stepping
from ..ir.work import Work
from ..model.architecture import Model
from ..sharding.layout import Side, Tensor, TensorKind, box_at, elements, held, kinds
from .spec import BYTES, Moments

# Elements of a buffer that the trainer's optimizer needs beside what it holds.
CHUNK = 1 << 22


@dataclass(frozen=True)
class _Sizes:
    """Bytes of what a rank computes with: `item` of an element, of `tokens` a layer sees and of tokens `laid` out row
    by row for attention, of one scored token."""

    work: Work

    @cached_property
    def item(self) -> int:
        return BYTES[self.work.dtype]

    @cached_property
    def tokens(self) -> int:
        """Distinct tokens that are fed: prompts once each, responses but for their last token, which predicts
        nothing."""
        w = self.work
        return max(1, self._most((w.prompts, 0, w.prompt), (w.rows, w.prompt, w.prompt + w.response - 1)))

    @cached_property
    def laid(self) -> int:
        """With context parallelism as many as make up what a rank lays out: of a ring a part of each row, of Ulysses
        whole rows of a part of the heads."""
        w = self.work
        return w.rows * -(-max(1, w.prompt + w.response - 1) // w.layout.cp)

    @cached_property
    def scored(self) -> int:
        w = self.work
        return self._most((w.rows, w.prompt - 1, w.prompt - 1 + w.response))

    def _most(self, *stretches: tuple[int, int, int]) -> int:
        """Of stretches of depths, each with so many tokens at a depth, the tokens of the context-parallel rank that has
        most: depth modulo cp is a token's rank (context.py)."""
        cp = self.work.layout.cp
        return max(
            sum(tokens * len(range(first + (rank - first) % cp, last, cp)) for tokens, first, last in stretches)
            for rank in range(cp)
        )

    def _split(self, size: int) -> int:
        return -(-size // self.work.layout.tp)

    @cached_property
    def hidden(self) -> int:
        """One hidden state of every token."""
        return self.tokens * self.work.model.hidden * self.item

    @cached_property
    def query(self) -> int:
        return self._split(self.work.model.heads * self.work.model.head_dim) * self.item

    @cached_property
    def keys(self) -> int:
        """Keys of a token; values take as much."""
        return self._split(self.work.model.kv_heads * self.work.model.head_dim) * self.item

    @cached_property
    def met(self) -> int:
        """Keys of a token that is laid out: by Ulysses some key-value heads are on several ranks."""
        cp = self.work.layout.cp if self.work.layout.cp_kind == "ulysses" else 1
        return self.keys * (cp // gcd(cp, self._split(self.work.model.kv_heads)))

    @cached_property
    def wide(self) -> int:
        """One product of a feed-forward network's first half, of every token, or of its experts."""
        return self.tokens * self._split(_width(self.work.model)) * self.item

    @cached_property
    def routed(self) -> int:
        """Hidden states on their way to experts: of each token one for each of its experts."""
        found = self.work.model.experts
        return self._split(self.hidden) * found.active if found else 0

    @cached_property
    def logit(self) -> int:
        """Logits of all scored tokens in float32, the whole vocabulary's; or their values."""
        return 4 * self.scored * self.work.model.outputs

    @cached_property
    def angles(self) -> int:
        """Cosines and sines of positions."""
        return 2 * self.tokens * self.work.model.head_dim * self.item

    @cached_property
    def rows(self) -> int:
        """Token ids and indices, 64-bit, and a few float32 columns of responses."""
        w = self.work
        laid, scored = w.rows * max(1, w.prompt + w.response - 1), w.rows * w.response
        own = 3 * self.tokens + self.laid + self.scored * (1 if w.layout.cp == 1 else 2)
        return 8 * (laid + 3 * scored + own) + 4 * 6 * scored

    @cached_property
    def saved(self) -> int:
        """What a layer keeps for its backward: input, normed and scaled input of both halves, query, keys, values and
        output of attention as laid out, its output by token, its log-sum-exp, four products of the feed-forward
        network. In bf16 norms keep their input in float32 instead of as it is."""
        norms = 6 * self.hidden if self.item == 4 else 8 * self.hidden
        scores = 4 * self.laid * self._split(self.work.model.heads) + 8 * self.tokens
        attention = self.laid * (2 * self.query + 2 * self.met) + self.tokens * self.query
        return norms + attention + scores + 4 * self.wide + 3 * self.routed

    @cached_property
    def last(self) -> int:
        """What the last norm keeps, and the states whose logits are asked for."""
        return (2 if self.item == 4 else 3) * self.hidden + self.scored * self.work.model.hidden * self.item

    # Weights, whole over dp.

    def _whole(self, tensors: Iterable[Tensor]) -> int:
        return held(kinds(tensors), Side(self.work.layout)) * self.item

    @cached_property
    def whole(self) -> int:
        return held(self.work.model.kinds, Side(self.work.layout)) * self.item

    @cached_property
    def layer(self) -> int:
        return self._whole(t for t in self.work.model.tensors if t.layer == 0)

    @cached_property
    def ends(self) -> int:
        """Embedding, last norm, head."""
        return self.whole - self.work.model.layers * self.layer

    @cached_property
    def table(self) -> int:
        """The embedding's or the head's weights."""
        return self._whole(self.work.model.tensors[:1])

    @cached_property
    def matrix(self) -> int:
        """One of the three matrices of a feed-forward network, or those of its experts."""
        work, found = self.work, self.work.model.experts
        if found:
            return found.number // work.layout.ep * found.intermediate * work.model.hidden * self.item
        return self._split(work.model.intermediate) * work.model.hidden * self.item

    # At rest, in elements.

    @cached_property
    def elements(self) -> int:
        return held(self.work.model.kinds, Side(self.work.layout, self.work.divided))

    @cached_property
    def largest(self) -> int:
        """The largest tensor."""
        side = Side(self.work.layout, self.work.divided)
        return max(elements(box_at(k.tensor, side, (0, 0, 0))) for k in self.work.model.kinds)


def _width(model: Model) -> int:
    """Elements of a product of the feed-forward half's first matrices for a token, by all of its experts."""
    return model.experts.active * model.experts.intermediate if model.experts else model.intermediate


def trainer(verb: str, work: Work) -> Moments:
    """The moments of an infer or an update by torch (backends/fsdp.py)."""
    s = _Sizes(work)
    return _update(s) if verb == "update" else _infer(s)


def _infer(s: _Sizes) -> Moments:
    """Forward alone. What is divided is gathered layer by layer: a flat buffer, out of which the weights are copied,
    lives until the next layer's has been copied, too. ZeRO 2 of what is trained keeps the gathered weights to the
    end."""
    work = s.work
    # Beside a layer's input: its second half's input, normed, and products; or queries, keys and values, by token and
    # laid out.
    feed = 3 * s.hidden + 3 * s.wide + 2 * s.routed
    by_token = s.tokens * (2 * s.query + 2 * s.keys)
    attention = 2 * s.hidden + by_token + s.laid * (2 * s.query + 2 * s.met) + _around(s, False)
    layer = s.angles + max(feed, attention)
    head = s.scored * work.model.hidden * s.item + _head(s)
    first = kept = gathered = 0
    if work.divided:
        first = 2 * s.ends + 2 * s.layer
        kept = s.whole if work.trained and work.layout.zero < 3 else s.ends
        gathered = s.whole + s.layer if work.trained and work.layout.zero < 3 else s.ends + 2 * s.layer
    return {
        "the first layer is gathered": {"rows": s.rows, "gathered weights": first, "activations": s.hidden + s.angles},
        "a layer is gathered": {
            "rows": s.rows,
            "gathered weights": gathered + s.layer if work.divided else 0,
            "activations": s.hidden,
        },
        "in a layer": {"rows": s.rows, "gathered weights": gathered, "activations": layer},
        "in the head": {"rows": s.rows, "gathered weights": kept + s.layer if work.divided else 0, "logits": head},
    }


def _head(s: _Sizes) -> int:
    """Logits at their most without gradients: divided by the temperature, and their log-softmax; where the vocabulary
    is divided, a rank's part, all parts and their concatenation."""
    tp, stored = s.work.layout.tp, s.logit * s.item // 4
    joined = stored // tp + 2 * stored if tp > 1 else 0
    return max(2 * s.logit, joined)


def _update(s: _Sizes) -> Moments:
    work, layers = s.work, s.work.model.layers
    full, summed = work.recompute, work.batches > 1
    kept = layers * s.hidden if full else layers * s.saved
    recomputed = s.saved - (s.hidden if s.item == 4 else 0) if full else 0
    base = s.angles + kept
    states = s.last if not full or s.item == 2 else s.last - s.hidden
    # Gradients at rest, from the first micro-batch on.
    apart = s.elements * s.item
    # The gradient of a divided embedding comes out whole, and stays so, unless it is added to the head's.
    spread = 0 if work.divided or work.model.tied else (work.layout.tp - 1) * s.table
    gradients = apart + spread
    rest = gradients if summed else 0
    # Gathered: ZeRO 3 has the ends, a layer, and in a flat buffer the next one; ZeRO 2 all, and in forward the last
    # layer's buffer.
    zero3 = work.divided and work.layout.zero >= 3
    top = (s.ends + s.layer if zero3 else s.whole) if work.divided else 0
    forward = top + s.layer if work.divided and not zero3 else top
    below = (s.ends + 2 * s.layer if zero3 else s.whole) if work.divided else 0
    # In backward, gradients of the ends stay whole until it is over; a layer's are reduced out of a flat buffer after
    # it.
    table = s.table if work.divided or work.model.tied or not summed else 0
    found = {
        "the end of forward": {
            "gathered weights": forward,
            "gradients": rest,
            "activations": base + states,
            "logits": _head(s),
        },
        # Log-softmax, its gradient and the logits'; of an entropy the probabilities and their gradient, of given ids
        # one more gradient.
        "backward in the head": {
            "gathered weights": top,
            "gradients": rest,
            "activations": base + states,
            "logits": (3 + 2 * work.entropy + work.given) * s.logit,
        },
        "the head's gradient": {
            "gathered weights": top,
            "gradients": rest + s.table,
            "activations": base + states + s.scored * work.model.hidden * s.item,
            "logits": s.logit * s.item // 4,
        },
    }
    one = s.layer if work.divided else 0
    for name, index in (("the last", layers - 1), ("the first", 0)):
        above = layers - 1 - index
        made = rest if summed or not layers else (gradients - spread) * above // layers
        held_here = (index + 1) * s.hidden + recomputed if full else (index + 1) * s.saved
        # A layer's gradients before this one's are in their flat buffer still.
        flat = one if above and work.divided else 0
        for half, more in _backward(s).items():
            found[f"backward in {half} of {name} layer"] = {
                "gathered weights": below - (0 if zero3 else above * one),
                "gradients": made + table + flat + more["gradients"],
                "activations": s.angles + held_here + more["activations"],
            }
    ends = s.ends if work.divided else 0
    found["the embedding's gradient"] = {
        "gathered weights": s.ends if work.divided else 0,
        "gradients": gradients + 2 * one + ends + s.table * (work.layout.tp + work.model.tied),
        "activations": s.hidden,
    }
    return {name: {"rows": s.rows, **items} for name, items in found.items()} | _step(s, gradients)


def _backward(s: _Sizes) -> dict[str, dict[str, int]]:
    """What the backward of a layer's halves adds to all that the layer has kept, and has let go of already."""
    feed = max(s.hidden + s.wide, s.hidden + 2 * s.wide) + s.routed
    freed = 4 * s.wide + (3 if s.item == 4 else 4) * s.hidden + s.tokens * s.query
    attention = 2 * s.hidden + s.laid * (2 * s.query + 2 * s.met) + _around(s, True) - freed
    divided = s.work.divided
    return {
        "the feed-forward half": {
            "activations": feed,
            "gradients": s.matrix if divided or not s.work.batches > 1 else 0,
        },
        "the attention half": {
            "activations": attention,
            "gradients": 3 * s.matrix if divided or not s.work.batches > 1 else 0,
        },
    }


def _around(s: _Sizes, backward: bool) -> int:
    """What context parallelism adds where rows are laid out: of a ring the block of keys and values that is met and the
    one under way, those for each query's head, and what a block gives, in float32; of Ulysses what is exchanged, and
    the nodes of all ranks."""
    if s.work.layout.cp == 1:
        return 0
    if s.work.layout.cp_kind == "ulysses":
        return s.tokens * (2 * s.query + 2 * s.met)
    spread, more = 2 * s.query if s.query > s.keys else 0, 4 // s.item - 1  # float32 beside bf16
    if backward:
        return s.laid * (4 * s.keys + spread + 3 * s.query + more * (s.query + 2 * s.keys))
    return s.laid * (4 * s.keys + max(spread + (1 + more) * s.query, (1 + 3 * more) * s.query))


def _step(s: _Sizes, gradients: int) -> Moments:
    """The optimizer's step: the sum over copies by bucket, the norm in float64 by chunk, then rule by rule on float32
    gradients."""
    work = s.work
    copies = work.layout.cp * (1 if work.divided else work.layout.dp)
    found: Moments = {"the gradient's norm": {"gradients": gradients, "workspace": 16 * min(s.largest, CHUNK)}}
    if copies > 1:
        found["the gradients' sum"] = {
            "gradients": gradients,
            "workspace": s.item * min(s.elements, max(s.largest, CHUNK)),
        }
    if work.optimizer is None:
        return found
    flat, left = copies > 1 and work.layout.zero == 1, s.elements * s.item
    spread = gradients - left
    for rule, own_kinds in stepping.parted(work.optimizer, work.model.kinds):
        count = held(own_kinds, Side(work.layout, work.divided))
        own = -(-count // copies) if flat else count
        left -= count * s.item  # of those that step by later rules
        # A rank's float32 stretch of all weights, which lives only while a step lasts.
        master = 4 * own if flat and s.item == 4 else 0
        stepping_by = {"gradients": 4 * own + left, "workspace": master}
        of = f" ({rule.name})" if len(work.optimizer.rules) > 1 else ""
        if flat:
            found[f"the stretch of gradients{of}"] = {"gradients": spread + left + count * s.item + 4 * own}
            found[f"the stretch of weights{of}"] = {**stepping_by, "workspace": 2 * master}
            found[f"weights are spread{of}"] = {
                "gradients": left,
                "workspace": master + copies * min(4 * own, 4 * CHUNK),
            }
        elif s.item == 2:
            found[f"float32 gradients{of}"] = {"gradients": 4 * own + left, "workspace": s.item * s.largest}
        if rule.whole:
            found["a matrix is made orthogonal"] = {
                **stepping_by,
                "workspace": master + max(map(_orthogonal, own_kinds), default=0),
            }
    return found


def _orthogonal(kind: TensorKind) -> int:
    """A matrix and its next value, and two squares of its shorter side."""
    return 8 * kind.tensor.elements + 8 * min(kind.tensor.shape) ** 2


def generator(verb: str, work: Work) -> Moments:
    """The moments of a generation by transformers (backends/hf.py): `rows` prompts at once, `samples` responses each,
    the cache one tensor of keys and one of values a layer, copied whenever it grows."""
    assert verb == "generate"
    alone = _Sizes(work)
    each = work.rows * work.samples
    width = max(1, work.prompt + work.response - 1)
    cache = 2 * work.model.layers * alone.keys * each * width
    logits = 4 * each * work.model.vocabulary
    hidden = work.model.hidden * alone.item
    wide = -(-_width(work.model) // work.layout.tp) * alone.item
    # Drawing is in float64: logits, those of each row, their softmax, its cumulative sum, a comparison; with filters
    # more copies.
    draw = 2 * logits + 2 * 2 * logits + logits // 4
    fed = work.rows * work.prompt
    return {
        "prompts are read": {
            "KV cache": 2 * work.model.layers * alone.keys * fed,
            "activations": fed * max(3 * hidden + 3 * wide, 2 * hidden + 3 * alone.query + 2 * alone.keys),
        },
        "the last token is computed": {
            "KV cache": cache,
            "activations": alone.keys * each * width + each * (3 * hidden + 3 * wide),
            "logits": logits,
            "rows": 16 * each * width,
        },
        "the last token is drawn": {"KV cache": cache, "logits": draw, "rows": 8 * each * width},
    }
