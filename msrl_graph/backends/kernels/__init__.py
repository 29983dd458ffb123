"""The operators that a model's layers are computed by, one table for a kind of device.

Invariant: what a table's functions give is what the plain formulas give (reference.py), values and gradients, up to
rounding. A device's table is one file here, which its kind names (hardware/device_kinds.py), and nothing else of an
engine asks which kind it computes on. Torch-free at import.

Where a table has None, layers are as the model has them. On a host's cores and by CUDA that is so of RMSNorm, SwiGLU
and RoPE: transformers' RMSNorm and vLLM's round at the same place, to the model's type before the weight is multiplied,
and torch.nn.functional.rms_norm at another, by which a policy would differ from the one that it was sampled from. The
sum over ranks of a divided product is DTensor's RowwiseParallel there.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from ...hardware.device_kinds import DeviceKind


class Attention(Protocol):
    """Causal attention: of `q` [rows, heads, width, size], and `k` and `v`, which may have fewer heads, each for as
    many of the others; with a window a query sees so many keys, of which its own is the last."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, window: int | None
    ) -> torch.Tensor: ...


class Grouped(Protocol):
    """The products of rows that lie by group, [rows, in], with the group's weights, [groups, in, out]; the rows of a
    group end before `ends` (int32), and a group may have none."""

    def __call__(self, rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor: ...


class RmsNorm(Protocol):
    def __call__(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor: ...


class SwiGlu(Protocol):
    """Of gates and what they are for, one behind the other in the last dimension."""

    def __call__(self, joined: torch.Tensor) -> torch.Tensor: ...


class Rotary(Protocol):
    """Turns the halves of the last dimension of [rows, heads, nodes, size] by angles [rows, 1, nodes, size]."""

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor: ...


class Summed(Protocol):
    """The sum over ranks of `x` [..., in] times a rank's weight [out, in], of which each has other columns. Each rank
    has the whole gradient of the sum."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, group: ProcessGroup) -> torch.Tensor: ...


@dataclass(frozen=True)
class Kernels:
    attention: Attention
    grouped: Grouped
    rms_norm: RmsNorm | None = None
    swiglu: SwiGlu | None = None
    rotary: Rotary | None = None
    summed: Summed | None = None


def of(kind: DeviceKind) -> Kernels:
    found: Kernels = import_module(f".{kind.kernels}", __package__).KERNELS
    return found
