"""Puts a device's kernels into a transformers model, in the place of what its modules compute themselves.

Invariant: where a table has none the model stays as it is, operator by operator. What is changed is this model's
modules, never a class or a file of transformers: another model of the process may lie on another device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import unwrap
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from . import Kernels, RmsNorm, Rotary, Summed, SwiGlu

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh


def install(module: Any, kernels: Kernels) -> None:
    """RMSNorm, SwiGLU and RoPE; before parallelism is put on it."""
    for part in module.modules():
        if kernels.rms_norm is not None and hasattr(part, "variance_epsilon"):
            part.forward = partial(_norm, part, kernels.rms_norm)
        if kernels.swiglu is not None and hasattr(part, "gate_proj") and is_silu(getattr(part, "act_fn", None)):
            part.forward = partial(_feed, part, kernels.swiglu)
    if kernels.rotary is not None:
        for layer in module.model.layers:
            layer.self_attn.forward = _turning(layer.self_attn, kernels.rotary)


def is_silu(activation: Any) -> bool:
    from transformers.activations import ACT2FN

    return isinstance(activation, type(ACT2FN["silu"]))


def _norm(module: Any, kernel: RmsNorm, x: torch.Tensor) -> torch.Tensor:
    return kernel(x, module.weight, module.variance_epsilon)


def _feed(module: Any, kernel: SwiGlu, x: torch.Tensor) -> torch.Tensor:
    import torch

    # What is joined lives beside the join alone: no name holds it.
    found: torch.Tensor = module.down_proj(kernel(torch.cat([module.gate_proj(x), module.up_proj(x)], dim=-1)))
    return found


def _turning(attention: Any, kernel: Rotary) -> Callable[..., Any]:
    """The forward of an attention that finds these where transformers' own are: functions of its file, which it has no
    other way to be given."""

    def halves(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos = cos.unsqueeze(1)
        sin = sin.unsqueeze(1)
        return kernel(q, cos, sin), kernel(k, cos, sin)

    def pairs(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # DeepSeek's pairs lie side by side, and come out as halves: a kernel that leaves them in place is not it.
        q, k = (x.view(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2) for x in (q, k))
        return halves(q, k, cos, sin)

    own = unwrap(type(attention).forward)
    names = {"apply_rotary_pos_emb": halves, "apply_rotary_pos_emb_interleave": pairs}
    if not names.keys() & {*own.__code__.co_names}:
        raise RuntimeError(f"{own.__qualname__} turns by other names")
    around = {**own.__globals__, **names}
    made = FunctionType(own.__code__, around, own.__name__, own.__defaults__, own.__closure__)
    made.__kwdefaults__ = own.__kwdefaults__
    return MethodType(made, attention)


def divide_rows(linear: Any, mesh: DeviceMesh, kernel: Summed) -> None:
    """As RowwiseParallel divides a product's inner dimension, with the sum over the ranks by the kernel: weights and
    gradients are DTensors alike."""
    import torch
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

    def divided(_name: str, part: Any, over: DeviceMesh) -> None:
        part.weight = torch.nn.Parameter(distribute_tensor(part.weight, over, [Shard(1)]), part.weight.requires_grad)

    distribute_module(linear, mesh, divided)  # a bias is whole on each rank

    def forward(x: torch.Tensor) -> torch.Tensor:
        found = kernel(x, linear.weight.to_local(), mesh.get_group())
        return found if linear.bias is None else found + linear.bias.to_local()

    linear.forward = forward
