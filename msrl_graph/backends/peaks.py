"""The bytes of memory that the engines `fsdp` and `hf` need, moment by moment.

A moment is one instant of a call, such as "in the head". A call is the work of an `infer`, `update` or `generate` node.
For each moment, this file counts the bytes of all tensors except weights and optimizer states.

Invariant: all tensors of a moment exist at the same time. So the memory that a call needs is the memory of its fullest
moment, never a sum over moments. The counted tensor storages are those that autograd and transformers' models (Llama,
Qwen2 and Qwen3-MoE) create and keep. If an engine keeps other tensors, this file must change; bench/memory.py compares
these bytes with measurements. Sizes are bytes on the busiest rank, with every column at its maximum length.
"""

from __future__ import annotations

from functools import cached_property

from ..ir.workload import Workload, kv_elements
from .sizes import GRADIENT, Sizes, context_parallel_extra, optimizer_step
from .spec import Moments


class _Layer(Sizes):
    """Bytes that a layer of a transformers model keeps for its backward pass."""

    @cached_property
    def feed(self) -> int:
        """Bytes that a layer's feed-forward half keeps for its backward pass.

        Without experts, the half keeps four tensors of the intermediate size. With experts, it also keeps the hidden
        states that are sent to experts: as sent, as returned, and as scaled by the router. In addition, it keeps the
        indices that sort these hidden states by expert, and the router's results.
        """
        if self.work.model.experts is None:
            return 4 * self.wide
        sorts = 5 if self.work.layout.ep > 1 else 2
        routed = 3 * self.routed + 8 * sorts * self.sent + self.router * 4 // self.item
        return max(4 * (self.inner + self.shared) + routed, 4 * self.wide * bool(self.work.model.dense_layers))

    @cached_property
    def products(self) -> int:
        """The peak bytes of a feed-forward half in a pass without gradients."""
        if self.work.model.experts is None:
            return 3 * self.wide
        of_experts = max(3 * self.inner + self.routed, 3 * self.routed) + 2 * self.routed * (self.work.layout.ep > 1)
        return max(of_experts + self.shared, 3 * self.wide * bool(self.work.model.dense_layers))

    @cached_property
    def saved(self) -> int:
        """All bytes that a layer saves for its backward pass.

        The layer saves:

        - the input, the normed input and the scaled input of both halves (attention and feed-forward),
        - the tensors that attention keeps,
        - the input and the result of the norms of query and key heads,
        - the tensors that the feed-forward half keeps.

        In bf16, norms keep their input in float32 instead of bf16.
        """
        norms = 6 * self.hidden if self.item == 4 else 8 * self.hidden
        heads = self.tokens * (self.query + self.keys) * (2 if self.item == 4 else 3) * self.work.model.norms_heads
        return norms + heads + self.attention + self.feed

    @cached_property
    def last(self) -> int:
        """Bytes of the tensors that the last norm keeps, and of the requested states.

        The requested states are the hidden states for which logits are computed.
        """
        return (2 if self.item == 4 else 3) * self.hidden + self.scored * self.work.model.hidden * self.item


def trainer(verb: str, work: Workload) -> Moments:
    """Return the bytes at each moment when FSDP2 computes an `infer` or `update` node.

    A moment is one instant of the computation in fsdp.py. `verb` is "infer" or "update".
    """
    s = _Layer(work)
    return _update(s) if verb == "update" else _infer(s)


def stored(work: Workload) -> int:
    """Return the bytes that all layers keep from the forward to the backward pass."""
    return (work.model.layers - work.model.first_trained) * (
        _Layer(work).hidden if work.recompute else _Layer(work).saved
    )


