"""Gradients of an optimizer step, summed over micro-batches and over ranks.

Sums are in float32 or in bf16 (the engine option `gradients`). In bf16, a sum is rounded to the nearest bf16 after each
micro-batch, and where ranks are summed.

Invariant: a gradient whose dtype differs from the dtype of its sum is freed as soon as it is added, so that the full
set of gradients never exists in both dtypes at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..devices import get_local_tensor
from ..memory.sizes import CHUNK

if TYPE_CHECKING:
    import torch


class Gradients:
    """The gradients of some parameters, summed over micro-batches.

    The parameters may be DTensors. `dtype` is the dtype of the sums. This class sums the gradients of parameters of
    other dtypes. Autograd itself sums the gradients of parameters of this dtype.
    """

    def __init__(self, parameters: Iterable[Any], dtype: torch.dtype) -> None:
        # By id, without a reference to the parameters: parameters hold their hooks, so a reference would be a cycle.
        # An engine would then be freed only by a garbage collection.
        self._sums: dict[int, torch.Tensor] = {}
        for parameter in {id(weight): weight for weight in parameters if weight.dtype != dtype}.values():
            parameter.register_post_accumulate_grad_hook(partial(_add, self._sums, dtype))

    def read(self, parameter: Any) -> torch.Tensor | None:
        """Return this rank's shard of a parameter's gradient sum.

        The result is None if the parameter has no gradient.
        """
        total = self._sums.get(id(parameter))
        return _read_gradient(parameter) if total is None else total

    def take(self, parameter: Any) -> torch.Tensor | None:
        """Return a parameter's gradient sum, and remove the sum from this object.

        Gradients that are computed after this call belong to the next optimizer step.
        """
        total = self.read(parameter)
        self._sums.pop(id(parameter), None)
        parameter.grad = None
        return total


def _add(sums: dict[int, torch.Tensor], dtype: torch.dtype, parameter: Any) -> None:
    """Add a parameter's gradient for one micro-batch to the parameter's sum in `sums`.

    An addition to a bf16 sum is computed in float32 and rounded once.
    """
    gradient = _read_gradient(parameter)
    parameter.grad = None
    assert gradient is not None  # the hook runs only when there is a gradient
    if (total := sums.get(id(parameter))) is not None:
        total.add_(gradient)
    else:
        sums[id(parameter)] = gradient.to(dtype)


def add_up(gradients: Sequence[torch.Tensor], group: Any) -> None:
    """Sum gradients in place over the ranks of a group, bucket by bucket.

    A bucket is some gradients that are concatenated for one all-reduce.
    """
    import torch
    from torch import distributed as dist

    bucket: list[torch.Tensor] = []
    for i, gradient in enumerate(gradients):
        bucket.append(gradient)
        if i + 1 == len(gradients) or sum(piece.numel() for piece in bucket) + gradients[i + 1].numel() > CHUNK:
            flat = torch.cat([piece.reshape(-1) for piece in bucket])
            dist.all_reduce(flat, group=group)
            for piece, total in zip(bucket, torch.split(flat, [piece.numel() for piece in bucket]), strict=True):
                piece.copy_(total.view(piece.shape))
            bucket = []
            del flat, total  # or they would exist next to the next bucket's


def _read_gradient(parameter: Any) -> torch.Tensor | None:
    return None if parameter.grad is None else get_local_tensor(parameter.grad)
