"""What the light engines hold in a phase beside weights and optimizer states at rest, moment by moment.

Invariant: each moment is what lives at one instant, so a phase needs its fullest moment and never a sum over moments.
Counted are the storages of tensors, as transformers' Llama, Qwen2 and Qwen3-MoE and autograd make and keep them: a
change of what an engine keeps is a change here, and bench/memory.py tells. Sizes are bytes of the busiest rank, at the
columns' bounds.
"""

from __future__ import annotations

from functools import cached_property

from ..ir.workload import Workload, kv_elements
from .sizes import GRADIENT, Sizes, around, step
from .spec import Moments


class _Layer(Sizes):
    """What transformers' layers keep for their backward."""

    @cached_property
    def feed(self) -> int:
        """Of the feed-forward half: four products of its inner width. Of experts too, and tokens on their way to them,
        as they come back and scaled by the router, by number and by place, and what the router makes of them."""
        if (found := self.work.model.experts) is None:
            return 4 * self.wide
        sorts = 5 if self.work.layout.ep > 1 else 2
        routed = 3 * self.routed + 8 * sorts * self.sent + self.router * 4 // self.item
        return max(4 * (self.inner + self.shared) + routed, 4 * self.wide * bool(found.first))

    @cached_property
    def products(self) -> int:
        """What a feed-forward half makes without gradients, at most."""
        if (found := self.work.model.experts) is None:
            return 3 * self.wide
        of_experts = max(3 * self.inner + self.routed, 3 * self.routed) + 2 * self.routed * (self.work.layout.ep > 1)
        return max(of_experts + self.shared, 3 * self.wide * bool(found.first))

    @cached_property
    def saved(self) -> int:
        """Input, normed and scaled input of both halves, what attention keeps, with norms of its heads their input and
        what is normed, and the feed-forward half. In bf16 norms keep their input in float32 instead of as it is."""
        norms = 6 * self.hidden if self.item == 4 else 8 * self.hidden
        heads = self.tokens * (self.query + self.keys) * (2 if self.item == 4 else 3) * self.work.model.norms_heads
        return norms + heads + self.attention + self.feed

    @cached_property
    def last(self) -> int:
        """What the last norm keeps, and the states whose logits are asked for."""
        return (2 if self.item == 4 else 3) * self.hidden + self.scored * self.work.model.hidden * self.item


def trainer(verb: str, work: Workload) -> Moments:
    """The moments of an infer or an update by torch (backends/fsdp.py)."""
    s = _Layer(work)
    return _update(s) if verb == "update" else _infer(s)


def stored(work: Workload) -> int:
    """Bytes that all layers keep between forward and backward."""
    return work.model.layers * (_Layer(work).hidden if work.recompute else _Layer(work).saved)


def _infer(s: _Layer) -> Moments:
    """Forward alone. What is divided is gathered layer by layer: a flat buffer, out of which the weights are copied,
    lives until the next layer's has been copied, too. ZeRO 2 of what is trained keeps the gathered weights to the
    end."""
    work = s.work
    # Beside a layer's input: its second half's input, normed, and products; or queries, keys and values, by token and
    # laid out.
    feed = 3 * s.hidden + s.products
    by_token = s.tokens * (2 * s.query + (3 if work.model.latent else 2) * s.keys)
    attention = 2 * s.hidden + by_token + s.laid * (2 * s.query + 2 * s.met) + around(s, False)
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


def _head(s: _Layer) -> int:
    """Logits at their most without gradients: divided by the temperature, and their log-softmax; where the vocabulary
    is divided, a rank's part, all parts and their concatenation."""
    tp = s.work.layout.tp
    stored = s.logit * s.item // 4
    joined = stored // tp + 2 * stored if tp > 1 else 0
    return max(2 * s.logit, joined)


