"""The spec of generation by transformers (hf.py)."""

from __future__ import annotations

from ..model.features import SUPPORTED
from ..sharding.layout import Layout
from .memory import generator
from .spec import Act, Capabilities, EngineSpec, MemoryModel, OperatorCalls, TimeModel


def _calls(act: Act, layout: Layout) -> OperatorCalls:
    """Return how many operators Python calls in one step of a generation.

    `act` is the kind of the step. The operators are those of a forward pass and of the draw of a token. Torch's
    profiler counted the operators on Qwen2 models of 2 and 6 layers.
    """
    return OperatorCalls(63 if act == "prefill" else 55, (68 if act == "prefill" else 57) + 17 * (layout.tp > 1))


SPEC = EngineSpec(
    name="hf",
    verbs=("generate",),
    build="msrl_graph.backends.hf:HfEngine",
    capabilities=Capabilities(
        axes=("tp", "dp"),
        options=("micro_batch", "dtype", "memory"),
        features=SUPPORTED,
        planned_features=SUPPORTED,
        opt_in=("min_p",),
        routes=True,
        chosen=("host",),
    ),
    memory=MemoryModel(
        peaks=generator.peaks,
    ),
    time=TimeModel(
        calls=_calls,
        continuous=True,
        shares_beginnings=("host", "device"),
        # A decoding step reads the cache for attention, copies the cache to append new keys and values, and copies out
        # the rows that continue.
        cache_passes=5,
    ),
)