def _infer(s: _Layer) -> Moments:
    """Return the bytes at each moment of a forward pass without a backward pass.

    Sharded weights are gathered layer by layer. A layer's weights are first gathered into a flat buffer, and then
    copied from the buffer to tensors. The flat buffer exists until the copy for the next layer is done. For a trained
    model, ZeRO 2 keeps the gathered weights until the end of the pass.
    """
    work = s.work
    # In addition to a layer's input there are either the second half's input, its norm, and products; or queries, keys
    # and values, both by token and laid out by row.
    feed = 3 * s.hidden + s.products
    by_token = s.tokens * (2 * s.query + (3 if work.model.latent else 2) * s.keys)
    attention = (
        2 * s.hidden + by_token + s.row_tokens * (2 * s.query + 2 * s.attended_keys) + context_parallel_extra(s, False)
    )
    layer = s.angles + max(feed, attention)
    head = s.scored * work.model.hidden * s.item + _head(s)
    first = kept_weights = gathered = 0
    if work.divided:
        first = 2 * s.ends + 2 * s.layer
        kept_weights = s.all_weights if work.trained and work.layout.zero < 3 else s.ends
        gathered = s.all_weights + s.layer if work.trained and work.layout.zero < 3 else s.ends + 2 * s.layer
    return {
        "the first layer is gathered": {"rows": s.rows, "gathered weights": first, "activations": s.hidden + s.angles},
        "a layer is gathered": {
            "rows": s.rows,
            "gathered weights": gathered + s.layer if work.divided else 0,
            "activations": s.hidden,
        },
        "in a layer": {"rows": s.rows, "gathered weights": gathered, "activations": layer},
        "in the head": {
            "rows": s.rows,
            "gathered weights": kept_weights + s.layer if work.divided else 0,
            "logits": head,
        },
    }


def _head(s: _Layer) -> int:
    """Return the peak bytes of the logits in a pass without gradients.

    The peak is the larger of two moments. At the first moment, the logits divided by the temperature and their
    log-softmax exist. The second moment occurs only if the vocabulary is sharded over tp. At the second moment, the
    rank's own logits, the gathered logits of all ranks, and the concatenation of the gathered logits exist.
    """
    tp = s.work.layout.tp
    stored = s.logit * s.item // 4
    joined = stored // tp + 2 * stored if tp > 1 else 0
    return max(2 * s.logit, joined)


