"""Seconds that only a backward pass needs, besides its products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..backends.memory.sizes import count_logit_bytes
from ..backends.spec import BYTES, EngineSpec
from ..hardware.cluster import Device, Figure
from ..ir.expr import OptionValue
from ..ir.workload import Recomputation
from ..model.architecture import Model
from ..model.layers import ExpertMlp, Layer
from ..sharding.layout import Layout
from .operators import count_moved_elements_of_layer

# The share of the operators of a layer's forward pass that are in a part.
CALLS = {"attention": 0.5, "mlp": 0.2, "moe": 0.4, "activation": 0.03, "norms": 0.15}


@dataclass(frozen=True)
class RecomputedShares:
    """How much of the layers' forward pass a backward pass computes again.

    Each share is from 0 to 1: of the FLOP of products, of attention, of the layers with experts, of the elements that
    operators move between products, and of the operators.
    """

    products: float = 0.0
    attention: float = 0.0
    experts: float = 0.0
    moved: float = 0.0
    calls: float = 0.0

    @classmethod
    def find(cls, model: Model, option: OptionValue, layout: Layout) -> RecomputedShares:
        """Return the shares by the value of the option `recompute`."""
        if not (recompute := Recomputation.of_option(option)):
            return NOTHING
        first = model.first_trained
        chunks = [
            (max(start, first), max(stop, first))
            for stage in range(layout.pp)
            for start, stop in layout.stage_layers(stage, model.layers)
        ]
        whole = [recompute.find_whole_layers(*chunk) for chunk in chunks]
        whole_counts = model.count_kinds(*((layers.start, layers.stop) for layers in whole))
        others = model.count_kinds(*((layers.stop, stop) for layers, (_, stop) in zip(whole, chunks, strict=True)))
        every = model.count_kinds((0, model.layers))
        work = [_LayerWork.of(kind, model, layout.tp) for kind in model.layer_kinds]
        total = [sum(count * own.whole[item] for count, own in zip(every, work, strict=True)) for item in range(5)]
        again = [
            sum(
                number * own.whole[item] + other * own.count(recompute.parts)[item]
                for number, other, own in zip(whole_counts, others, work, strict=True)
            )
            for item in range(5)
        ]
        return cls(*(part / most if most else 0.0 for part, most in zip(again, total, strict=True)))


NOTHING = RecomputedShares()
WHOLE = RecomputedShares(1, 1, 1, 1, 1)


@dataclass(frozen=True)
class _LayerWork:
    """The work of a layer's forward pass, as a whole and by part.

    The numbers have the order of the fields of `RecomputedShares`.
    """

    whole: tuple[float, ...]
    parts: Mapping[str, tuple[float, ...]]

    @classmethod
    def of(cls, kind: Layer, model: Model, tp: int) -> _LayerWork:
        mlp = "moe" if isinstance(kind.mlp, ExpertMlp) else "mlp"
        norms, mixed, gated, rest = count_moved_elements_of_layer(kind, model.hidden, tp)
        parts = {
            "attention": (kind.mixer.projected, kind.has_mixer, 0, mixed, CALLS["attention"]),
            mlp: (kind.mlp.projected, 0, mlp == "moe", gated, CALLS[mlp]),
            "activation": (0, 0, 0, gated, CALLS["activation"]),
            "norms": (0, 0, 0, norms, CALLS["norms"]),
        }
        projected = kind.mixer.projected + kind.mlp.projected
        return cls((projected, kind.has_mixer, mlp == "moe", norms + mixed + gated + rest, 1.0), parts)

    def count(self, parts: tuple[str, ...]) -> tuple[float, ...]:
        own = [self.parts[part] for part in parts if part in self.parts]
        if "activation" in parts and {"mlp", "moe"} & {*parts} & self.parts.keys():
            own.remove(self.parts["activation"])
        return tuple(map(sum, zip(*own, strict=True))) if own else (0.0,) * len(self.whole)


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
