"""Recurrent mixers of tokens, which have a state of constant size and no keys.

Invariant: as in mixers.py, the classes are plain data, and each yields the tensors of its part of a layer.

Tensor parallelism shards a mixer by its key heads, each with its value heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import msgspec

from ..sharding.tensors import Tensor
from .mlps import MakeTensor, iterate_linear

CHUNK = 64  # tokens that a scan computes at once
CONVOLUTION = "conv1d"


class RecurrentMixer(msgspec.Struct, frozen=True):
    """What all recurrent mixers have.

    - `module`: the name of the mixer's module in a layer of transformers.
    - `output`: the name of the projection that writes hidden states.
    - `by_head`: the names of parameters that have an element for each value head, and are no module's weight.
    - `norm`: the name of the norm of the output. All heads share its weight, unless it is `norm_by_head`.
    - `counts`: the attributes of the module that count heads, or elements of heads.
    """

    module: ClassVar[str]
    output: ClassVar[str] = "out_proj"
    by_head: ClassVar[tuple[str, ...]]
    norm: ClassVar[str] = "norm"
    norm_by_head: ClassVar[bool] = False
    counts: ClassVar[tuple[str, ...]]

    @property
    def copied(self) -> tuple[str, ...]:
        """The names of modules that each tp rank has whole, and applies to its own heads."""
        return ()

    def divide_count(self, name: str, number: int, tp: int) -> int:
        """Return one of `counts` on one of `tp` ranks. The module has `number`."""
        return number // tp

    @property
    def heads(self) -> int:
        """The largest number of ranks that can shard the mixer."""
        raise NotImplementedError

    @property
    def query_width(self) -> int:
        """The number of elements of a token's output, before the projection."""
        raise NotImplementedError

    @property
    def key_width(self) -> int:
        """The number of elements of a token's key."""
        raise NotImplementedError

    @property
    def query_key_size(self) -> int:
        """Half of the elements of a token that are laid out row by row."""
        return self.query_width + self.key_width

    @property
    def projected(self) -> int:
        """The widths of all projections together, as of attention."""
        raise NotImplementedError

    @property
    def head_norms(self) -> bool:
        return False

    @property
    def window(self) -> int:
        return 0

    def count_scan_flop(self, decode: bool) -> int:
        """Return the FLOP per token of everything but the projections."""
        raise NotImplementedError

    def count_cached(self, tokens: float, tp: int = 1, expanded: bool = False) -> float:
        """Return how many elements of the model's type a rank keeps of a sequence.

        They are the inputs of the convolution that the next token needs, regardless of the number of `tokens`.
        """
        raise NotImplementedError

    def count_state(self, tp: int = 1) -> int:
        """Return the number of float32 elements of a sequence's state on a rank."""
        raise NotImplementedError


class GatedDeltaNet(RecurrentMixer, frozen=True, tag="gated_delta_net"):
    """The gated delta rule (arXiv:2412.06464).

    Each key head belongs to several value heads. For each value head, the state is a matrix of `key_dim` rows and
    `value_dim` columns. A convolution over the last `kernel` tokens computes queries, keys and values from what is
    projected.

    - `split`: whether queries, keys and values are one projection, and the output gates `z` and the two gates of the
      state, `b` and `a`, are one each. Otherwise there are two projections, whose outputs are sorted by key head.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    split: bool = False
    chunk: ClassVar[int] = CHUNK
    module: ClassVar[str] = "linear_attn"
    by_head: ClassVar[tuple[str, ...]] = ("dt_bias", "A_log")
    counts: ClassVar[tuple[str, ...]] = ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim")

    @property
    def heads(self) -> int:
        return self.key_heads

    @property
    def query_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def mixed(self) -> int:
        """The number of elements of a token that the convolution reads."""
        return 2 * self.key_width + self.query_width

    @property
    def projected(self) -> int:
        return self.mixed + 2 * self.query_width + 2 * self.value_heads

    def count_scan_flop(self, decode: bool) -> int:
        """Return the FLOP per token of the convolution and of the scan.

        A token reads and writes the state three times. In a chunk, tokens also have products of queries and keys with
        keys, the inverse of a triangular matrix (by substitution), and products with values.
        """
        matrix = 6 * self.key_dim * self.value_dim
        chunk = 0 if decode else CHUNK * (5 * self.key_dim + 3 * self.value_dim)
        return self.value_heads * (matrix + chunk) + 2 * self.kernel * self.mixed

    def count_cached(self, tokens: float, tp: int = 1, expanded: bool = False) -> float:
        return self.kernel * -(-self.mixed // tp)

    def count_state(self, tp: int = 1) -> int:
        return -(-self.value_heads // tp) * self.key_dim * self.value_dim

    def count_saved(self) -> tuple[int, int]:
        """Return how many elements per token are saved for a backward pass.

        The result is a pair: elements that each tp rank saves, and elements that are sharded over tp: the inputs and
        results of the convolution, of the scan and of the output's gate.
        """
        return 0, 2 * self.mixed + 3 * self.query_width + 4 * self.value_heads

    def list_divided(self) -> Iterator[tuple[int, str]]:
        """Yield the sizes that tp must divide, with their names."""
        yield self.key_heads, "recurrent key heads"

    def list_features(self) -> Iterator[str]:
        yield "gated_delta_net"

    def list_tensors(self, make: MakeTensor, hidden: int) -> Iterator[Tensor]:
        """Yield the tensors of the mixer.

        A unit has what belongs to one key head. The convolution, and the projection of queries, keys and values, are
        three tensors here, because a rank has a part of each.
        """
        module = self.module
        ratio = self.value_heads // self.key_heads
        value = ratio * self.value_dim
        key = self.key_width
        parts = (("q", 0, key, self.key_dim), ("k", key, key, self.key_dim), ("v", 2 * key, self.query_width, value))
        for name, start, size, unit in parts:
            shape = (size, 1, self.kernel)
            yield make(f"{module}.conv_{name}.weight", shape, 0, unit=unit, fused=CONVOLUTION, start=start)
        if self.split:
            for name, start, size, unit in parts:
                more = {"unit": unit, "fused": "in_proj_qkv", "start": start}
                yield make(f"{module}.in_proj_{name}.weight", (size, hidden), 0, **more)
            sizes = {"z": value, "b": ratio, "a": ratio}
        else:
            sizes = {"qkvz": 2 * self.key_dim + 2 * value, "ba": 2 * ratio}
        for name, unit in sizes.items():
            outputs = self.key_heads * unit
            yield from iterate_linear(make, f"{module}.in_proj_{name}", (outputs, hidden), 0, False, unit=unit)
        for name in self.by_head:
            yield make(f"{module}.{name}", (self.value_heads,), 0, unit=ratio)
        yield make(f"{module}.{self.norm}.weight", (self.value_dim,))
        yield from iterate_linear(make, f"{module}.{self.output}", (hidden, self.query_width), 1, False, unit=value)
