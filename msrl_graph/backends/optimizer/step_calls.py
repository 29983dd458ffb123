"""The number of operators of an optimizer step (steps.py)."""

from __future__ import annotations

from ...sharding.layout import Layout
from ..spec import OperatorCalls


def step_calls(layout: Layout) -> OperatorCalls:
    """Return the operator counts of a step, by the ranks that have copies of a weight.

    Counted by torch's profiler on Qwen2 models (12 tensors a layer; a step goes tensor by tensor).
    """
    if layout.dp * layout.cp == 1:
        return OperatorCalls(108, 35)
    return (OperatorCalls(150, 49), OperatorCalls(230, 73), OperatorCalls(122, 43), OperatorCalls(122, 43))[layout.zero]
