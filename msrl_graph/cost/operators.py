"""The work of a forward pass's operators.

Invariant: constants are numbers of operators or accesses, the same for all models.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..hardware.cluster import Figure

KERNELS = Figure(12, "assumed", "12 kernels a layer, fused")
PRODUCTS = 7  # of a layer: q, k, v, o, gate, up, down
# Accesses per logit: for log-probabilities, and to sample a token.
SCORING = 7
DRAWING = 15


@dataclass(frozen=True)
class ForwardWork:
    """The work of a forward pass on all devices of a group.

    `tokens` are in the layers, `scored` positions in the head, `sequences` in attention with `pairs` of query and key
    each; `moved` are bytes besides weights.
    """

    tokens: float
    scored: float
    sequences: float
    pairs: float
    moved: float
