"""Muon (https://kellerjordan.github.io/posts/muon/): steps of whole matrices.

Invariant: the momentum of each element is its rank's own; what is made orthogonal is the whole matrix, the same on all
ranks that have a part of it, and each takes its own part of the result.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from ...ir.optimizer_spec import Rule
from ...sharding.layout import Box, slices
from ..spec import Shard
from .shards import OptimizerSlice

if TYPE_CHECKING:
    import torch

    from ...sharding.layout import Tensor

ITERATIONS = 5  # of Newton and Schulz


class Matrices(OptimizerSlice):
    """Matrices that step by Muon: the momentum of each element is this rank's own, what is made orthogonal is the whole
    matrix, the same on all ranks that have a part of it. Of experts each is a matrix, on the ranks that hold it."""

    def _prepare(self, rule: Rule) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        return defaultdict(dict)

    def _turn(self, options: dict[str, Any]) -> None:
        own = list(self._own()) if self.flat else [(i, slice(None), slice(None)) for i in range(len(self.shards))]
        for i in range(len(self.shards)):
            self._step(i, [(where, piece) for j, where, piece in own if j == i], options)

    def _step(self, i: int, pieces: list[tuple[slice, slice]], options: dict[str, Any]) -> None:
        """A step of the i-th shard: of its `pieces` that are this rank's to step, each where it is in its master, and
        in the shard. What it makes is gone when it returns, or the next matrix would have it beside its own."""
        tensor = self.tensors[i]
        shard = self.shards[i]
        master = self.masters[0 if self.flat else i]
        turned = self._whole(self._momenta(master, pieces, shard, options), tensor, shard)
        for matrix in turned.view(-1, *turned.shape[-2:]):  # of experts each
            orthogonalize(matrix)
        part = turned[slices(_kept(tensor, shard))]
        for where, piece in pieces:
            # A weight that is its own master may be a part of another tensor.
            values, change = (master[where], part.reshape(-1)[piece]) if self.flat else (master, part)
            values.mul_(1 - options["lr"] * options["weight_decay"]).add_(
                change, alpha=-options["lr"] * _scale(tensor, options)
            )

    def _momenta(
        self, master: torch.Tensor, pieces: list[tuple[slice, slice]], shard: Shard, options: dict[str, Any]
    ) -> torch.Tensor:
        """The momentum of a shard, zero where another rank steps."""
        import torch

        made = torch.zeros(shard.tensor.shape, device=self.place)
        for where, piece in pieces:
            made.view(-1)[piece] = self._momentum(master, where, options)
        return made

    def _momentum(self, master: torch.Tensor, where: slice, options: dict[str, Any]) -> torch.Tensor:
        """The momentum of some elements of a master, taken on by their gradient, as Muon takes it: with `nesterov` a
        step ahead."""
        import torch

        if "momentum_buffer" not in self.state[master]:
            self.state[master]["momentum_buffer"] = torch.zeros(master.shape, device=self.place)
        assert master.grad is not None
        buffer = self.state[master]["momentum_buffer"].view(-1)[where]
        gradient = master.grad.reshape(-1)[where]
        buffer.lerp_(gradient, 1 - options["momentum"])
        return gradient.lerp(buffer, options["momentum"]) if options["nesterov"] else buffer

    def _whole(self, own: torch.Tensor, tensor: Tensor, shard: Shard) -> torch.Tensor:
        """A matrix, or those of a rank's experts, from what ranks have of it, zero where another has it: the sum
        changes no bit, whatever the boxes."""
        import torch
        from torch import distributed as dist

        if self.flat:
            dist.all_reduce(own, group=self.copies.group)
        shape = (len(own), *tensor.shape[1:]) if tensor.experts else tensor.shape
        if own.shape == shape:
            return own
        whole = torch.zeros(shape, device=self.place)
        whole[slices(_kept(tensor, shard))] = own
        if tensor.experts:
            dist.all_reduce(whole, group=self.devices.among(self.layout, "pp", "ep", "edp"))
            return whole
        if self.divided:
            dist.all_reduce(whole, group=self.devices.axis("dp").get_group())
        if self.layout.tp > 1 and tensor.tp_dim >= 0:
            dist.all_reduce(whole, group=self.devices.axis("tp").get_group())
        return whole


def _kept(tensor: Tensor, shard: Shard) -> Box:
    """Where a shard lies in the whole matrix, or in those of the rank's own experts."""
    first, *rest = shard.box
    return ((0, first[1] - first[0]), *rest) if tensor.experts else shard.box


def orthogonalize(matrix: torch.Tensor) -> None:
    """Makes of a matrix, in place, one with the same singular vectors and singular values near 1, by Newton-Schulz
    iterations.

    Coefficients and number are those of torch.optim.Muon (https://kellerjordan.github.io/posts/muon/), which computes
    in bf16. There the last bit of a gradient moved weights by up to 4e-4 in six steps of a rate of 1e-3: layouts would
    differ by as much. This is in float32.
    """
    import torch

    a = 3.4445
    b = -4.7750
    c = 2.0315
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x.div_(x.norm().clamp(min=1e-7))
    following = torch.empty_like(x)
    for _ in range(ITERATIONS):
        square = x @ x.T
        torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a, out=following)
        x, following = following, x
        del square
    if ITERATIONS % 2:
        following.copy_(x)


def _scale(tensor: Tensor, options: dict[str, Any]) -> float:
    """What a step is multiplied by for its matrix's shape (arXiv:2502.16982, eq. 4)."""
    rows, columns = tensor.shape[-2:]
    return (
        0.2 * math.sqrt(max(rows, columns))
        if options["adjust"] == "match_rms_adamw"
        else math.sqrt(max(1, rows / columns))
    )
