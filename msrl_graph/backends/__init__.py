"""Table of engines, and the names of device kinds on which no test has run.

Each engine has two halves: a spec, which the compiler reads, and the engine class, which computes. The spec is in a
file of its own, so that the compiler does not import the engine class.

Invariant: only this file and an engine's own files contain the engine's name. All other code looks engines up in this
table. Other packages can add engines (plugins.py).
"""

from __future__ import annotations

from ..files.plugins import PlugInTable
from ..hardware.device_kinds import ASCEND, CUDA
from . import fsdp_spec, hf_spec
from .megatron import spec as megatron_spec
from .spec import EngineSpec
from .vllm import spec as vllm_spec

ENGINES: PlugInTable[EngineSpec] = PlugInTable(
    "msrl_graph.engines",
    EngineSpec,
    {module.SPEC.name: module.SPEC for module in (fsdp_spec, hf_spec, megatron_spec, vllm_spec)},
)
# Device kinds that are implemented but were never available for a test, and device kinds tested on one device only.
UNTESTED_KINDS = (ASCEND.name,)
SINGLE_DEVICE_KINDS = (CUDA.name,)


def can_build(engine: str) -> bool:
    """Return whether this version of msrl_graph can run an engine.

    If this version cannot run the engine, the compiler can only make plans for the engine.
    """
    return bool(ENGINES[engine].build)
