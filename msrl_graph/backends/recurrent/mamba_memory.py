"""The bytes of tensors that a Mamba-2 mixer makes.

Invariant: the tensors are those of transformers' operators. As in memory/sizes.py, sizes are bytes of tensor storages
on the busiest rank. All sizes are of one layer.

The scan computes in float32, whatever the weights' type. Rows are padded to whole chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ...model.mamba import Mamba2

if TYPE_CHECKING:
    from ..memory.sizes import Sizes

WIDE = 4  # bytes of a float32


@dataclass(frozen=True)
class MambaSizes:
    """Sizes of the tensors of a Mamba-2 mixer.

    The mixer scans `rows` rows of `width` tokens.

    - `values`, `keys`, `scores`: the bytes of tensors of the scan: of the values `x` of all heads, of `b` or `c`,
      repeated for each head, and of the scores of pairs in a chunk.
    - `states`: the bytes of the states before all chunks.
    - `gates`: the bytes of the gates of the output, in float32.
    """

    whole: Sizes
    mixer: Mamba2
    rows: int
    width: int

    @cached_property
    def heads(self) -> int:
        return self.whole.split(self.mixer.mamba_heads)

    @cached_property
    def chunks(self) -> int:
        return -(-self.width // self.mixer.chunk)

    @cached_property
    def _padded(self) -> int:
        """Bytes of one float32 for each head of each token, with padding."""
        return WIDE * self.rows * self.chunks * self.mixer.chunk * self.heads

    @cached_property
    def values(self) -> int:
        return self._padded * self.mixer.head_dim

    @cached_property
    def keys(self) -> int:
        return self._padded * self.mixer.state

    @cached_property
    def scores(self) -> int:
        return self._padded * self.mixer.chunk

    @cached_property
    def _state(self) -> int:
        """Bytes of the states before one chunk."""
        return WIDE * self.rows * self.mixer.count_state(self.whole.work.layout.tp)

    @cached_property
    def states(self) -> int:
        return self.chunks * self._state

    @cached_property
    def gates(self) -> int:
        return WIDE * self.rows * self.width * self.heads * self.mixer.head_dim

    @cached_property
    def _mixed(self) -> int:
        """Bytes of x, b and c together, in the weights' type."""
        return self.rows * self.width * self.mixer.count_mixed(self.whole.work.layout.tp) * self.whole.item

    @cached_property
    def inputs(self) -> int:
        """Bytes of the outputs of all projections and of the convolution.

        They have the weights' type.
        """
        of_heads = self.rows * self.width * self.heads * (self.mixer.head_dim + 1) * self.whole.item
        return 2 * self._mixed + of_heads

    @cached_property
    def kept(self) -> int:
        """Bytes that the layer keeps for its backward pass, between its projections.

        - By row: the outputs of the projections, and the input and result of the convolution's activation.
        - In the scan: x with three kinds of factors and without, and c times states; b and c, in several orders of
          dims; decays of pairs, scores, and their product; states before each chunk, without and with those before.
        - In the output's norm: x, the activation of the gates, the product of both, and its norm.
        - For each head: the time steps and decays.

        In bf16, x and the gates are also kept in float32, but the result of the convolution's activation is not.
        """
        padding = self._mixed * (self.mixer.kernel - 1) // self.width
        row = self.inputs + padding + (self._mixed + 3 * self.gates if self.whole.item == WIDE else 5 * self.gates)
        steps = 3 * WIDE * self.rows * self.width * self.heads + 2 * self._padded
        return row + 5 * self.values + 5 * self.keys + 3 * self.scores + 2 * self.states + self._state + steps

    @cached_property
    def scanned(self) -> int:
        """The most bytes of a scan without gradients, next to its inputs."""
        after = self.states + self._state
        more = (
            4 * self.keys + 4 * self.values + 2 * after,
            3 * self.keys + 7 * self.values + after,
            3 * self.keys + 3 * self.values + 3 * after,
        )
        return 3 * self.scores + max(more) + self._state + 5 * self._padded

    @cached_property
    def backward(self) -> int:
        """The most bytes that exist in a backward pass next to those that are kept."""
        norm = (3 if self.whole.item == WIDE else 4) * self.gates
        scan = (
            2 * self.values,
            self.keys + self.states,
            2 * self.keys - self.values - 2 * self.states,
            self.scores + self.values - self.keys - 2 * self.states,
            2 * self.scores - self.keys - 2 * self.values - 2 * self.states,
        )
        return max(norm, max(scan) - norm)

    def count_stepped_bytes(self) -> int:
        """Return the bytes of a sequence's states while a token is drawn.

        These are the states with their decay, what is added, and two copies.
        """
        per_element = 4 * WIDE if self.whole.item == WIDE else 2 * WIDE + 3 * self.whole.item
        return per_element * self.mixer.count_state(self.whole.work.layout.tp)
