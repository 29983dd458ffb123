"""Sizes of tensors, to count the memory of engines and of the optimizer's step.

The memory of engines is counted in peaks.py and megatron/peaks.py. The memory of the optimizer's step is counted by
`optimizer_step`.

Invariant: sizes are bytes of tensor storages on the busiest rank, with every column at its maximum length. The counts
for experts assume that the router sends the same number of tokens to each expert. The real number of tokens that one
rank receives is known only to the router, and no program bounds that number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import gcd

from ..ir import optimizer_spec
from ..ir.workload import Workload
from ..model.architecture import HEAD
from ..sharding.layout import (
    Side,
    TensorKind,
    TensorKinds,
    box_at,
    count_busiest_elements,
    elements,
    stage_parts,
)
from .spec import BYTES, Moments

# Elements of a buffer that the trainer's optimizer needs in addition to its states.
CHUNK = 1 << 22
GRADIENT = 4  # bytes per element: gradients are summed in float32, whatever the weights' type


@dataclass(frozen=True)
class Sizes:
    """Sizes of the tensors of one forward pass on a rank.

    Sizes are bytes, except `tokens`, `row_tokens`, `scored`, `sent`, `elements` and `largest`, which are counts.

    - `item`: the bytes of one element.
    - `tokens`: the tokens that a layer computes.
    - `row_tokens`: the tokens that are laid out row by row for attention.
    - `scored`: the tokens for which outputs are computed.
    """

    work: Workload

    @cached_property
    def item(self) -> int:
        return BYTES[self.work.dtype]

    @cached_property
    def tokens(self) -> int:
        """Number of distinct tokens that a layer computes.

        A prompt's tokens count once, not once per response. A response's tokens count if they are inputs of the model.
        """
        work = self.work
        return max(1, self._most((work.prompts, 0, work.prompt), (work.rows, work.prompt, work.fed)))

    @cached_property
    def row_tokens(self) -> int:
        """Number of tokens that a rank lays out row by row for attention.

        With context parallelism, ring attention lays out a part of each row. Ulysses attention lays out whole rows, but
        only for a part of the heads.
        """
        work = self.work
        return work.rows * -(-work.fed // work.layout.cp)

    @cached_property
    def scored(self) -> int:
        work = self.work
        return self._most((work.rows, work.fed - work.response, work.fed))

    def _most(self, *stretches: tuple[int, int, int]) -> int:
        """Return the number of tokens on the context-parallel rank with the most tokens.

        Each of `stretches` is a tuple (n, first, stop): there are n tokens at each depth from `first` to `stop` - 1. A
        token's depth is its position in its row. A token's rank is the token's depth modulo cp (context_parallel.py).
        """
        cp = self.work.layout.cp
        return max(
            sum(tokens * len(range(first + (rank - first) % cp, last, cp)) for tokens, first, last in stretches)
            for rank in range(cp)
        )

    def split(self, size: int) -> int:
        return -(-size // self.work.layout.tp)

    @cached_property
    def hidden(self) -> int:
        """Bytes of the hidden states of all tokens, one state per token."""
        return self.tokens * self.work.model.hidden * self.item

    @cached_property
    def query(self) -> int:
        return self.split(self.work.model.heads * self.work.model.head_dim) * self.item

    @cached_property
    def keys(self) -> int:
        """Bytes of one token's keys; the token's values need the same number of bytes."""
        return self.split(self.work.model.kv_heads * self.work.model.head_dim) * self.item

    @cached_property
    def attended_keys(self) -> int:
        """Bytes of one token's keys where tokens are laid out row by row for attention.

        Ulysses attention repeats some key-value heads, so that each rank has whole heads.
        """
        cp = self.work.layout.cp if self.work.layout.cp_kind == "ulysses" else 1
        return self.keys * (cp // gcd(cp, self.split(self.work.model.kv_heads)))

    @cached_property
    def wide(self) -> int:
        """Bytes of the gate projection's output in a dense feed-forward network.

        The size is for all tokens. The output of the up projection has the same size.
        """
        return self.tokens * self.split(self.work.model.intermediate) * self.item

    @cached_property
    def sent(self) -> int:
        """Number of tokens that a rank sends to experts.

        A token counts once for each of its experts. Each tp rank sends only a part of the tokens. If the router
        distributes tokens evenly, a rank with whole experts receives as many tokens as it sends.
        """
        experts = self.work.model.experts
        return self.split(self.tokens) * experts.active if experts else 0

    @cached_property
    def routed(self) -> int:
        """Bytes of the hidden states that a rank sends to experts."""
        return self.sent * self.work.model.hidden * self.item

    @cached_property
    def inner(self) -> int:
        """Bytes of the gate projection's output in the experts on a rank.

        The output of the up projection has the same size. Both outputs are computed for all tokens that the experts
        receive. Each etp rank of an expert receives the tokens of all etp ranks.
        """
        experts = self.work.model.experts
        return self.sent * experts.intermediate * self.item if experts else 0

    @cached_property
    def shared(self) -> int:
        """Bytes of the gate projection's output in the shared experts, for all tokens.

        The output of the up projection has the same size.
        """
        experts = self.work.model.experts
        return self.tokens * self.split(experts.shared) * self.item if experts else 0

    @cached_property
    def router(self) -> int:
        """Bytes of one value for each pair of a token and an expert."""
        experts = self.work.model.experts
        return self.tokens * experts.number * self.item if experts else 0

    @cached_property
    def logit(self) -> int:
        """Bytes of the float32 logits of all scored tokens over the whole vocabulary.

        Scored tokens are the tokens for which outputs are computed. A scoring model has one float32 value per scored
        token.
        """
        return 4 * self.scored * self.work.model.outputs

    @cached_property
    def angles(self) -> int:
        """Bytes of the cosines and sines of all tokens' rotary positions."""
        return 2 * self.tokens * self.work.model.head_dim * self.item

    @cached_property
    def rows(self) -> int:
        """Bytes of a micro-batch's rows: 64-bit ids and indices, and float32 columns."""
        work = self.work
        row_tokens = work.rows * work.fed
        scored = work.rows * work.response
        own = 3 * self.tokens + self.row_tokens + self.scored * (1 if work.layout.cp == 1 else 2)
        return 8 * (row_tokens + 3 * scored + own) + 4 * 6 * scored

    @cached_property
    def attention(self) -> int:
        """Bytes of the tensors that a layer's attention keeps for its backward pass.

        The tensors are:

        - queries, keys, values and the output, laid out row by row,
        - the output, laid out token by token,
        - the log-sum-exp, and the statistics of norms.
        """
        scores = 4 * self.row_tokens * self.split(self.work.model.heads) + 8 * self.tokens
        return self.row_tokens * (2 * self.query + 2 * self.attended_keys) + self.tokens * self.query + scores

    @cached_property
    def last(self) -> int:
        """Bytes of the tensors that the last norm keeps, and of the requested states.

        The requested states are the hidden states for which logits are computed.
        """
        return (2 if self.item == 4 else 3) * self.hidden + self.scored * self.work.model.hidden * self.item

    # Weights, not sharded over dp.

    @cached_property
    def _whole_side(self) -> Side:
        return replace(self.side, divided=False)

    def _bytes(self, kinds: tuple[TensorKind, ...]) -> int:
        return count_busiest_elements(kinds, self._whole_side) * self.item

    @cached_property
    def all_weights(self) -> int:
        return self._bytes(self.work.model.kinds)

    @cached_property
    def layer(self) -> int:
        """Bytes of the weights of the model's last layer.

        If any layer has experts, the last layer has experts.
        """
        return self._bytes(_select_last_layer(self.work.model.kinds))

    @cached_property
    def ends(self) -> int:
        """Bytes of the weights of the embedding, the last norm and the head together."""
        return self._bytes(_select_ends(self.work.model.kinds))

    @cached_property
    def table(self) -> int:
        """Bytes of the weights of the embedding; the head has the same size."""
        return self._bytes(_select_ends(self.work.model.kinds)[:1])

    @cached_property
    def matrix(self) -> int:
        """Bytes of one of the three matrices of a feed-forward network.

        With experts: bytes of one of the three matrices for all experts on the rank.
        """
        work = self.work
        experts = self.work.model.experts
        if experts:
            elements_per_hidden = experts.number // work.layout.ep * -(-experts.intermediate // work.layout.etp)
            return elements_per_hidden * work.model.hidden * self.item
        return self.split(work.model.intermediate) * work.model.hidden * self.item

    # Gradients, of the weights' type. Those of frozen weights do not exist.

    @cached_property
    def layer_gradients(self) -> int:
        """Bytes of the gradients of the model's last layer."""
        return self._bytes(_select_last_layer(self.work.model.trained_kinds))

    @cached_property
    def end_gradients(self) -> int:
        """Bytes of the gradients of the embedding, the last norm and the head together."""
        return self._bytes(_select_ends(self.work.model.trained_kinds))

    @cached_property
    def embedding_gradient(self) -> int:
        return self.table * any(kind.start < 0 for kind in self.work.model.trained_kinds)

    @cached_property
    def head_gradient(self) -> int:
        ends = [kind.tensor for kind in _select_ends(self.work.model.trained_kinds)]
        return self.table * any(
            tensor.tied or tensor.name == HEAD or (tensor.padded and tensor.layer >= 0) for tensor in ends
        )

    # At rest, in elements.

    @cached_property
    def side(self) -> Side:
        return Side(self.work.layout, self.work.divided)

    def parts(self, tensor_kinds: tuple[TensorKind, ...]) -> tuple[int, int]:
        """Return how many elements a rank has in tensors of the given kinds.

        The result is a pair: the number of elements of dense tensors, and the number of elements of tensors of experts.
        """
        return max(stage_parts(tensor_kinds, self.side), key=sum)

    @cached_property
    def elements(self) -> int:
        """Number of elements of the weights that an update changes."""
        return sum(self.parts(self.work.model.trained_kinds))

    @cached_property
    def largest(self) -> int:
        """Number of elements of the largest of a rank's shards that an update changes."""
        return _largest(self.work.model.trained_kinds, self.side)


