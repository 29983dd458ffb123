"""The bytes of memory that the engines `fsdp` and `hf` need, moment by moment.

A moment is one instant of a call, such as "in the head". A call is the work of an `infer`, `update` or `generate` node.
For each moment, this file counts the bytes of all tensors except weights and optimizer states.

Invariant: all tensors of a moment exist at the same time. So the memory that a call needs is the memory of its fullest
moment, never a sum over moments. The counted tensor storages are those that autograd and transformers' models (Llama,
Qwen2 and Qwen3-MoE) create and keep. If an engine keeps other tensors, this file must change; bench/memory.py compares
these bytes with measurements. Sizes are bytes on the busiest rank, with every column at its maximum length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import mul

from ..ir.workload import Workload, kv_bytes
from ..model.architecture import Model
from ..model.layers import MultiHeadLatentAttention
from .head_sizes import HeadSizes
from .layer_sizes import INTO_ATTENTION, INTO_MLP, LayerSizes
from .sizes import GRADIENT, Sizes, optimizer_step
from .spec import Moments


@dataclass(frozen=True)
class _Layer(LayerSizes):
    """Bytes that a layer of a transformers model keeps for its backward pass."""

    @cached_property
    def feed(self) -> int:
        """Bytes that a layer's feed-forward half keeps for its backward pass.

        The half keeps some tensors of the intermediate size. With experts, it also keeps the hidden states that are
        sent to experts: as sent, as returned, and as scaled by the router.
        """
        if self.experts is None:
            return self.kind.mlp.kept * self.wide
        return self.experts.kept * (self.inner + self.shared) + 3 * self.routed + self.routing

    @cached_property
    def routing(self) -> int:
        """Bytes of the indices that sort hidden states by expert, and of the router's results."""
        sorts = 5 if self.whole.work.layout.ep > 1 else 2
        return 8 * sorts * self.sent + self.router * 4 // self.whole.item

    @cached_property
    def products(self) -> int:
        """The peak bytes of a feed-forward half in a pass without gradients."""
        if self.experts is None:
            return (3 + self.concatenates) * self.wide
        layout = self.whole.work.layout
        sent_twice = 2 * self.routed * (layout.ep > 1)
        # Experts get padded states. A sum over tp is a copy.
        copies = 2 * self.whole.hidden * (layout.tp > 1)
        states = max(self.experts.held * self.inner + self.routed, 3 * self.routed)
        return states + sent_twice + self.shared + copies + self.routing

    @cached_property
    def saved(self) -> int:
        """All bytes that a layer saves for its backward pass.

        The layer saves:

        - the input, the normed input and the scaled input of its halves (attention and feed-forward),
        - with norms after the halves too, the output and the normed output of the halves,
        - the tensors that attention keeps,
        - the input and the result of the norms of query and key heads,
        - the tensors that the feed-forward half keeps.

        In bf16, norms keep their input in float32 instead of bf16.
        """
        s = self.whole
        norms = self.inputs
        if self.kind.norms.before and self.kind.norms.after:
            norms += 4 * s.hidden if s.item == 4 else 6 * s.hidden
        heads = s.tokens * (self.query + self.keys) * (2 if s.item == 4 else 3) * self.mixer.head_norms
        return norms + heads + self.attention + self.feed - self.unsaved

    @cached_property
    def unsaved(self) -> int:
        """The bytes that a layer does not save if an adapter is trained.

        A norm does not keep its normed input, and a projection without an adapter does not keep its input. The inputs
        of B are saved in addition.
        """
        s = self.whole
        model = s.work.model
        if model.lora is None:
            return 0
        adapted = model.adapted
        halves = 2 + (not adapted & INTO_ATTENTION) + (not adapted & INTO_MLP)
        size = halves * s.hidden + s.tokens * (self.query + self.keys) * self.mixer.head_norms
        size += s.tokens * self.query * ("o_proj" not in adapted) + self.wide * ("down_proj" not in adapted)
        return size - s.tokens * model.lora.rank * s.item * len(adapted)


