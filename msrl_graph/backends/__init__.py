"""Engines and devices, one file each: a spec that the compiler reads, and the half that runs."""

from __future__ import annotations

from . import fsdp, hf, megatron, vllm
from .spec import EngineSpec

ENGINES: dict[str, EngineSpec] = {e.SPEC.name: e.SPEC for e in (fsdp, hf, megatron, vllm)}
# The light engines, where a program names none.
DEFAULT = {"generate": "hf", "infer": "fsdp", "update": "fsdp"}