@lru_cache(maxsize=1 << 8)
def _select_last_layer(tensor_kinds: tuple[TensorKind, ...]) -> tuple[TensorKind, ...]:
    """Return the kinds of the weights of the model's last layer."""
    return TensorKinds(
        kind._replace(start=kind.stop - 1)
        for kind in tensor_kinds
        if kind.start >= 0 and kind.stop == kind.tensor.layers
    )


@lru_cache(maxsize=1 << 8)
def _select_ends(tensor_kinds: tuple[TensorKind, ...]) -> tuple[TensorKind, ...]:
    """Return the kinds of the embedding, the last norm and the head."""
    return TensorKinds(kind for kind in tensor_kinds if not 0 <= kind.start < kind.tensor.layers)


@lru_cache(maxsize=1 << 12)
def _largest(tensor_kinds: tuple[TensorKind, ...], side: Side) -> int:
    return max(elements(box_at(kind.tensor, side, (0, 0, 0))) for kind in tensor_kinds)


def context_parallel_extra(s: Sizes, backward: bool) -> int:
    """Return the bytes that context parallelism adds to the memory of attention.

    A block is the keys and values of one rank. With ring attention, the bytes are for:

    - the current block,
    - the block that is being received,
    - a copy of a block's keys and values for each query head,
    - a block's result in float32.

    With Ulysses attention, the bytes are for the exchanged tensors, and for the queries, keys and values of the nodes
    of all ranks.
    """
    if s.work.layout.cp == 1:
        return 0
    if s.work.layout.cp_kind == "ulysses":
        return s.tokens * (2 * s.query + 2 * s.attended_keys)
    spread = 2 * s.query if s.query > s.keys else 0
    more = 4 // s.item - 1  # float32 next to bf16
    if backward:
        return s.row_tokens * (4 * s.keys + spread + 3 * s.query + more * (s.query + 2 * s.keys))
    return s.row_tokens * (4 * s.keys + max(spread + (1 + more) * s.query, (1 + 3 * more) * s.query))


