"""The bytes of tensors of a gated delta net, by the operators of transformers.

Invariant: as in memory/sizes.py, sizes are bytes of tensor storages on the busiest rank. All sizes are of one layer.

The scan computes in float32, whatever the weights' type. Rows are padded to whole chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ...model.recurrent_mixers import CHUNK, GatedDeltaNet

if TYPE_CHECKING:
    from ..memory.sizes import Sizes

WIDE = 4  # bytes of a float32


@dataclass(frozen=True)
class DeltaSizes:
    """Sizes of the tensors of a gated delta net.

    It scans `rows` rows of `width` tokens.

    - `values`, `keys`, `scores`: the bytes of tensors of the scan: of the values of all heads, of the keys, repeated
      for each value head, and of the scores of pairs in a chunk.
    - `states`: the bytes of the states of all rows.
    """

    whole: Sizes
    mixer: GatedDeltaNet
    rows: int
    width: int

    @cached_property
    def heads(self) -> int:
        return self.whole.split(self.mixer.value_heads)

    @cached_property
    def chunks(self) -> int:
        return -(-self.width // CHUNK)

    @cached_property
    def values(self) -> int:
        return WIDE * self.rows * self.chunks * CHUNK * self.heads * self.mixer.value_dim

    @cached_property
    def keys(self) -> int:
        return WIDE * self.rows * self.chunks * CHUNK * self.heads * self.mixer.key_dim

    @cached_property
    def scores(self) -> int:
        return WIDE * self.rows * self.chunks * CHUNK * self.heads * CHUNK

    @cached_property
    def states(self) -> int:
        return WIDE * self.rows * self.mixer.count_state(self.whole.work.layout.tp)

    # Of the rows, without padding, in the weights' type.

    @cached_property
    def mixed(self) -> int:
        """Bytes of queries, keys and values together."""
        return self.rows * self.width * self.whole.split(self.mixer.mixed) * self.whole.item

    @cached_property
    def outputs(self) -> int:
        """Bytes of the outputs of all heads, and of their gates."""
        return self.rows * self.width * self.whole.split(self.mixer.query_width) * self.whole.item

    @cached_property
    def inputs(self) -> int:
        """Bytes of the inputs of the scan.

        These are queries, keys and values, the output's gates, and the projections that they are split of.
        """
        return (self.mixed + self.outputs) * (1 if self.mixer.split else 2)

    @cached_property
    def kept(self) -> int:
        """Bytes that the layer keeps for its backward pass, between its projections.

        - By row: the convolution's input and output, and queries and keys before their norms.
        - In the output's norm: its input, its result without and with the weight, the gate, and the gate's activation.
        - In the scan: queries, keys, values, keys with the rate of learning, the two solutions of the triangular
          system, queries and keys with decay, new values; the decay of pairs, and of scores of two kinds their products
          and results; states before each chunk. Float32 rows that need no padding are views, which products copy.
        """
        copied = 3 * self.keys * (self.whole.item == WIDE and self.width % CHUNK == 0)
        convolution = self.mixed + self.mixed * (self.width + self.mixer.kernel - 1) // self.width
        norm = self.outputs * (5 if self.whole.item == WIDE else 8)
        heads = 2 * self.keys * self.width // (self.chunks * CHUNK)
        scan = 6 * self.keys + 3 * self.values + 5 * self.scores + self.chunks * self.states
        return convolution + norm + heads + scan + copied

    @cached_property
    def backward(self) -> int:
        """The most bytes that exist in a backward pass next to those that are kept."""
        return 4 * self.scores

    def count_stepped_bytes(self) -> int:
        """Return the bytes of copies of a sequence's state while a token is computed.

        They are the state with decay, what is added to it, and the sum.
        """
        return 3 * WIDE * self.mixer.count_state(self.whole.work.layout.tp)

    @cached_property
    def scanned(self) -> int:
        """The most bytes of a scan without gradients, next to its inputs.

        The scan goes through the chunks one by one: values of a chunk are new values, and the outputs of two products
        and their sum.
        """
        chunk = self.values // self.chunks
        result = WIDE * self.outputs // self.whole.item
        stepping = max(4 * chunk + self.states, chunk + 3 * self.states, result + self.states)
        return 3 * self.scores + 4 * self.values + 5 * self.keys + stepping
