"""Sizes of tensors, to count the memory of engines and of the optimizer's step.

The memory of engines is counted in trainer.py, generator.py and megatron/peaks.py. The memory of the optimizer's step
is counted by `optimizer_step`.

The sizes that depend on the kind of a layer are in layer_sizes.py.

Invariant: sizes are bytes of tensor storages on the busiest rank, with every column at its maximum length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from ...ir import optimizer_spec
from ...ir.optimizer_spec import FLOAT, Rule
from ...ir.workload import Workload
from ...model.architecture import HEAD, is_copied
from ...sharding.layout import (
    Side,
    TensorKind,
    TensorKinds,
    box_at,
    count_busiest_elements,
    elements,
    stage_parts,
)
from ..row_blocks import bound_row_tokens
from ..spec import BYTES, Moments

# Elements of a buffer that the trainer's optimizer needs in addition to its states.
CHUNK = 1 << 22
# Attention scores that exist at once where no fused kernel computes them (kernels/chunked_attention.py).
SCORES = 1 << 24
# Bytes of the logits that a policy's head makes at once (policy_head.py), with their products in the weights' type.
LOGITS = 256_000_000


def count_logit_bytes(item: int) -> int:
    """Return the bytes of a logit in float32, and of its product in the weights' type.

    The elements of weights have `item` bytes. A product in float32 becomes the logit itself.
    """
    return 4 if item == 4 else 4 + item


def count_ids_at_once(tokens: int, item: int) -> int:
    """Return the number of ids whose logits a head makes at once.

    The elements of weights have `item` bytes.
    """
    return max(1, LOGITS // (max(1, tokens) * count_logit_bytes(item)))


def count_slice_rows(tokens: int, ids: int) -> int:
    """Return the number of tokens in the head's temporary tensors.

    `ids` is the number of ids at once. The result is a sixteenth of the tokens, but not fewer than fill a mebibyte.
    """
    return min(tokens, max(-(-tokens // 16), (1 << 18) // max(1, ids)))


@dataclass(frozen=True)
class Sizes:
    """Sizes of the tensors of one forward pass on a rank.

    Sizes are bytes, except `tokens`, `row_tokens`, `scored`, `elements` and `largest`, which are counts.

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
        distinct = self._most((work.prompts, 0, work.prompt), (work.rows, work.prompt, work.fed))
        return max(1, self._cap(distinct, work.most_tokens))

    @cached_property
    def row_tokens(self) -> int:
        """Number of tokens that a rank lays out row by row for attention.

        With context parallelism, ring attention lays out a part of each row. Ulysses attention lays out whole rows, but
        only for a part of the heads. Rows of full length are not padded; row_blocks.py bounds the padding of others.
        """
        work = self.work
        longest = -(-work.fed // work.layout.cp)
        most = work.most_tokens if work.padded else bound_row_tokens(work.most_tokens)
        # A row alone has no padding.
        return max(longest, self._cap(work.rows * longest, most))

    @cached_property
    def scored(self) -> int:
        work = self.work
        return self._cap(self._most((work.rows, work.fed - work.response, work.fed)), work.most_tokens)

    def _cap(self, tokens: int, most: int) -> int:
        """Limit a number of tokens on a rank.

        If tokens limit a micro-batch, all ranks of the context have at most `most` tokens.
        """
        return min(tokens, -(-most // self.work.layout.cp)) if self.work.most_tokens else tokens

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

    @cached_property
    def gradient(self) -> int:
        """Bytes of an element of the gradients' sums."""
        return BYTES[self.work.gradients]

    def split(self, size: int) -> int:
        return -(-size // self.work.layout.tp)

    @cached_property
    def hidden(self) -> int:
        """Bytes of the hidden states of all tokens, one state per token."""
        return self.tokens * self.work.model.hidden * self.item

    @cached_property
    def part(self) -> int:
        """Bytes of the hidden states of this rank's share of the tokens.

        Inside of mixers and MLPs a tp rank has all tokens; in all other places it has a share (sequence parallelism).
        """
        return self.split(self.tokens) * self.work.model.hidden * self.item

    @cached_property
    def whole_part(self) -> int:
        """Bytes of all tokens' hidden states, gathered over tp; 0 without tp."""
        return self.hidden if self.work.layout.tp > 1 else 0

    @cached_property
    def angles(self) -> int:
        """Bytes of the cosines and sines of all tokens' rotary positions.

        All layers whose heads have the same size share them.
        """
        mixers = self.work.model.attention_mixers
        return 2 * self.tokens * sum({mixer.head_dim for mixer in mixers if mixer.rotates}) * self.item

    @cached_property
    def rows(self) -> int:
        """Bytes of a micro-batch's rows.

        They have 64-bit ids and indices, float32 columns, and routes.
        """
        work = self.work
        row_tokens = work.fed_tokens
        scored = work.scored_tokens
        own = 3 * self.tokens + self.row_tokens + self.scored * (1 if work.layout.cp == 1 else 2)
        replayed = work.replays_routes * (self.routes + self.routes_of(row_tokens))
        recorded = work.records_routes * self.routes
        return 8 * (row_tokens + 3 * scored + own) + 4 * 6 * scored + replayed + recorded

    def routes_of(self, tokens: int) -> int:
        """Return the bytes of the routes of `tokens` tokens, of 16-bit indices."""
        return 2 * tokens * self.work.model.route_length

    @cached_property
    def routes(self) -> int:
        """Bytes of the routes of all tokens that the rank computes."""
        return self.routes_of(self.tokens)

    @cached_property
    def last(self) -> int:
        """Bytes of the tensors that the last norm keeps, and of the requested states.

        The requested states are the hidden states for which logits are computed.
        """
        return (2 if self.item == 4 else 3) * self.part + self.scored * self.work.model.hidden * self.item

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
        """Bytes of the weights of the model's largest layer."""
        return max(self._bytes(_select_layer(self.work.model.kinds, layer)) for layer in self.work.model.last_layers)

    @cached_property
    def ends(self) -> int:
        """Bytes of the weights of the embedding, the last norm and the head together."""
        return self._bytes(_select_ends(self.work.model.kinds))

    @cached_property
    def table(self) -> int:
        """Bytes of the weights of the embedding; the head has the same size."""
        return self._bytes(_select_ends(self.work.model.kinds)[:1])

    # Gradients, of the weights' type. Those of frozen weights do not exist.

    @cached_property
    def layer_gradients(self) -> int:
        """Bytes of the gradients of the layer that has the largest ones."""
        return max(self.gradients_by_kind)

    @cached_property
    def gradients_by_kind(self) -> tuple[int, ...]:
        """Bytes of the gradients of a layer, for each kind of the model's layers."""
        model = self.work.model
        return tuple(self._bytes(_select_layer(model.trained_kinds, layer)) for layer in model.last_layers)

    @cached_property
    def end_gradients(self) -> int:
        """Bytes of the gradients of the embedding, the last norm and the head together."""
        return self._bytes(_select_ends(self.work.model.trained_kinds))

    @cached_property
    def embedding_gradient(self) -> int:
        return self.table * any(kind.tensor.layer < 0 for kind in self.work.model.trained_kinds)

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
def _select_layer(tensor_kinds: tuple[TensorKind, ...], layer: int) -> tuple[TensorKind, ...]:
    """Return the kinds of the weights of a layer."""
    return TensorKinds(kind._replace(stretches=((layer, layer + 1),)) for kind in tensor_kinds if layer in kind.layers)


@lru_cache(maxsize=1 << 8)
def _select_ends(tensor_kinds: tuple[TensorKind, ...]) -> tuple[TensorKind, ...]:
    """Return the kinds of the embedding, the last norm and the head."""
    return TensorKinds(kind for kind in tensor_kinds if kind.at_end)


@lru_cache(maxsize=1 << 12)
def _largest(tensor_kinds: tuple[TensorKind, ...], side: Side) -> int:
    return max(elements(box_at(kind.tensor, side, (0, 0, 0))) for kind in tensor_kinds)


def sum_copies(s: Sizes) -> Moments:
    """Return the bytes that exist while gradients of copied weights are summed.

    The sum is over tp, for experts over etp, and is computed bucket by bucket.
    """
    layout = s.work.layout
    moments: Moments = {}
    for experts, number in ((False, layout.tp), (True, layout.etp)):
        kinds = s.work.model.trained_kinds
        own = tuple(kind for kind in kinds if is_copied(kind.tensor) and kind.tensor.experts is experts)
        if own and number > 1:
            bucket = min(sum(s.parts(own)), max(CHUNK, _largest(own, s.side)))
            name = "the sum of copies' gradients" + " of experts" * experts
            moments[name] = {"gradients": s.gradient * s.elements, "workspace": s.gradient * bucket}
    return moments


def optimizer_step(s: Sizes) -> Moments:
    """Return the bytes at each moment of the optimizer's step (optimizer/steps.py).

    A moment is one instant. The optimizer's step has three phases:

    - Gradients are summed over the copies of a weight, bucket by bucket.
    - The gradient's norm is computed in float64, chunk by chunk.
    - Each optimizer slice (some tensors with one update rule) is updated. Gradients and states that are not float32 are
      converted piece by piece.
    """
    work = s.work
    layout = s.work.layout
    gradients = s.gradient * s.elements
    # Dense tensors, and experts.
    copies = (layout.cp, 1) if work.divided else (layout.cp * layout.dp, layout.edp)
    moments: Moments = {"the gradient's norm": {"gradients": gradients, "workspace": 16 * min(s.largest, CHUNK)}}
    for number, experts in zip(copies, (False, True), strict=True):
        summed = tuple(kind for kind in work.model.trained_kinds if kind.tensor.experts is experts)
        if summed and number > 1:
            size = min(s.parts(summed)[experts], max(_largest(summed, s.side), CHUNK))
            moments["the gradients' sum" + " of experts" * experts] = {
                "gradients": gradients,
                "workspace": s.gradient * size,
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
            remaining -= count * s.gradient  # gradients whose tensors step later
            # A rank's float32 stretch of all weights, which exists only during a step.
            master = 4 * own if flat and s.item == 4 else 0
            piece = count_piece_bytes(rule, s.gradient, own)
            stepping_by = {"gradients": s.gradient * own + remaining, "workspace": master + piece}
            suffix = f" ({rule.name})" if len(work.optimizer.rules) > 1 else ""
            suffix += " of experts" * experts
            if piece and not flat:
                moments[f"pieces are stepped{suffix}"] = stepping_by
            if flat:
                # The tensors that overlap the stretch; the gradients of other tensors are already freed.
                covered = min(count, own + s.largest)
                moments[f"the stretch of gradients{suffix}"] = {"gradients": remaining + s.gradient * (covered + own)}
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


def count_piece_bytes(rule: Rule, gradient: int, count: int) -> int:
    """Return the bytes of the float32 copies of a piece's gradients and states.

    An optimizer slice of `count` elements, whose gradients have `gradient` bytes per element, is updated piece by piece
    if its gradients or states are not float32. A rule of whole matrices converts states within its own workspace.
    """
    copies = (gradient < FLOAT) + len(rule.keeps) * rule.is_rounded
    return 0 if rule.whole else FLOAT * copies * min(count, CHUNK)


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
