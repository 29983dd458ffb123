"""Models that vLLM builds of transformers' modules.

Invariant: classes of transformers stay as they are, so that other engines of the process can build them.
"""

from __future__ import annotations

from typing import Any


def keep_unchanged() -> None:
    """Keep vLLM from preparing classes of transformers for torch.compile.

    vLLM would replace the base classes and the constructor of a model's class, for the whole process. The engine
    compiles no model (core.py), so it needs no such class.
    """
    from vllm.model_executor.models.transformers.base import Base

    def leave(_model: Any, **_options: Any) -> None:
        pass

    Base._decorate_for_torch_compile = leave
