"""The bytes of memory that the engine `hf` needs, moment by moment.

Invariant: as in trainer.py, all tensors of a moment exist at the same time. The work is that of a `generate` node.
"""

from __future__ import annotations

from ...ir.workload import Workload, kv_bytes
from ...model.layers import MultiHeadLatentAttention
from ..spec import Moments
from .pass_sizes import PassLayer, PassSizes


def peaks(verb: str, work: Workload) -> Moments:
    """Return the bytes at each moment of a generation by transformers (hf.py).

    The engine generates `work.at_once` responses to `work.rows` prompts at the same time. The KV cache of a layer is
    one tensor of keys and one tensor of values. Both tensors are copied whenever the cache grows. A layer with a window
    caches at most its window, but all tokens of a prompt that was just read.
    """
    if verb != "generate":
        raise ValueError(f"no generator has the verb `{verb}`")
    s = PassSizes(work)
    model = work.model
    responses = work.at_once
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


def _count_joined_bytes(layer: PassLayer, tokens: int) -> int:
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


def _count_prompt_bytes(layer: PassLayer) -> int:
    """Return the bytes of a mixer's tensors while prompts are read."""
    work = layer.whole.work
    if delta := layer.find_recurrent(work.rows, work.prompt):
        return delta.inputs + delta.scanned
    return work.rows * work.prompt * (3 * layer.query + 2 * layer.keys) + _score_bytes(layer)


def _score_bytes(layer: PassLayer) -> int:
    """Return the bytes of the scores that a layer stores while prompts are read.

    Kernels store scores where values have another size than keys.
    """
    work = layer.whole.work
    stored = isinstance(layer.mixer, MultiHeadLatentAttention)
    if layer.is_capped:  # transformers' own operators: two results of the cap, and a softmax in float32
        return (2 * layer.whole.item + 2 * 4) * layer.whole.split(layer.mixer.heads) * work.rows * work.prompt**2
    return 2 * layer.whole.split(layer.mixer.heads) * work.rows * work.prompt**2 * layer.whole.item if stored else 0


def _product_bytes(layer: PassLayer) -> int:
    """Return the bytes of the products of an MLP for one token of a generation.

    Experts are whole on every rank: their inputs, products and results are counted.
    """
    s = layer.whole
    if layer.experts is None:
        return (3 + layer.concatenates) * s.split(layer.kind.mlp.intermediate) * s.item
    sent = layer.experts.active * s.work.model.hidden * s.item
    inner = layer.experts.active * layer.experts.intermediate * s.item
    return max(sent + layer.experts.held * inner, 3 * sent) + s.split(layer.experts.shared) * s.item
