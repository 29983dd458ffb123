"""Engines, one file each: a spec that the compiler reads, and the half that runs; and the devices that they run on.

Invariant: an engine is named here and in its own file, and nowhere else: what runs, runs by this table."""

from __future__ import annotations

from ..hardware.device_kinds import CUDA, HOST
from . import fsdp, hf, megatron, vllm
from .spec import EngineSpec

ENGINES: dict[str, EngineSpec] = {e.SPEC.name: e.SPEC for e in (fsdp, hf, megatron, vllm)}
# By kind of device, the engines that a run of this version may use there; for all others it plans.
RUNS: dict[str, tuple[str, ...]] = dict.fromkeys((HOST.name, CUDA.name), ("fsdp", "hf", "megatron", "vllm"))
# Kinds of devices of which none was at hand: they are written for, and have never been tried.
UNTRIED = (CUDA.name,)


def runs(engine: str, device: str = "") -> bool:
    """Whether an engine runs in this version: on devices of a kind, or on any."""
    return any(engine in engines for kind, engines in RUNS.items() if device in ("", kind))