def optimizer_step(s: Sizes) -> Moments:
    """Return the bytes at each moment of the optimizer's step (optimizer/steps.py).

    A moment is one instant. The optimizer's step has three phases:

    - Gradients are summed over the copies of a weight, bucket by bucket.
    - The gradient's norm is computed in float64, chunk by chunk.
    - Each optimizer slice (some tensors with one update rule) is updated from float32 gradients.
    """
    work = s.work
    layout = s.work.layout
    gradients = GRADIENT * s.elements
    # Dense tensors, and experts.
    copies = (layout.cp, 1) if work.divided else (layout.cp * layout.dp, layout.edp)
    moments: Moments = {"the gradient's norm": {"gradients": gradients, "workspace": 16 * min(s.largest, CHUNK)}}
    for number, experts in zip(copies, (False, True), strict=True):
        summed = tuple(kind for kind in work.model.trained_kinds if kind.tensor.experts is experts)
        if summed and number > 1:
            size = min(s.parts(summed)[experts], max(_largest(summed, s.side), CHUNK))
            moments["the gradients' sum" + " of experts" * experts] = {
                "gradients": gradients,
                "workspace": GRADIENT * size,
            }
    if work.optimizer is None:
        return moments
    remaining = gradients
    for rule, own_kinds in optimizer_spec.kinds_by_rule(work.optimizer, work.model.trained_kinds):
        for number, count, experts in zip(copies, s.parts(own_kinds), (False, True), strict=True):
            if not count:
                continue
            flat = number > 1 and layout.zero == 1
            own = -(-count // number) if flat else count
            remaining -= count * GRADIENT  # gradients whose tensors step later
            # A rank's float32 stretch of all weights, which exists only during a step.
            master = 4 * own if flat and s.item == 4 else 0
            stepping_by = {"gradients": GRADIENT * own + remaining, "workspace": master}
            suffix = f" ({rule.name})" if len(work.optimizer.rules) > 1 else ""
            suffix += " of experts" * experts
            if flat:
                # The tensors that overlap the stretch; the gradients of other tensors are already freed.
                covered = min(count, own + s.largest)
                moments[f"the stretch of gradients{suffix}"] = {"gradients": remaining + GRADIENT * (covered + own)}
                moments[f"the stretch is stepped{suffix}"] = stepping_by
                moments[f"weights are spread{suffix}"] = {
                    "gradients": remaining,
                    "workspace": master + number * min(4 * own, 4 * CHUNK),
                }
            if rule.whole:
                moments["a matrix is made orthogonal" + " of experts" * experts] = {
                    **stepping_by,
                    "workspace": master
                    + max(
                        count_orthogonalization_bytes(kind, s.side)
                        for kind in own_kinds
                        if kind.tensor.experts is experts
                    ),
                }
    return moments


def count_orthogonalization_bytes(kind: TensorKind, side: Side) -> int:
    """Return the bytes that Muon needs to orthogonalize a matrix.

    The bytes are for the matrix, for the result of the next iteration, and for two square matrices whose size is the
    matrix's shorter dimension. For experts, all experts of a rank are assembled first, while the rank's own parts still
    exist. The experts are then orthogonalized one by one.
    """
    tensor = kind.tensor
    whole_elements = tensor.elements // (side.layout.ep if tensor.experts else 1)
    own = elements(box_at(tensor, side, (0, 0, 0)))
    rows, columns = tensor.shape[-2:]
    return max(4 * (whole_elements + rows * columns) + 8 * min(rows, columns) ** 2, 4 * (whole_elements + own))
