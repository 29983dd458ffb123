"""Mamba-2 layers (arXiv:2405.21060).

Invariant: as in mixers.py, the class is plain data, and yields the tensors of its part of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from ..sharding.tensors import Tensor
from .mlps import MakeTensor
from .recurrent_mixers import CONVOLUTION, RecurrentMixer


class Mamba2(RecurrentMixer, frozen=True, tag="mamba2"):
    """A state space of Mamba-2.

    For each head, the state is a matrix of `head_dim` rows and `state` columns. Inputs `b` and outputs `c` of the
    states are the same for all heads of a group. A convolution over the last `kernel` tokens computes the values `x`,
    `b` and `c` from what is projected. `z` are the gates of the output, and `dt` the time steps of the states.

    - `chunk`: the number of tokens that a scan computes at once.
    - `conv_bias`: whether the convolution has a bias.
    """

    mamba_heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int
    chunk: int
    conv_bias: bool = True
    module: ClassVar[str] = "mamba"
    by_head: ClassVar[tuple[str, ...]] = ("dt_bias", "A_log", "D")
    norm_by_head: ClassVar[bool] = True
    counts: ClassVar[tuple[str, ...]] = ("num_heads", "n_groups", "intermediate_size", "conv_dim")

    @property
    def heads(self) -> int:
        return self.mamba_heads if self.shares_group else self.groups

    @property
    def shares_group(self) -> bool:
        """Whether all heads have the same group, of which each tp rank has a copy.

        The norm of the output is then one of all heads together.
        """
        return self.groups == 1

    @property
    def copied(self) -> tuple[str, ...]:
        return ("in_proj_b", "in_proj_c", "conv_b", "conv_c") if self.shares_group else ()

    def divide_count(self, name: str, number: int, tp: int) -> int:
        of_groups = {"n_groups": -(-self.groups // tp), "conv_dim": self.count_mixed(tp)}
        return of_groups[name] if name in of_groups else number // tp

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

    def count_scan_flop(self, decode: bool) -> int:
        """Return the FLOP per token of the convolution and of the scan.

        A token writes and reads the state. In a chunk, tokens also have products of c and b, and with x.
        """
        matrix = 4 * self.head_dim * self.state
        chunk = 0 if decode else 2 * self.chunk * (self.state + self.head_dim)
        return self.mamba_heads * (matrix + chunk) + 2 * self.kernel * self.mixed

    def count_cached(self, tokens: float, tp: int = 1, expanded: bool = False) -> float:
        return self.kernel * self.count_mixed(tp)

    def count_mixed(self, tp: int) -> int:
        """Return the part of `mixed` on one of `tp` ranks.

        Ranks that share a group have it whole.
        """
        return -(-self.query_width // tp) + 2 * -(-self.groups // tp) * self.state

    def count_state(self, tp: int = 1) -> int:
        return -(-self.mamba_heads // tp) * self.head_dim * self.state

    def count_saved(self) -> tuple[int, int]:
        """Return how many elements per token are saved for a backward pass.

        The result is a pair: elements that each tp rank saves, and elements that are sharded over tp: the inputs and
        results of the convolution, of the scan and of the output's gate.
        """
        return 0, 2 * self.mixed + 3 * self.query_width + self.mamba_heads

    def list_divided(self) -> Iterator[tuple[int, str]]:
        """Yield the sizes that tp must divide, with their names."""
        if not self.shares_group:
            yield self.groups, "groups of Mamba-2 heads"
        yield self.mamba_heads, "Mamba-2 heads"

    def list_features(self) -> Iterator[str]:
        yield "mamba2"

    def list_tensors(self, make: MakeTensor, hidden: int) -> Iterator[Tensor]:
        """Yield the tensors of the mixer.

        A unit has what belongs to one head, or in `b` and `c` to one group. The files have the projections of a hidden
        state as one tensor, and the three parts of the convolution as another.
        """
        module = self.module
        value = {"unit": self.head_dim}
        key = {"unit": self.state}
        dims = {"b": -1, "c": -1} if self.shares_group else {}
        sizes = {"z": self.query_width, "x": self.query_width, "b": self.key_width, "c": self.key_width}
        options = {"z": value, "x": value, "b": key, "c": key, "dt": {}}
        start = 0
        for name, size in (sizes | {"dt": self.mamba_heads}).items():
            more: dict[str, Any] = {"fused": "in_proj", "start": start} | options[name]
            dim = dims.get(name, 0)
            yield make(f"{module}.in_proj_{name}.weight", (size, hidden), dim, **more)
            start += size
        start = 0
        for name in "xbc":
            size = sizes[name]
            more = {"fused": CONVOLUTION, "start": start} | options[name]
            dim = dims.get(name, 0)
            yield make(f"{module}.conv_{name}.weight", (size, 1, self.kernel), dim, **more)
            if self.conv_bias:
                yield make(f"{module}.conv_{name}.bias", (size,), dim, **more)
            start += size
        for name in self.by_head:
            yield make(f"{module}.{name}", (self.mamba_heads,), 0)
        yield make(f"{module}.{self.norm}.weight", (self.query_width,), 0, **value)
        yield make(f"{module}.{self.output}.weight", (hidden, self.query_width), 1, **value)
