"""The operators that compute a model's layers, one table for each kind of device.

Invariant: a table's functions return the values and gradients of the plain formulas in reference.py, up to rounding.
Each table is one file of this folder; hardware/device_kinds.py says which file belongs to a device kind. No other part
of an engine depends on the device kind. Importing this package does not import torch.

If a table has None for an operator, the model keeps its own operator. The tables of host cores and of CUDA have None
RMSNorm, SwiGLU and RoPE. The reason for RMSNorm: transformers and vLLM round to the model's dtype before they multiply
by the weight, but torch.nn.functional.rms_norm rounds at another point of the computation. With the torch function, the
trained policy would differ from the policy that generated the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from ...hardware.device_kinds import DeviceKind
    from ..prefix_tree import PackedRows


class ScoreRule(NamedTuple):
    """How attention computes the scores of a query, and of which keys.

    - `scaling`: the number by which the product of a query and a key is multiplied.
    - `window`: a query at position i sees only the keys at the positions from i - `window` + 1 to i; None for all keys
      up to i.
    - `cap`: a score s becomes cap · tanh(s / cap); None for no cap.
    """

    scaling: float
    window: int | None = None
    cap: float | None = None


class Attention(Protocol):
    """Causal attention of queries `q` with keys `k` and values `v`.

    The shapes are [rows, heads, tokens, head size]. `k` and `v` may have fewer heads than `q`: several query heads then
    share a key-value head. With `sinks` [heads], each query also sees a key whose score is its head's sink, and whose
    value is 0.
    """

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rule: ScoreRule,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


class PackedAttention(Protocol):
    """Causal attention of rows without padding.

    A call returns a function of queries, keys and values [tokens of all rows, heads, head size] that returns outputs of
    that shape. `query` has the shape of queries, but of any number of tokens. The result is None if no operator of the
    device computes such attention. It is then computed in blocks of rows (`Attention`).
    """

    def __call__(
        self, query: torch.Tensor, rows: PackedRows, rule: ScoreRule, sinks: torch.Tensor | None = None
    ) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None: ...


class Grouped(Protocol):
    """The product of each row with the weights of the group that the row belongs to.

    `rows` [rows, in] are sorted by group. `weights` are [groups, in, out]. `ends` (int32) has, for each group, the
    index after the group's last row. A group may be empty.
    """

    def __call__(self, rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor: ...


class RmsNorm(Protocol):
    def __call__(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor: ...


class SwiGlu(Protocol):
    """SwiGLU of `joined`, which has gate and up concatenated in its last dimension."""

    def __call__(self, joined: torch.Tensor) -> torch.Tensor: ...


class Rotary(Protocol):
    """Rotary embedding of `x` [rows, heads, tokens, head size].

    `cos` and `sin` are [rows, 1, tokens, head size]. The first half of the last dimension is rotated against the second
    half.
    """

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class Kernels:
    attention: Attention
    grouped: Grouped
    packed_attention: PackedAttention | None = None
    rms_norm: RmsNorm | None = None
    swiglu: SwiGlu | None = None
    rotary: Rotary | None = None


def load(kind: DeviceKind) -> Kernels:
    """Load the table of kernels for a device kind."""
    kernels: Kernels = import_module(f".{kind.kernels}", __package__).KERNELS
    return kernels