def _update(s: _Layer) -> Moments:
    work = s.work
    layers = s.work.model.layers
    full = work.recompute
    summed = work.batches > 1
    kept = 0 if work.activations_away else layers * s.hidden if full else layers * s.saved
    recomputed = s.saved - (s.hidden if s.item == 4 else 0) if full else 0
    base = s.angles + kept
    states = s.last if not full or s.item == 2 else s.last - s.hidden
    # Gradients at rest, from the first micro-batch on; in bf16 each is made in that type before it is added.
    joins = s.item < GRADIENT and not work.divided
    # The gradient of a divided embedding comes out whole, and stays so, unless it is added to the head's or a sum.
    spread = 0 if work.divided or work.model.tied or joins else (work.layout.tp - 1) * s.table
    gradients = s.elements * GRADIENT + spread
    rest = gradients if summed else 0
    # Gathered: ZeRO 3 has the ends, a layer, and in a flat buffer the next one; ZeRO 2 all, and in forward the last
    # layer's buffer.
    zero3 = work.divided and work.layout.zero >= 3
    top = (s.ends + s.layer if zero3 else s.whole) if work.divided else 0
    forward = top + s.layer if work.divided and not zero3 else top
    below = (s.ends + 2 * s.layer if zero3 else s.whole) if work.divided else 0
    # In backward, gradients of the ends stay whole until it is over; a layer's are reduced out of a flat buffer after
    # it.
    pending = work.divided or work.model.tied  # the head's gradient waits for another part, or for the others
    table = s.table if pending else s.table * (GRADIENT // s.item) * (not summed)
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
            "gradients": rest + s.table + (table if joins and not pending else 0),
            "activations": base + states + s.scored * work.model.hidden * s.item,
            "logits": s.logit * s.item // 4,
        },
    }
    one = s.layer if work.divided else 0
    if work.divided:
        found["the last layer is gathered"] = {
            "gathered weights": s.ends + 3 * s.layer if zero3 else s.whole + 2 * s.layer,
            "gradients": rest,
            "activations": s.angles + kept * (layers - 1) // max(1, layers),
        }
    # Where gradients are scattered, the last layer but one is the first that another's flat buffer is beside.
    for name, index in (("the last", layers - 1), ("the last but one", layers - 2), ("the first", 0)):
        if index < 0:
            continue
        above = layers - 1 - index
        # A layer's gradients before this one's are in their flat buffer still.
        flat = one if above and work.divided else 0
        made = rest if summed else (gradients - spread) * (above - bool(flat)) // layers
        there = min(index + 1, 2) if work.activations_away else index + 1  # so many layers' are there
        held_here = there * s.hidden + recomputed if full else there * s.saved
        for half, more in _backward(s).items():
            found[f"backward in {half} of {name} layer"] = {
                "gathered weights": below - (0 if zero3 else above * one),
                "gradients": made + table + flat + more["gradients"],
                "activations": s.angles + held_here + more["activations"],
            }
    if work.divided:
        # Of the ends there are gradients, then the flat buffer (twice, since gloo sums a copy of it), and what a rank
        # gets out of it; the head's is let go of last.
        before = gradients if summed else gradients - s.ends // s.item * GRADIENT // work.layout.dp
        scattered = s.table + s.ends // work.layout.dp if work.on_host else 0
        found["the gradients of the ends are scattered"] = {
            "gradients": before + 2 * s.ends + scattered,
            "activations": s.hidden,
        }
    else:
        before = gradients
    # That of a tied one is added to the head's.
    ends = s.table * (1 + work.model.tied) if work.divided else s.table * work.model.tied
    found["the embedding's gradient"] = {
        "gathered weights": s.ends if work.divided else 0,
        "gradients": before + one + ends + s.table * work.layout.tp,
        "activations": s.hidden,
    }
    return {name: {"rows": s.rows, **items} for name, items in found.items()} | step(s)


def _backward(s: _Layer) -> dict[str, dict[str, int]]:
    """What the backward of a layer's halves adds to all that the layer has kept, and has let go of already."""
    feed = s.hidden + (max(3 * s.routed, 2 * s.inner - s.routed) if s.work.model.experts else 2 * s.wide)
    freed = s.feed + (3 if s.item == 4 else 4) * s.hidden + s.tokens * s.query
    attention = 2 * s.hidden + s.laid * (2 * s.query + 2 * s.met) + around(s, True) - freed
    divided = s.work.divided
    matrix = s.matrix if divided else s.matrix * (GRADIENT // s.item) * (s.work.batches == 1)
    return {
        "the feed-forward half": {"activations": feed, "gradients": matrix},
        "the attention half": {"activations": attention, "gradients": 3 * matrix},
    }


def generator(verb: str, work: Workload) -> Moments:
    """The moments of a generation by transformers (backends/hf.py): `rows` prompts at once, `samples` responses each,
    the cache one tensor of keys and one of values a layer, copied whenever it grows."""
    if verb != "generate":
        raise ValueError(f"no generator has the verb `{verb}`")
    alone = _Layer(work)
    each = work.rows * work.samples
    width = work.fed
    # Of latent attention the latents; one layer's are expanded at a time, into keys and values together, keys, and
    # scores, which kernels store where values have another size than keys.
    latent = work.model.latent
    left = kv_elements(work.model, work.layout) * alone.item if latent else 2 * work.model.layers * alone.keys
    met = 2 * alone.keys + left // work.model.layers if latent else alone.keys
    scores = 2 * -(-work.model.heads // work.layout.tp) * work.rows * work.prompt**2 * alone.item if latent else 0
    cache = left * each * width
    logits = 4 * each * work.model.vocabulary
    hidden = work.model.hidden * alone.item
    half = 3 * alone.split(work.model.intermediate) * alone.item
    if found := work.model.experts:  # whole ones on every rank: what goes to them, their products, and what comes back
        sent = found.active * hidden
        inner = found.active * found.intermediate * alone.item
        shared = alone.split(found.shared) * alone.item
        half = max(sent + 3 * inner + shared, 3 * sent + shared, half * bool(found.first))
    # Drawing is in float64: logits, those of each row, their softmax, its cumulative sum, a comparison; with filters
    # more copies.
    draw = 2 * logits + 2 * 2 * logits + logits // 4
    fed = work.rows * work.prompt
    return {
        "prompts are read": {
            "KV cache": left * fed,
            "activations": max(
                fed * (3 * hidden + half), fed * (2 * hidden + 3 * alone.query + 2 * alone.keys) + scores
            ),
        },
        "the last token is computed": {
            "KV cache": cache,
            "activations": met * each * width + each * (3 * hidden + half),
            "logits": logits,
            "rows": 16 * each * width,
        },
        "the last token is drawn": {"KV cache": cache, "logits": draw, "rows": 8 * each * width},
    }
