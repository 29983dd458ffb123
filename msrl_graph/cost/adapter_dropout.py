"""The cost of dropout of an adapter's inputs (backends/kernels/keyed_dropout.py).

Invariant: the constants are the same for all models.
"""

from __future__ import annotations

from ..backends.spec import BYTES, EngineSpec
from ..hardware.cluster import Device, Figure
from ..model.architecture import Model
from ..model.lora import DOWN
from ..sharding.layout import Layout

CALLS = 40  # operators in an update, for each projection, by torch's profiler
# Bytes of the accesses to an element of a mask in a pass, and accesses to an element of the inputs.
MASK = 82
INPUTS = 3


def mask_seconds(
    model: Model, spec: EngineSpec, layout: Layout, device: Device, dtype: str, tokens: float, passes: float
) -> Figure:
    """Return the seconds of the masks of a micro-batch, which each pass computes.

    `tokens` is the number of tokens of a dp group. If an engine shards no sequences over tp, each tp rank computes the
    masks of inputs that all tp ranks have.
    """
    if model.lora is None or not model.lora.dropout:
        return Figure(0.0, "derived", "no dropout")
    ranks = layout.devices // layout.dp
    copies = spec.count_copies(layout)
    matrices = [tensor for tensor in model.trained if tensor.name.endswith(DOWN)]
    inputs = sum(matrix.shape[-1] * (copies if matrix.tp_dim < 0 else 1) for matrix in matrices)
    moved = tokens * inputs * (MASK + INPUTS * BYTES[dtype]) / ranks
    bandwidth = device.rate("memory_bandwidth", moved / len(matrices))
    return Figure(passes * moved / bandwidth.value, bandwidth.source, "masks of dropout / memory bandwidth")
