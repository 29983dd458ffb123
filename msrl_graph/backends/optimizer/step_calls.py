"""The number of operators that Python calls in an optimizer step (steps.py)."""

from __future__ import annotations

from ...sharding.layout import Layout
from ..spec import OperatorCalls

TENSORS = 12  # in a layer of the models that were counted


def step_calls(layout: Layout) -> OperatorCalls:
    """Return how many operators Python calls in an optimizer step under a layout.

    Torch's profiler counted the operators on Qwen2 models, which have TENSORS tensors per layer. A step updates
    tensor by tensor.
    """
    if layout.dp * layout.cp == 1:
        return OperatorCalls(108, 35)
    return (OperatorCalls(150, 49), OperatorCalls(230, 73), OperatorCalls(122, 43), OperatorCalls(122, 43))[layout.zero]
