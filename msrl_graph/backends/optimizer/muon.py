"""The Muon optimizer on sharded matrices.

Source: https://kellerjordan.github.io/posts/muon/.

Invariant: each rank stores the momentum of the elements that it updates. All ranks that hold a part of a matrix
orthogonalize the momentum of the whole matrix, with the same result. Each rank then updates its own part of the matrix.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ...sharding.layout import slices
from ...sharding.tensors import Box
from ..engine_protocols import Shard
from .shards import OptimizerSlice, scale_gradient

if TYPE_CHECKING:
    import torch

    from ...sharding.tensors import Tensor

ITERATIONS = 5  # Newton-Schulz iterations


class Matrices(OptimizerSlice):
    """The matrices that a rank updates by Muon.

    Each rank stores the momentum of the elements that it updates. All ranks that hold a part of a matrix orthogonalize
    the momentum of the whole matrix, with the same result. The weights of each expert are a separate matrix, on the
    ranks that hold the expert.
    """

    def _update_masters(self, gradients: list[torch.Tensor], scale: float, options: dict[str, Any]) -> None:
        own = (
            list(self._iterate_own_slices())
            if self.flat
            else [(i, slice(None), slice(None)) for i in range(len(self.shards))]
        )
        for i in range(len(self.shards)):
            gradient = gradients[0 if self.flat else i]
            pieces = [(where, piece) for index, where, piece in own if index == i]
            self._step_matrix(i, gradient, scale, pieces, options)

    def _step_matrix(
        self,
        i: int,
        gradient: torch.Tensor,
        scale: float,
        pieces: list[tuple[slice, slice]],
        options: dict[str, Any],
    ) -> None:
        """Update the weights of the i-th shard.

        `pieces` are the parts of the shard that this rank updates. Each part is a pair of slices: the part's elements
        in the master (the float32 weight), and the part's elements in the shard. Temporary tensors are freed on return,
        so that the temporary tensors of two matrices never exist at once.
        """
        import torch

        tensor = self.tensors[i]
        shard = self.shards[i]
        master = self.masters[0 if self.flat else i]
        momentum = torch.zeros(shard.tensor.shape, device=self.place)  # 0 at the elements that another rank updates
        for where, piece in pieces:
            part = scale_gradient(gradient.reshape(-1)[where], scale)
            momentum.view(-1)[piece] = self._update_momentum(master, part, where, options)
            del part  # or it would exist next to the matrix
        direction = self._assemble_matrix(momentum, tensor, shard)
        del momentum
        for matrix in direction.view(-1, *direction.shape[-2:]):  # each expert is a matrix
            orthogonalize(matrix)
        own_part = direction[slices(_locate_shard(tensor, shard))]
        for where, piece in pieces:
            # A weight that is its own master may be a part of another tensor.
            values, change = (master[where], own_part.reshape(-1)[piece]) if self.flat else (master, own_part)
            values.mul_(1 - options["lr"] * options["weight_decay"]).add_(
                change, alpha=-options["lr"] * _scale(tensor, options)
            )

    def _update_momentum(
        self, master: torch.Tensor, gradient: torch.Tensor, where: slice, options: dict[str, Any]
    ) -> torch.Tensor:
        """Update and return the momentum of some elements of a master, in float32.

        A master is the float32 weight. `where` is the slice of the elements in the flattened master, and `gradient` is
        their gradient. With the option `nesterov`, the returned value is Nesterov's: the updated momentum, combined
        with the gradient once more.
        """
        stored = self._get_states(master)["momentum_buffer"].view(-1)[where]
        buffer = stored.float().lerp_(gradient, 1 - options["momentum"])
        stored.copy_(buffer)
        return gradient.lerp(buffer, options["momentum"]) if options["nesterov"] else buffer

    def _assemble_matrix(self, own: torch.Tensor, tensor: Tensor, shard: Shard) -> torch.Tensor:
        """Return a whole matrix, assembled from the parts of all ranks.

        For a weight of experts, the result has the whole matrices of this rank's experts. Each rank contributes a
        tensor that is zero outside the rank's own part. So the sum over ranks has the same bits as the parts,
        regardless of how the matrix is sharded.
        """
        import torch
        from torch import distributed as dist

        if self.flat:
            dist.all_reduce(own, group=self.copies.group)
        shape = (len(own), *tensor.shape[1:]) if tensor.experts else tensor.shape
        if own.shape == shape:
            return own
        matrix = torch.zeros(shape, device=self.place)
        matrix[slices(_locate_shard(tensor, shard))] = own
        if tensor.experts:
            dist.all_reduce(matrix, group=self.devices.make_group(self.layout, "pp", "ep", "edp"))
            return matrix
        if self.divided:
            dist.all_reduce(matrix, group=self.devices.axis("dp").get_group())
        if self.layout.tp > 1 and tensor.tp_dim >= 0:
            dist.all_reduce(matrix, group=self.devices.axis("tp").get_group())
        return matrix


def _locate_shard(tensor: Tensor, shard: Shard) -> Box:
    """Return the box of a shard in the matrix that `_assemble_matrix` returns.

    For a dense weight, that matrix is the whole weight. For a weight of experts, that matrix has only the experts of
    this rank.
    """
    first, *rest = shard.box
    return ((0, first[1] - first[0]), *rest) if tensor.experts else shard.box


def orthogonalize(matrix: torch.Tensor) -> None:
    """Orthogonalize a matrix in place by Newton-Schulz iterations.

    The singular vectors do not change; the singular values become nearly 1.

    The coefficients and the number of iterations are the same as in torch.optim.Muon
    (https://kellerjordan.github.io/posts/muon/). torch.optim.Muon computes in bf16, this function in float32. With
    bf16, a change in the last bit of a gradient moved weights by up to 4e-4 in six steps at a learning rate of 1e-3, so
    the results of two layouts would differ by that much.
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
    """Return a factor for a matrix's update, computed from the matrix's shape.

    Source: arXiv:2502.16982, eq. 4.
    """
    rows, columns = tensor.shape[-2:]
    return (
        0.2 * math.sqrt(max(rows, columns))
        if options["adjust"] == "match_rms_adamw"
        else math.sqrt(max(1, rows / columns))
    )
