"""Table of engines, and the devices that they run on.

Each engine has a spec, which the compiler reads, and a half that runs. The spec is in a file of its own here, so that
compiling loads nothing of the other half.

Invariant: an engine is named here and in its own files, and nowhere else. Everything runs by this table.
"""

from __future__ import annotations

from ..hardware.device_kinds import ASCEND, CUDA
from . import fsdp_spec, hf_spec
from .megatron import spec as megatron_spec
from .spec import EngineSpec
from .vllm import spec as vllm_spec

ENGINES: dict[str, EngineSpec] = {
    module.SPEC.name: module.SPEC for module in (fsdp_spec, hf_spec, megatron_spec, vllm_spec)
}
# Device kinds that are implemented but were never available for a test, and those tested on one device only.
UNTESTED_KINDS = (ASCEND.name,)
SINGLE_DEVICE_KINDS = (CUDA.name,)


def can_build(engine: str) -> bool:
    """Return whether an engine can be built, not only planned for."""
    return bool(ENGINES[engine].build)
