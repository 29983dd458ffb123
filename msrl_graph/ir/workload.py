"""The workload of a node: all that an engine needs to count the node's memory.

Invariant: a workload consists of plain numbers for one rank and for columns of maximum length. cost/holdings.py
computes workloads.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from operator import mul
from typing import Self

from ..model.architecture import Model
from ..sharding.layout import Layout
from .expr import OptionValue
from .optimizer_spec import OptimizerSpec

# The parts of a layer that can be recomputed by themselves.
RECOMPUTED = ("attention", "mlp", "moe", "activation", "norms")
STATE = 4  # bytes per element: states of recurrent layers are float32, whatever the weights' type


@dataclass(frozen=True)
class Recomputation:
    """The activations that a backward pass recomputes.

    - `layers`: the number of layers that are recomputed as a whole, the first ones of each chunk of trained layers.
    - `parts`: the parts (`RECOMPUTED`) of each other trained layer that are recomputed.
    """

    layers: int = 0
    parts: tuple[str, ...] = ()

    @classmethod
    def of_option(cls, value: OptionValue) -> Self:
        """Return the meaning of the option `recompute`; None stands for `none`."""
        if isinstance(value, tuple):
            return cls(parts=value)
        return cls(sys.maxsize if value == "full" else value if isinstance(value, int) else 0)

    def __bool__(self) -> bool:
        return self.layers > 0 or bool(self.parts)

    def count_of_chunk(self, start: int, stop: int, first_trained: int) -> int:
        """Return how many layers of a chunk Megatron recomputes as a whole.

        Frozen layers below the first trained one are among them: a backward pass then reaches them too.
        """
        trained = max(start, first_trained)
        return min(stop, trained + self.layers) - start if self.layers and trained < stop else 0

    def find_whole_layers(self, first: int, stop: int) -> range:
        """Return which of the trained layers [first, stop) are recomputed whole."""
        return range(first, min(stop, first + self.layers))


@dataclass(frozen=True)
class Workload:
    """The work that a node computes at one time on one rank.

    - `rows`: the most rows of a micro-batch. For a generation: the prompts for which it generates at one time.
    - `sequences` (of a generation): the most responses that are generated at one time; 0: all responses to `rows`
      prompts. `cache_bytes`: the size of the KV cache; 0: all these responses fit at their greatest length.
    - `prompts`: the number of different prompts with which these rows begin. For example, 8 responses to 2 prompts are
      8 rows with 2 prompts.
    - `prompt`: the number of tokens of each prompt. `response`: the number of tokens of each response.
    - `most_tokens`: the most tokens of a micro-batch, if these limit it; else 0. The tokens are those of all rows, also
      of those that begin alike. `padded`: whether they include padding to the longest row of the micro-batch.
    - `after`: whether the last token of a row is an input of the model. The hidden state of this token is needed only
      for a score; a policy needs no prediction after the last token.
    - `batches`: the number of micro-batches per optimizer step.
    - `divided`: whether weights are sharded over dp while no node computes.
    - `trained`: whether the weights have an optimizer.
    - `recompute`: the activations that a backward pass recomputes.
    - `activations_away`: whether activations are in host memory between the forward and the backward pass.
    - `optimizer_away`: the bytes of optimizer state that are in host memory between steps.
    - `on_host`: whether the devices are cores of a host.
    - `entropy` (of an update): whether the loss uses the entropy.
    - `replays_routes`: whether routes are given to the model's routers. `records_routes`: whether they are returned.
    - `optimizer` (of an update): the optimizer. `gradients`: the type in which gradients are summed.
    """

    model: Model
    layout: Layout
    dtype: str
    rows: int
    prompts: int
    prompt: int
    response: int
    samples: int = 1
    most_tokens: int = 0
    padded: bool = False
    sequences: int = 0
    cache_bytes: int = 0
    after: bool = False
    batches: int = 1
    divided: bool = False
    trained: bool = False
    recompute: Recomputation = Recomputation()
    activations_away: bool = False
    optimizer_away: int = 0
    entropy: bool = False
    replays_routes: bool = False
    records_routes: bool = False
    optimizer: OptimizerSpec | None = None
    gradients: str = "f32"
    on_host: bool = False

    @property
    def fed(self) -> int:
        """The number of tokens of a row that are inputs of the model, prompt included."""
        return max(1, self.prompt + self.response - (not self.after))

    @property
    def fed_tokens(self) -> int:
        """The most tokens of a micro-batch that are inputs of the model."""
        return self.cap_tokens(self.rows * self.fed)

    @property
    def scored_tokens(self) -> int:
        """The most response tokens of a micro-batch."""
        return self.cap_tokens(self.rows * self.response)

    def cap_tokens(self, tokens: int) -> int:
        """Return a number of tokens of a micro-batch's rows, at most the limit."""
        return min(tokens, self.most_tokens or tokens)

    @property
    def at_once(self) -> int:
        """The most responses that a generation generates at one time."""
        return self.sequences or self.rows * self.samples


def micro_batches(rows: int, size: int, layout: Layout) -> int:
    """Return the number of micro-batches into which `rows` rows are split.

    A micro-batch has at most `size` rows. Interleaved pipeline stages process micro-batches in groups of pp
    (arXiv:2104.04473, section 2.2). For such stages, the number is rounded up to a multiple of pp, so some
    micro-batches are smaller or empty.
    """
    return round_up_batches(max(1, -(-rows // size)), layout)


def round_up_batches(number: int, layout: Layout) -> int:
    """Round a number of micro-batches up as interleaved stages require."""
    return -(-number // layout.pp) * layout.pp if layout.vpp > 1 else number


def kv_bytes(model: Model, layout: Layout, tokens: float, item: int, expanded: bool = False) -> float:
    """Return the bytes of a sequence's KV cache on one rank.

    The sequence has `tokens` tokens, and an element of a key has `item` bytes. A recurrent layer has a state of
    constant size. Only the layers on the rank are counted. With pipeline stages, the rank is in the stage with the
    largest cache. If the cache of latent attention is `expanded`, it has keys and values instead of latents.
    """
    mixers = [kind.mixer for kind in model.layer_kinds]
    sizes = [
        item * mixer.count_cached(tokens, layout.tp, expanded) + STATE * mixer.count_state(layout.tp)
        for mixer in mixers
    ]
    cached: float = max(
        sum(map(mul, model.count_kinds(*layout.stage_layers(stage, model.layers)), sizes)) for stage in range(layout.pp)
    )
    return cached


def in_flight(work: Workload, stage: int) -> float:
    """Return the number of micro-batches whose activations a stage stores at one time.

    `stage` is the number of a pipeline stage. A micro-batch counts as 1 if the activations of all layers of the stage
    are stored. With the schedule of one forward, one backward (arXiv:2104.04473), the result is pp - stage. With
    interleaved stages, the stage stores activations of 2 (pp - stage - 1) + (vpp - 1) pp + 1 chunks, and each chunk is
    1 / vpp of the stage's layers. The result is at most the number of micro-batches of an optimizer step.
    """
    pp = work.layout.pp
    vpp = work.layout.vpp
    if vpp == 1:
        return min(work.batches, pp - stage)
    return min(work.batches * vpp, 2 * (pp - stage - 1) + (vpp - 1) * pp + 1) / vpp