@dataclass(frozen=True)
class _Pass(Sizes):
    """Sizes of a forward pass, and of each kind of the model's layers."""

    @cached_property
    def kinds(self) -> tuple[_Layer, ...]:
        return tuple(_Layer(self, kind) for kind in self.work.model.layer_kinds)

    @cached_property
    def head(self) -> HeadSizes:
        work = self.work
        ids = 1 if work.model.scores else self.split(work.model.vocabulary)
        capped = "logits_cap" in work.model.features
        return HeadSizes(self.scored, ids, work.model.hidden, self.item, capped, work.entropy)

    @cached_property
    def common(self) -> int:
        """Bytes that all layers share: rotary angles, and masks of windows.

        The mask of a window has the scores of two windows of keys for each query (kernels/torch_native.py).
        """
        windows = {kind.mixer.window for kind in self.kinds if kind.is_banded}
        return self.angles + sum(2 * window**2 * self.item for window in windows)

    def sum_kept(self, first: int, stop: int) -> int:
        """Return the bytes that the layers [first, stop) keep for a backward pass."""
        if self.work.recompute:
            return (stop - first) * self.hidden
        return sum(map(mul, self.work.model.count_kinds((first, stop)), (kind.saved for kind in self.kinds)))

    def sum_gradients(self, first: int) -> int:
        """Return the bytes of the gradients of the layers from `first` on.

        The gradients have the weights' type.
        """
        return sum(map(mul, self.work.model.count_kinds((first, self.work.model.layers)), self.gradients_by_kind))


def trainer(verb: str, work: Workload) -> Moments:
    """Return the bytes at each moment when FSDP2 computes an `infer` or `update` node.

    A moment is one instant of the computation in fsdp.py. `verb` is "infer" or "update".
    """
    s = _Pass(work)
    return _update(s) if verb == "update" else _infer(s)


def stored(work: Workload) -> int:
    """Return the bytes that all layers keep from the forward to the backward pass."""
    return _Pass(work).sum_kept(work.model.first_trained, work.model.layers)


def _infer(s: _Pass) -> Moments:
    """Return the bytes at each moment of a forward pass without a backward pass.

    Sharded weights are gathered layer by layer. A layer's weights are first gathered into a flat buffer, and then
    copied from the buffer to tensors. The flat buffer exists until the copy for the next layer is done. For a trained
    model, ZeRO 2 keeps the gathered weights until the end of the pass.
    """
    work = s.work
    # In addition to a layer's input there are either the second half's input, its norm, and products; or queries, keys
    # and values, both by token and laid out by row.
    layer = s.common + max(max(3 * s.hidden + kind.products, _attention(kind)) for kind in s.kinds)
    head = s.scored * work.model.hidden * s.item + s.head.inference
    first = kept_weights = gathered = 0
    if work.divided:
        first = 2 * s.ends + 2 * s.layer
        kept_weights = s.all_weights if work.trained and work.layout.zero < 3 else s.ends
        gathered = s.all_weights + s.layer if work.trained and work.layout.zero < 3 else s.ends + 2 * s.layer
    return {
        "the first layer is gathered": {"rows": s.rows, "gathered weights": first, "activations": s.hidden + s.common},
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
    } | ({"routes are returned": {"rows": s.rows + 4 * s.routes}} if work.records_routes else {})


def _attention(layer: _Layer) -> int:
    """Return the peak bytes of a layer's attention in a pass without gradients.

    With a window, the outputs of blocks exist next to their concatenation.
    """
    s = layer.whole
    if layer.recurrent:
        return 3 * s.hidden + layer.recurrent.inputs + layer.recurrent.scanned
    latent = isinstance(layer.mixer, MultiHeadLatentAttention)
    by_token = s.tokens * (2 * layer.query + (3 if latent else 2) * layer.keys)
    by_row = s.row_tokens * ((2 + layer.is_banded) * layer.query + 2 * layer.attended_keys)
    # Of capped scores: as products, scaled, and the results of two more operators.
    return 2 * s.hidden + by_token + by_row + layer.context_parallel_extra(False) + 4 * 4 * layer.chunk_scores


