"""Seconds that only a backward pass needs, besides its products."""

from __future__ import annotations

from ..backends.memory.sizes import count_logit_bytes
from ..backends.spec import BYTES, EngineSpec
from ..hardware.cluster import Device, Figure
from ..model.architecture import Model
from ..sharding.layout import Layout


def count_logits_again(model: Model, spec: EngineSpec, layout: Layout, scored: float, item: int) -> float:
    """Return the FLOP by which a backward pass computes logits that were not kept.

    A rank keeps all logits of `scored` tokens or none. `item` is the number of bytes of an element of the weights.
    """
    limit = spec.time.logits_at_once
    kept = count_logit_bytes(item) * scored * model.outputs / (layout.tp * layout.cp) <= limit
    return 0.0 if kept or not limit else 2 * scored * model.hidden * model.outputs


def logits_seconds(model: Model, spec: EngineSpec, layout: Layout, device: Device, dtype: str, scored: float) -> Figure:
    """Return the seconds in which a backward pass computes logits of `scored` tokens.

    The result is 0 if they were kept.
    """
    flop = count_logits_again(model, spec, layout, scored, BYTES[dtype]) * layout.dp / layout.devices
    rate = device.rate(dtype, flop)
    return Figure(flop / rate.value, rate.source, "logits once more: FLOP / FLOP/s")


def kept_seconds(
    model: Model, spec: EngineSpec, layout: Layout, device: Device, dtype: str, tokens: float, moved: float
) -> Figure:
    """Return the seconds in which a CPU writes and reads tensors for a backward pass.

    These tensors do not fit into the CPU's caches. (Results that only the next operator reads do fit.) A third of the
    bytes that operators move, `moved`, is counted as their results. Results of matrix products are counted separately.
    """
    if not device.kind.is_host:
        return Figure(0.0, "derived", "part of each operator's bytes")
    states = 1.5 * model.halves * model.hidden * spec.count_copies(layout)
    products = states + 2 * (model.query_key_size + model.mlp_width)
    written = (moved / 3 + tokens * products * BYTES[dtype]) * layout.dp / layout.devices
    bandwidth = device.rate("memory_bandwidth", 0)
    return Figure(2 * written / bandwidth.value, bandwidth.source, "2 x bytes kept / memory bandwidth")
