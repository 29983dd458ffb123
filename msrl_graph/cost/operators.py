"""The amount of work in a forward pass, counted in operators and memory accesses.

Invariant: the constants of this module are numbers of operators or of memory accesses, and are the same for all models.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import mul

from ..backends.optimizer.step_calls import TENSORS
from ..backends.spec import Act, EngineSpec, OperatorCalls
from ..hardware.cluster import SHARES, Device, Figure
from ..model.architecture import Model
from ..model.layers import Layer
from ..sharding.layout import Layout
from . import adapter_dropout

KERNELS = Figure(12, "assumed", "12 kernels a layer, fused")
PRODUCTS = 7  # of a layer: q, k, v, o, gate, up, down
# Accesses per logit: for log-probabilities, and to sample a token.
SCORING = 7
DRAWING = 15
# Bytes of the accesses to a capped attention score in float32. No fused kernel caps scores: ten operators access them.
# Attention with sinks needs fewer operators, but is counted alike.
CAPPED = 17 * 4


@dataclass(frozen=True)
class ForwardWork:
    """The work of a forward pass on all devices of a data-parallel group.

    - `tokens`: the number of tokens that pass through the layers.
    - `scored`: the number of positions at which the head computes logits.
    - `sequences`: the number of sequences in attention.
    - `length`: the number of tokens of a sequence, on which the keys inside a sliding window depend.
    - `pairs`: the number of (query, key) pairs in each sequence, without sliding windows.
    - `moved`: the number of bytes that operators read from memory or write to memory, excluding the weights.
    """

    tokens: float
    scored: float
    sequences: float
    length: float
    pairs: float
    moved: float

    def count_scan_flop(self, act: Act, model: Model) -> float:
        """Return the FLOP of recurrent layers, without their projections.

        A forward pass scans each sequence, a step of decoding scans the last token of each.
        """
        tokens = self.sequences if act == "decode" else self.sequences * self.length
        return tokens * model.count_scan_flop(act == "decode")


def layer_calls(act: Act, calls: OperatorCalls, model: Model, spec: EngineSpec) -> float:
    """Return how many operators a layer of a model calls on average.

    `calls` are those of a model that is trained as a whole, whose layers have a mixer and an MLP. A step calls
    operators for each trained weight. An adapter adds operators to the passes.
    """
    if act == "step" and model.frozen_kinds:
        trained = sum(0 <= tensor.layer < model.layers for tensor in model.trained)
        return calls.layer * trained / (model.layers * TENSORS)
    layer = calls.layer if act == "step" else calls.layer * model.halves / (2 * model.layers)
    if model.lora is None:
        return layer
    projections = len(model.adapted)
    masks = adapter_dropout.CALLS * projections if act == "update" and model.lora.dropout else 0
    return layer + spec.time.adapter_calls(act, projections) + masks


def count_moved_elements(model: Model, copies: int) -> int:
    """Return how many elements per token operators move between matrix products."""
    counts = model.count_kinds((0, model.layers))
    layers = [sum(count_moved_elements_of_layer(kind, model.hidden, copies)) for kind in model.layer_kinds]
    return sum(map(mul, counts, layers))


def count_moved_elements_of_layer(kind: Layer, hidden: int, copies: int) -> tuple[int, int, int, int]:
    """Return how many elements per token operators of a layer move.

    The numbers are those of norms, attention, gating and the rest.

    They are 7 h for each norm and 3 h for the residual of half a layer (h: hidden size), on each of `copies` ranks, 10
    for each element of queries and keys that is rotated, and 5 f for gating (f: intermediate size).
    """
    norms = 7 * kind.norms.number * hidden * copies
    return norms, 10 * kind.mixer.query_key_size, 5 * kind.mlp.width, 3 * kind.halves * hidden * copies


def find_slowest_stage(model: Model, layout: Layout, tokens: int) -> float:
    """Return the most FLOP of a pipeline stage, divided by the mean.

    Rows have `tokens` tokens.
    """
    flop = [kind.count_flop(model.hidden, tokens) for kind in model.layer_kinds]
    relative = [own / flop[0] for own in flop]
    stages = [layout.stage_layers(stage, model.layers) for stage in range(layout.pp)]
    by_stage = [sum(map(mul, model.count_kinds(*stretches), relative)) for stretches in stages]
    factor: float = max(by_stage) * layout.pp / sum(by_stage)
    return factor


def describe_rates(device: Device, rate: Figure, factor: float) -> str:
    """Return how the seconds of passes follow from their work.

    `rate` is the rate of products, and `factor` the number of passes.
    """
    how = "products, attention, memory at their rates"
    if rate.source != "measured":
        share = SHARES["memory_bandwidth"].value
        bandwidth = f"({share:g} x bandwidth)" if "memory_bandwidth" in device.peaks else "bandwidth"
        how = f"FLOP / ({SHARES['flops_bf16'].value:g} x FLOP/s), bytes / {bandwidth}"
    return f"{factor:.3g} x ({how})" if factor > 1 else how