def _update(s: _Pass) -> Moments:
    work = s.work
    layers = work.model.layers
    first = work.model.first_trained  # the lowest layer that a backward pass reaches
    full = work.recompute
    summed = work.batches > 1
    kept_activations = 0 if work.activations_away else s.sum_kept(first, layers)
    base = s.common + kept_activations
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
    flat_layer = s.layer_gradients if work.divided else 0
    if work.divided:
        moments["the last layer is gathered"] = {
            "gathered weights": s.ends + 3 * s.layer if zero3 else s.all_weights + 2 * s.layer,
            "gradients": rest,
            "activations": s.common + (0 if work.activations_away else s.sum_kept(first, max(first, layers - 1))),
        }
    # Where gradients are scattered, the last layer but one is the first next to another layer's flat buffer.
    for name, index in _iterate_fullest_layers(work.model):
        layer = s.kinds[work.model.kind_of_layer[index]]
        # The gradients of the layer before this one are still in their flat buffer.
        flat_buffer = flat_layer if index + 1 < layers else 0
        complete = s.sum_gradients(index + (2 if flat_buffer else 1))
        gradient_bytes = rest if summed else (gradients - spread) * complete // max(1, s.sum_gradients(first))
        # The lowest layer whose activations are on the device.
        held = s.sum_kept(max(first, index - 1) if work.activations_away else first, index + 1)
        recomputed = layer.saved - (s.hidden if s.item == 4 else 0) if full else 0
        for half, more in _backward(layer).items():
            moments[f"backward in {half} of {name}"] = {
                "gathered weights": below - (0 if zero3 else (layers - 1 - index) * flat_layer),
                "gradients": gradient_bytes + table + flat_buffer + more["gradients"],
                "activations": s.common + held + recomputed + more["activations"],
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


def _iterate_fullest_layers(model: Model) -> Iterator[tuple[str, int]]:
    """Yield the layers whose backward pass may hold the most, with their names.

    These are the first and the last layer that the backward pass reaches, of all layers and of each kind. The layer
    before the last one is the first whose gradients exist next to another layer's.
    """
    last = model.layers - 1
    named = {"the last layer": last, "the last but one layer": last - 1, "the first layer": model.first_trained}
    named |= {f"layer {layer + 1}": layer for layer in model.ends_of_kinds}
    names = {layer: name for name, layer in reversed(named.items())}
    return ((name, layer) for name, layer in named.items() if model.first_trained <= layer and names[layer] == name)


def _backward(layer: _Layer) -> dict[str, dict[str, int]]:
    """Return the change in bytes during the backward pass of each half of a layer.

    The change is relative to the start of the layer's backward pass. At that start, all tensors saved by the layer
    exist. A change is negative if more bytes are freed than allocated.
    """
    s = layer.whole
    feed = s.hidden + (max(3 * layer.routed, 2 * layer.inner - layer.routed) if layer.experts else 2 * layer.wide)
    freed = layer.feed + layer.inputs // layer.kind.halves * layer.kind.has_mlp + s.tokens * layer.query
    by_row = s.row_tokens * ((2 + layer.is_banded) * layer.query + 2 * layer.attended_keys)
    made = by_row + layer.context_parallel_extra(True) + 5 * 4 * layer.chunk_scores
    attention = 2 * s.hidden + (layer.recurrent.backward if layer.recurrent else made) - freed
    matrix = layer.matrix if s.work.divided else layer.matrix * (GRADIENT // s.item) * (s.work.batches == 1)
    halves = {"the feed-forward half": {"activations": feed, "gradients": matrix}} if layer.kind.has_mlp else {}
    if layer.kind.has_mixer:
        halves["the attention half"] = {"activations": attention, "gradients": layer.kind.mlp.projections * matrix}
    return halves


def generator(verb: str, work: Workload) -> Moments:
    """Return the bytes at each moment of a generation by transformers (hf.py).

    The engine generates the responses to `work.rows` prompts at the same time. Each prompt has `work.samples`
    responses. The KV cache of a layer is one tensor of keys and one tensor of values. Both tensors are copied whenever
    the cache grows. A layer with a window caches at most its window, but all tokens of a prompt that was just read.
    """
    if verb != "generate":
        raise ValueError(f"no generator has the verb `{verb}`")
    s = _Pass(work)
    model = work.model
    responses = work.rows * work.samples
    fed = work.rows * work.prompt
    sequence = work.fed
    logits = 4 * responses * model.vocabulary
    hidden = model.hidden * s.item
    halves = [(kind, 3 * hidden + _product_bytes(kind)) for kind in s.kinds]
    reading = max(max(fed * half, fed * 2 * hidden + _count_prompt_bytes(kind)) for kind, half in halves)
    computing = responses * max(_count_joined_bytes(kind, sequence) + half for kind, half in halves)
    states = kv_bytes(model, work.layout, 0, s.item)  # of recurrent layers
    by_token = kv_bytes(model, work.layout, 1, s.item) - states  # no window is shorter than a token
    prompts = round(fed * by_token + work.rows * states)
    cache = round(responses * kv_bytes(model, work.layout, sequence, s.item))
    # Drawing is in float64: logits, those of each row, their softmax, its cumulative sum, and a comparison. Filters
    # need more copies.
    routes = 2 * s.routes_of(fed) if work.records_routes else 0  # of each router, and of all together
    kept_routes = s.routes_of(responses * sequence) if work.records_routes and work.on_host else 0
    draw = 2 * logits + 2 * 2 * logits + logits // 4
    return {
        "prompts are read": {"KV cache": prompts, "activations": reading + routes},
        "the last token is computed": {
            "KV cache": cache,
            "activations": computing,
            "logits": logits,
            "rows": 16 * responses * sequence + kept_routes,
        },
        "the last token is drawn": {"KV cache": cache, "logits": draw, "rows": 8 * responses * sequence + kept_routes},
    }


def _count_joined_bytes(layer: _Layer, tokens: int) -> int:
    """Return the bytes of a sequence's keys and values while a layer's cache grows.

    Latent attention expands the latents of a layer, into keys and values together, and keys. A layer with a window
    makes new keys and values before it frees the old ones. Where scores are capped, each query head then gets a copy.
    """
    if layer.recurrent:
        return layer.recurrent.count_stepped_bytes()
    if isinstance(layer.mixer, MultiHeadLatentAttention):
        return tokens * (2 * layer.keys + round(layer.mixer.count_cached(1)) * layer.whole.item)
    window = layer.mixer.window
    cached = min(tokens, window) if window else tokens
    copies = 2 * cached * layer.query if layer.is_capped else 0
    return max(copies, (2 if window else 1) * cached * layer.keys)


def _count_prompt_bytes(layer: _Layer) -> int:
    """Return the bytes of a mixer's tensors while prompts are read."""
    work = layer.whole.work
    if delta := layer.find_recurrent(work.rows, work.prompt):
        return delta.inputs + delta.scanned
    return work.rows * work.prompt * (3 * layer.query + 2 * layer.keys) + _score_bytes(layer)


def _score_bytes(layer: _Layer) -> int:
    """Return the bytes of the scores that a layer stores while prompts are read.

    Kernels store scores where values have another size than keys.
    """
    work = layer.whole.work
    stored = isinstance(layer.mixer, MultiHeadLatentAttention)
    if layer.is_capped:  # transformers' own operators: two results of the cap, and a softmax in float32
        return (2 * layer.whole.item + 2 * 4) * layer.whole.split(layer.mixer.heads) * work.rows * work.prompt**2
    return 2 * layer.whole.split(layer.mixer.heads) * work.rows * work.prompt**2 * layer.whole.item if stored else 0


def _product_bytes(layer: _Layer) -> int:
    """Return the bytes of the products of an MLP for one token of a generation.

    Experts are whole on every rank: their inputs, products and results are counted.
    """
    s = layer.whole
    if layer.experts is None:
        return (3 + layer.concatenates) * s.split(layer.kind.mlp.intermediate) * s.item
    sent = layer.experts.active * s.work.model.hidden * s.item
    inner = layer.experts.active * layer.experts.intermediate * s.item
    return max(sent + layer.experts.held * inner, 3 * sent) + s.split(layer.experts.shared) * s.item
