"""Engines, one file each: a spec that the compiler reads, and the half that runs; and the devices that they run on.

Invariant: an engine is named here and in its own file, and nowhere else: what runs, runs by this table."""

from __future__ import annotations

from ..hardware.device_kinds import ASCEND, CUDA
from . import fsdp, hf
from .megatron import engine as megatron
from .spec import EngineSpec
from .vllm import engine as vllm

ENGINES: dict[str, EngineSpec] = {e.SPEC.name: e.SPEC for e in (fsdp, hf, megatron, vllm)}
# Kinds of devices that are written for: of which none was at hand, and of which one alone was.
UNTRIED = (ASCEND.name,)
ALONE = (CUDA.name,)


def runs(engine: str) -> bool:
    """Whether an engine can be built, and not only planned for."""
    return bool(ENGINES[engine].build)