def _update(s: _Layer) -> Moments:
    work = s.work
    layers = work.model.layers - work.model.first_trained  # that a backward pass reaches
    full = work.recompute
    summed = work.batches > 1
    kept_activations = 0 if work.activations_away else layers * s.hidden if full else layers * s.saved
    recomputed = s.saved - (s.hidden if s.item == 4 else 0) if full else 0
    base = s.angles + kept_activations
    states = s.last if not full or s.item == 2 else s.last - s.hidden
    # Gradients at rest, from the first micro-batch on. With bf16 weights each gradient is computed in bf16 before it is
    # added.
    joins = s.item < GRADIENT and not work.divided
    # The gradient of a sharded embedding is whole, unless it is added to the head's gradient or to a sum.
    spread = 0 if work.divided or work.model.tied or joins else (work.layout.tp - 1) * s.embedding_gradient
    gradients = s.elements * GRADIENT + spread
    rest = gradients if summed else 0
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
    table = s.head_gradient * (1 if pending else GRADIENT // s.item * (not summed))
    moments = {
        "the end of forward": {
            "gathered weights": forward,
            "gradients": rest,
            "activations": base + states,
            "logits": _head(s),
        },
        # Log-softmax, its gradient and the logits' gradient; for an entropy the probabilities and their gradient; for
        # given ids one more gradient.
        "backward in the head": {
            "gathered weights": top,
            "gradients": rest,
            "activations": base + states,
            "logits": (3 + 2 * work.entropy + work.scores_other_ids) * s.logit,
        },
        "the head's gradient": {
            "gathered weights": top,
            "gradients": rest + s.head_gradient + (table if joins and not pending else 0),
            "activations": base + states + s.scored * work.model.hidden * s.item,
            "logits": s.logit * s.item // 4,
        },
    }
    flat_layer = s.layer_gradients if work.divided else 0
    if work.divided:
        moments["the last layer is gathered"] = {
            "gathered weights": s.ends + 3 * s.layer if zero3 else s.all_weights + 2 * s.layer,
            "gradients": rest,
            "activations": s.angles + kept_activations * (layers - 1) // max(1, layers),
        }
    # Where gradients are scattered, the last layer but one is the first next to another layer's flat buffer.
    for name, index in (("the last", layers - 1), ("the last but one", layers - 2), ("the first", 0)):
        if index < 0:
            continue
        above = layers - 1 - index
        # The gradients of the layer before this one are still in their flat buffer.
        flat_buffer = flat_layer if above and work.divided else 0
        gradient_bytes = rest if summed else (gradients - spread) * (above - bool(flat_buffer)) // layers
        layers_on_device = (
            min(index + 1, 2) if work.activations_away else index + 1
        )  # number of layers whose activations are on the device
        held_activations = layers_on_device * s.hidden + recomputed if full else layers_on_device * s.saved
        for half, more in _backward(s).items():
            moments[f"backward in {half} of {name} layer"] = {
                "gathered weights": below - (0 if zero3 else above * flat_layer),
                "gradients": gradient_bytes + table + flat_buffer + more["gradients"],
                "activations": s.angles + held_activations + more["activations"],
            }
    if work.divided:
        # The ends have gradients, then a flat buffer (twice, because gloo sums a copy of it), and a rank's result
        # from it. The head's gradient is freed last.
        before = gradients if summed else gradients - s.end_gradients // s.item * GRADIENT // work.layout.dp
        scattered = s.head_gradient + s.end_gradients // work.layout.dp if work.on_host else 0
        moments["the gradients of the ends are scattered"] = {
            "gradients": before + 2 * s.end_gradients + scattered,
            "activations": s.hidden,
        }
    else:
        before = gradients
    # The gradient of a tied embedding is added to the head's.
    ends = s.head_gradient * (1 + work.model.tied) if work.divided else s.head_gradient * work.model.tied
    moments["the embedding's gradient"] = {
        "gathered weights": s.ends if work.divided else 0,
        "gradients": before + flat_layer + ends + s.embedding_gradient * work.layout.tp,
        "activations": s.hidden,
    }
    return {name: {"rows": s.rows, **items} for name, items in moments.items()} | optimizer_step(s)


def _backward(s: _Layer) -> dict[str, dict[str, int]]:
    """Return the change in bytes during the backward pass of each half of a layer.

    The change is relative to the start of the layer's backward pass. At that start, all tensors saved by the layer
    exist. A change is negative if more bytes are freed than allocated.
    """
    feed = s.hidden + (max(3 * s.routed, 2 * s.inner - s.routed) if s.work.model.experts else 2 * s.wide)
    freed = s.feed + (3 if s.item == 4 else 4) * s.hidden + s.tokens * s.query
    attention = (
        2 * s.hidden + s.row_tokens * (2 * s.query + 2 * s.attended_keys) + context_parallel_extra(s, True) - freed
    )
    divided = s.work.divided
    matrix = s.matrix if divided else s.matrix * (GRADIENT // s.item) * (s.work.batches == 1)
    return {
        "the feed-forward half": {"activations": feed, "gradients": matrix},
        "the attention half": {"activations": attention, "gradients": 3 * matrix},
    }


def generator(verb: str, work: Workload) -> Moments:
    """Return the bytes at each moment of a generation by transformers (hf.py).

    The engine generates the responses to `work.rows` prompts at the same time. Each prompt has `work.samples`
    responses. The KV cache of a layer is one tensor of keys and one tensor of values. Both tensors are copied whenever
    the cache grows.
    """
    if verb != "generate":
        raise ValueError(f"no generator has the verb `{verb}`")
    alone = _Layer(work)
    responses = work.rows * work.samples
    width = work.fed
    # Latent attention caches the latents. One layer's latents are expanded at a time, into keys and values together,
    # keys, and scores, which kernels store where values have another size than keys.
    latent = work.model.latent
    cache_per_token = (
        kv_elements(work.model, work.layout) * alone.item if latent else 2 * work.model.layers * alone.keys
    )
    keys_values_met = 2 * alone.keys + cache_per_token // work.model.layers if latent else alone.keys
    scores = 2 * -(-work.model.heads // work.layout.tp) * work.rows * work.prompt**2 * alone.item if latent else 0
    cache = cache_per_token * responses * width
    logits = 4 * responses * work.model.vocabulary
    hidden = work.model.hidden * alone.item
    half = 3 * alone.split(work.model.intermediate) * alone.item
    if experts := work.model.experts:  # whole on every rank: their inputs, products and results
        sent = experts.active * hidden
        inner = experts.active * experts.intermediate * alone.item
        shared = alone.split(experts.shared) * alone.item
        half = max(sent + 3 * inner + shared, 3 * sent + shared, half * bool(work.model.dense_layers))
    # Drawing is in float64: logits, those of each row, their softmax, its cumulative sum, and a comparison. Filters
    # need more copies.
    draw = 2 * logits + 2 * 2 * logits + logits // 4
    fed = work.rows * work.prompt
    return {
        "prompts are read": {
            "KV cache": cache_per_token * fed,
            "activations": max(
                fed * (3 * hidden + half), fed * (2 * hidden + 3 * alone.query + 2 * alone.keys) + scores
            ),
        },
        "the last token is computed": {
            "KV cache": cache,
            "activations": keys_values_met * responses * width + responses * (3 * hidden + half),
            "logits": logits,
            "rows": 16 * responses * width,
        },
        "the last token is drawn": {"KV cache": cache, "logits": draw, "rows": 8 * responses * width},
    }
