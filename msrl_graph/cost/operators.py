"""The amount of work in a forward pass, counted in operators and memory accesses.

Invariant: the constants of this module are numbers of operators or of memory accesses, and are the same for all models.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..backends.optimizer.step_calls import TENSORS
from ..backends.spec import Act, EngineSpec, OperatorCalls
from ..hardware.cluster import Figure
from ..model.architecture import Model
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
    """Return how many elements per token operators move between matrix products.

    They are 7 h for each norm and 3 h for the residual of half a layer (h: hidden size), on each of `copies` ranks, 10
    for each element of queries and keys that is rotated, and 5 f for gating (f: intermediate size).
    """
    whole = (7 * model.norms + 3 * model.halves) * model.hidden * copies
    return whole + 10 * model.query_key_size + 5 * model.mlp_width
