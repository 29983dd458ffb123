"""Model families: one module each, listed here.

Invariant: no other module of the package depends on a family's name. What a family's models consist of is said by
their layers (layers.py) and features (features.py).
"""

from __future__ import annotations

from ...files.plugins import PlugInTable
from . import (
    deepseek_v3,
    gemma,
    gemma2,
    gemma3,
    glm,
    glm4,
    glm4_moe,
    gpt_oss,
    granite,
    llama,
    minimax_m2,
    mistral,
    mixtral,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    seed_oss,
    smollm3,
)
from .family import Family
from .hybrid import granitemoehybrid, nemotron_h, qwen3_5, qwen3_next

__all__ = ["FAMILIES", "Family", "find_family"]

# By name, which is the `model_type` of a config.json. Other packages can add families (plugins.py).
FAMILIES: PlugInTable[Family] = PlugInTable(
    "msrl_graph.families",
    Family,
    {
        family.name: family
        for family in (
            llama.FAMILY,
            qwen2.FAMILY,
            qwen3.FAMILY,
            qwen3_moe.FAMILY,
            deepseek_v3.FAMILY,
            gemma.FAMILY,
            mistral.FAMILY,
            mixtral.FAMILY,
            minimax_m2.FAMILY,
            gpt_oss.FAMILY,
            granite.FAMILY,
            seed_oss.FAMILY,
            smollm3.FAMILY,
            olmo2.FAMILY,
            phi3.FAMILY,
            glm.FAMILY,
            glm4.FAMILY,
            glm4_moe.FAMILY,
            olmo3.FAMILY,
            gemma2.FAMILY,
            gemma3.FAMILY,
            qwen3_next.FAMILY,
            qwen3_5.FAMILY,
            qwen3_5.MOE_FAMILY,
            nemotron_h.FAMILY,
            granitemoehybrid.FAMILY,
        )
    },
)


def find_family(architecture: str) -> Family | None:
    """Return the family of an architecture, or None."""
    for families in (FAMILIES.built_in, FAMILIES):
        for family in families.values():
            if family.architecture == architecture:
                return family
    return None
