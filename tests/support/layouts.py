"""Random tensors and layouts, and a box's elements, for tests of layouts."""

from __future__ import annotations

from itertools import product

from hypothesis import strategies as st

from msrl_graph.sharding.layout import Layout, Side
from msrl_graph.sharding.tensors import Box, Tensor

LAYERS = 5


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """A tensor with anything that may divide it, in a layer of LAYERS."""
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    experts = draw(st.booleans()) and len(shape) > 1
    tp_dim = draw(st.sampled_from([-1, *range(1 if experts else 0, len(shape))]))
    unit = draw(st.sampled_from([1, 1, 2, 3]))
    shared = draw(st.booleans())
    padded = draw(st.booleans())
    if tp_dim >= 0:
        shape[tp_dim] *= unit
    layer = draw(st.integers(-1, LAYERS))
    return Tensor(
        "t",
        tuple(shape),
        tp_dim,
        unit=unit if tp_dim >= 0 else 1,
        shared=shared and tp_dim >= 0,
        padded=padded and not shared and unit == 1 and tp_dim == 0,
        experts=experts,
        tied=layer < 0 and draw(st.booleans()),
        layer=layer,
        layers=LAYERS,
    )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@st.composite
def layouts(draw: st.DrawFn, devices: int | None = None) -> Layout:
    devices = devices or draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]))
    pp = draw(st.sampled_from([p for p in _divisors(devices) if p <= LAYERS]))
    tp = draw(st.sampled_from(_divisors(devices // pp)))
    cp = draw(st.sampled_from(_divisors(devices // pp // tp)))
    dp = devices // pp // tp // cp
    etp = draw(st.sampled_from(_divisors(tp * cp * dp)))
    ep = draw(st.sampled_from(_divisors(tp * cp * dp // etp)))
    stages = tuple(draw(st.permutations([LAYERS - pp + 1, *[1] * (pp - 1)]))) if draw(st.booleans()) else ()
    vpp = draw(st.sampled_from([1, 2])) if not stages and pp > 1 else 1
    inner = draw(st.sampled_from(_divisors(dp)))
    return Layout(tp=tp, cp=cp, pp=pp, dp=dp, ep=ep, etp=etp, vpp=vpp, inner=inner, stages=stages)


@st.composite
def sides(draw: st.DrawFn, devices: int | None = None, first: int = 0, each: int = 0) -> Side:
    return Side(draw(layouts(devices)), draw(st.booleans()), draw(st.sampled_from([1, 1, 4])), first, each)


def points(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(a, b) for a, b in box)))
