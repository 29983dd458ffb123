"""Table of engines, and the devices that they run on.

Each engine has one file with a spec, which the compiler reads, and the half that runs.

Invariant: an engine is named here and in its own file, and nowhere else. Everything runs by this table.
"""

from __future__ import annotations

from ..hardware.device_kinds import ASCEND, CUDA
from . import fsdp, hf
from .megatron import engine as megatron
from .spec import EngineSpec
from .vllm import engine as vllm

ENGINES: dict[str, EngineSpec] = {module.SPEC.name: module.SPEC for module in (fsdp, hf, megatron, vllm)}
# Device kinds that are implemented but were never available for a test, and those tested on one device only.
UNTESTED_KINDS = (ASCEND.name,)
SINGLE_DEVICE_KINDS = (CUDA.name,)


def can_build(engine: str) -> bool:
    """Return whether an engine can be built, not only planned for."""
    return bool(ENGINES[engine].build)
