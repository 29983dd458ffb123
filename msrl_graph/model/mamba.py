"""Mamba-2 layers (arXiv:2405.21060).

Invariant: as in mixers.py, the class is plain data, and yields the tensors of its part of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from ..sharding.tensors import Tensor
from .mlps import MakeTensor, iterate_linear
from .recurrent_mixers import CONVOLUTION, RecurrentMixer

GROUPS = "groups of Mamba-2 heads"


class Mamba2(RecurrentMixer, frozen=True, tag="mamba2"):
    """A state space of Mamba-2.

    For each head, the state is a matrix of `head_dim` rows and `state` columns. Inputs `b` and outputs `c` of the
    states are the same for all heads of a group. A convolution over the last `kernel` tokens computes the values `x`,
    `b` and `c` from what is projected. `z` are the gates of the output, and `dt` the time steps of the states.

    - `conv_bias`: whether the convolution has a bias.
    - `bias`: whether the projections have biases.
    """

    mamba_heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int
    conv_bias: bool = True
    bias: bool = False
    module: ClassVar[str] = "mamba"
    by_head: ClassVar[tuple[str, ...]] = ("dt_bias", "A_log", "D")
    counts: ClassVar[tuple[str, ...]] = ("num_heads", "n_groups", "intermediate_size", "conv_dim")

    @property
    def heads(self) -> int:
        return self.groups

    @property
    def query_width(self) -> int:
        return self.mamba_heads * self.head_dim

    @property
    def key_width(self) -> int:
        return self.groups * self.state

    @property
    def mixed(self) -> int:
        """The number of elements of a token's x, b and c, which the convolution reads."""
        return self.query_width + 2 * self.key_width

    @property
    def projected(self) -> int:
        return self.mixed + 2 * self.query_width + self.mamba_heads

    def list_features(self) -> Iterator[str]:
        yield "mamba2"
        if self.bias:
            yield "mamba_bias"

    def list_tensors(self, make: MakeTensor, hidden: int) -> Iterator[Tensor]:
        """Yield the tensors of the mixer.

        A unit has what belongs to one group. The files have the projections of a hidden state as one tensor, and the
        three parts of the convolution as another.
        """
        module = self.module
        ratio = self.mamba_heads // self.groups
        inner = self.query_width
        key = self.key_width
        value = ratio * self.head_dim
        parts = {"z": (inner, value), "x": (inner, value), "b": (key, self.state), "c": (key, self.state)}
        start = 0
        for name, (size, unit) in (parts | {"dt": (self.mamba_heads, ratio)}).items():
            more: dict[str, Any] = {"unit": unit, "fused": "in_proj", "start": start}
            yield from iterate_linear(make, f"{module}.in_proj_{name}", (size, hidden), 0, self.bias, **more)
            start += size
        start = 0
        for name in "xbc":
            size, unit = parts[name]
            more = {"unit": unit, "fused": CONVOLUTION, "start": start}
            yield make(f"{module}.conv_{name}.weight", (size, 1, self.kernel), 0, **more)
            if self.conv_bias:
                yield make(f"{module}.conv_{name}.bias", (size,), 0, **more)
            start += size
        for name in self.by_head:
            yield make(f"{module}.{name}", (self.mamba_heads,), 0, unit=ratio)
        yield make(f"{module}.norm.weight", (inner,), 0, unit=value)
        yield from iterate_linear(make, f"{module}.{self.output}", (hidden, inner), 1, self.bias, unit=value)
