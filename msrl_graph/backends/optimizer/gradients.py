"""Gradients: those of weights in bf16, summed in float32 over the micro-batches of a step; and sums over ranks.

Invariant: what was added is gone at once, so that at no moment all gradients are there in both types.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..devices import local
from ..sizes import CHUNK

if TYPE_CHECKING:
    import torch


class Gradients:
    """Of some parameters, which are DTensors or not. Those in float32 autograd sums itself, in the same type."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        import torch

        # By id, and in no way back to the parameters, which hold their hooks: engines go without a garbage collection.
        self._sums: dict[int, torch.Tensor] = {}
        for parameter in {id(p): p for p in parameters if p.dtype != torch.float32}.values():
            parameter.register_post_accumulate_grad_hook(partial(_add, self._sums))

    def of(self, parameter: Any) -> torch.Tensor | None:
        """This rank's part of the sum; None where there was none."""
        found = self._sums.get(id(parameter))
        return _own(parameter) if found is None else found

    def take(self, parameter: Any) -> torch.Tensor | None:
        """It, for the last time: the next is of another step."""
        found = self.of(parameter)
        self._sums.pop(id(parameter), None)
        parameter.grad = None
        return found


def _add(sums: dict[int, torch.Tensor], parameter: Any) -> None:
    """What a micro-batch gave."""
    gradient = _own(parameter)
    parameter.grad = None
    assert gradient is not None  # a hook runs when there is one
    if (found := sums.get(id(parameter))) is not None:
        found.add_(gradient)
    else:
        sums[id(parameter)] = gradient.float()


def add_up(gradients: Sequence[torch.Tensor], group: Any) -> None:
    """Sums gradients in place over the ranks of a group, bucket by bucket."""
    import torch
    from torch import distributed as dist

    bucket: list[torch.Tensor] = []
    for i, gradient in enumerate(gradients):
        bucket.append(gradient)
        if i + 1 == len(gradients) or sum(g.numel() for g in bucket) + gradients[i + 1].numel() > CHUNK:
            flat = torch.cat([g.reshape(-1) for g in bucket])
            dist.all_reduce(flat, group=group)
            for g, total in zip(bucket, torch.split(flat, [g.numel() for g in bucket]), strict=True):
                g.copy_(total.view(g.shape))
            bucket = []
            del flat, total  # or the next bucket's would be beside it


def _own(parameter: Any) -> torch.Tensor | None:
    gradient = parameter.grad
    # DTensor may leave a gradient otherwise placed than its parameter (a divided embedding's comes out whole).
    if hasattr(gradient, "placements") and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return None if gradient is None else local(gradient)
