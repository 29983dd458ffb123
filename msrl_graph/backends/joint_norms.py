"""Norms of all heads together, whose heads tensor parallelism shards.

Invariant: the result is that of the norm on one rank, up to rounding. In attention, each rank has the whole weight of
the norm, and uses the part of its own heads. So a rank's gradient of the weight is a partial sum.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any

from ..model.layers import Mamba2
from . import hf_modules
from .recurrent.parameters import read_locally

if TYPE_CHECKING:
    import torch

    from ..model.architecture import Model


def install(module: Any, model: Model, group: Any) -> None:
    """Make the joint norms of a transformers model sum over the ranks of `group`."""
    for mixer, part in hf_modules.list_recurrent(module, model):
        if isinstance(mixer, Mamba2) and mixer.shares_group:
            part.norm.forward = partial(_apply_gated_norm, part.norm, group)
    if "joint_norms" not in model.features:
        return
    for layer in module.model.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            norm.forward = partial(_apply_norm, norm, group)


def _apply_norm(norm: Any, group: Any, states: torch.Tensor) -> torch.Tensor:
    """Normalize this rank's part of a dimension.

    `states` are [..., size]. The dimension has `size` elements on each rank.
    """
    size = states.shape[-1]
    wide = states.float()
    square = _make_sum()(wide.square().sum(-1, keepdim=True), group) / (size * group.size())
    weight = norm.weight[group.rank() * size : (group.rank() + 1) * size]
    output: torch.Tensor = weight * (wide * (square + norm.variance_epsilon).rsqrt())
    return output.to(states.dtype)


def _apply_gated_norm(norm: Any, group: Any, states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Multiply the outputs of this rank's heads by gates, and normalize them.

    The weight is that of this rank's heads.
    """
    import torch

    gated = states.float() * torch.nn.functional.silu(gate.float())
    size = gated.shape[-1] * group.size()
    square = _make_sum()(gated.square().sum(-1, keepdim=True), group) / size
    weight = read_locally(norm, "weight")
    output: torch.Tensor = weight * (gated * (square + norm.variance_epsilon).rsqrt()).to(states.dtype)
    return output


@cache
def _make_sum() -> Any:
    import torch
    from torch import distributed as dist

    class JointSum(torch.autograd.Function):
        """An all-reduce that also sums gradients.

        Each rank uses the sum for its own heads, so each has only a part of the sum's gradient.
        """

        @staticmethod
        def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
            ctx.group = group
            total = part.clone()
            dist.all_reduce(total, group=group)
            return total

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
            total = gradients[0].clone()
            dist.all_reduce(total, group=ctx.group)
            return total, None

    return JointSum.apply
