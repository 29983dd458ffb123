"""Models that vLLM builds of transformers' modules.

Invariant: classes of transformers stay as they are, so that other engines of the process can build them.
"""

from __future__ import annotations

from typing import Any


def keep_classes_unchanged() -> None:
    """Keep vLLM from preparing classes of transformers for torch.compile.

    vLLM would replace the base classes and the constructor of a model's class, for the whole process. The engine
    compiles no model (core.py), so it needs no such class.
    """
    from vllm.model_executor.models.transformers.base import Base

    def leave(_model: Any, **_options: Any) -> None:
        pass

    Base._decorate_for_torch_compile = leave


def shard_fused_mlps(module: Any) -> None:
    """Let each rank compute its own part of gate and up where they are one projection.

    vLLM would shard the projection by rows, so that one rank has gate and another has up, and gather the outputs. Here
    each rank has rows of both, as everywhere else, and the projection down reads the rank's own part.
    """
    for part in module.modules():
        if getattr(getattr(part, "gate_up_proj", None), "gather_output", False):
            part.gate_up_proj.gather_output = False
            part.down_proj.input_is_parallel = True
