"""The operators that compute a model's layers, one table for each kind of device.

Invariant: a table's functions return what the plain formulas return (reference.py), values and gradients, up to
rounding. A device's table is one file here, which its kind names (hardware/device_kinds.py). No other part of an
engine asks which kind it computes on. Torch-free at import.
Where a table has None, layers stay as the model has them. On host cores and CUDA that applies to RMSNorm, SwiGLU and
RoPE. The RMSNorm of transformers and of vLLM rounds to the model's type before it multiplies by the weight;
torch.nn.functional.rms_norm rounds elsewhere, so the policy would differ from the one that it was sampled from. There
DTensor's RowwiseParallel sums a sharded product over ranks.
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
    """Causal attention of `q` [rows, heads, width, size] with `k` and `v`.

    `k` and `v` may have fewer heads, each shared by several query heads. With a window each query sees that many
    keys, the last of which is its own.
    """

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, window: int | None
    ) -> torch.Tensor: ...


class Grouped(Protocol):
    """The product of rows, sorted by group, with the weights of their group.

    `rows` are [rows, in], weights [groups, in, out]. The rows of a group end before `ends` (int32); a group may be
    empty.
    """

    def __call__(self, rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor: ...


class RmsNorm(Protocol):
    def __call__(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor: ...


class SwiGlu(Protocol):
    """SwiGLU of gates and their values, concatenated in the last dimension."""

    def __call__(self, joined: torch.Tensor) -> torch.Tensor: ...


class Rotary(Protocol):
    """Rotation of the halves of [rows, heads, nodes, size] by [rows, 1, nodes, size]."""

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor: ...


class Summed(Protocol):
    """The sum over ranks of `x` [..., in] times a rank's weight [out, in].

    Each rank has other columns of the weight, and the whole gradient of the sum.
    """

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, group: ProcessGroup) -> torch.Tensor: ...


@dataclass(frozen=True)
class Kernels:
    attention: Attention
    grouped: Grouped
    rms_norm: RmsNorm | None = None
    swiglu: SwiGlu | None = None
    rotary: Rotary | None = None
    summed: Summed | None = None


def load(kind: DeviceKind) -> Kernels:
    """Load the kernels of a kind of device."""
    kernels: Kernels = import_module(f".{kind.kernels}", __package__).KERNELS
    return kernels
