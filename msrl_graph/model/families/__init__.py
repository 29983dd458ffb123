"""Model families: one module each, listed here.

Invariant: no other module of the package depends on a family's name. What a family's models consist of is said by
their layers (layers.py) and features (features.py).
"""

from __future__ import annotations

from . import deepseek_v3, gemma, llama, qwen2, qwen3, qwen3_moe
from .family import Family

__all__ = ["FAMILIES", "Family", "find_family", "named_family"]

FAMILIES = (llama.FAMILY, qwen2.FAMILY, qwen3.FAMILY, qwen3_moe.FAMILY, deepseek_v3.FAMILY, gemma.FAMILY)


def find_family(architecture: str) -> Family | None:
    """Return the family of an architecture, or None."""
    return next((family for family in FAMILIES if family.architecture == architecture), None)


def named_family(name: str) -> Family:
    """Return the family `name`, which is the `model_type` of a config.json."""
    return next(family for family in FAMILIES if family.name == name)
