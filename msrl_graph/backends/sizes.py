"""Sizes of what a rank computes with, which the accounts of engines share (peaks.py, megatron/peaks.py), and what an
optimizer's step holds.

Invariant: bytes of the busiest rank, at the columns' bounds, of storages of tensors. Of experts it is what they get
where tokens spread evenly over them: how many go to one rank, its router says, and no program bounds it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import gcd

from ..ir import optimizer_spec
from ..ir.workload import Workload
from ..sharding.layout import Side, Tensor, TensorKind, box_at, elements, held, kinds, stage_parts
from .spec import BYTES, Moments

# Elements of a buffer that the trainer's optimizer needs beside what it holds.
CHUNK = 1 << 22
GRADIENT = 4  # bytes of an element: gradients are summed in float32, whatever the weights' type


@dataclass(frozen=True)
class Sizes:
    """Bytes of what a rank computes with: `item` of an element, of `tokens` a layer sees and of tokens `laid` out row
    by row for attention, of one scored token."""

    work: Workload

    @cached_property
    def item(self) -> int:
        return BYTES[self.work.dtype]

    @cached_property
    def tokens(self) -> int:
        """Distinct tokens that are fed: prompts once each, and of responses what is fed behind them."""
        w = self.work
        return max(1, self._most((w.prompts, 0, w.prompt), (w.rows, w.prompt, w.fed)))

    @cached_property
    def laid(self) -> int:
        """With context parallelism as many as make up what a rank lays out: of a ring a part of each row, of Ulysses
        whole rows of a part of the heads."""
        w = self.work
        return w.rows * -(-w.fed // w.layout.cp)

    @cached_property
    def scored(self) -> int:
        w = self.work
        return self._most((w.rows, w.fed - w.response, w.fed))

    def _most(self, *stretches: tuple[int, int, int]) -> int:
        """Of stretches of depths, each with so many tokens at a depth, the tokens of the context-parallel rank that has
        most: depth modulo cp is a token's rank (context_parallel.py)."""
        cp = self.work.layout.cp
        return max(
            sum(tokens * len(range(first + (rank - first) % cp, last, cp)) for tokens, first, last in stretches)
            for rank in range(cp)
        )

    def split(self, size: int) -> int:
        return -(-size // self.work.layout.tp)

    @cached_property
    def hidden(self) -> int:
        """One hidden state of every token."""
        return self.tokens * self.work.model.hidden * self.item

    @cached_property
    def query(self) -> int:
        return self.split(self.work.model.heads * self.work.model.head_dim) * self.item

    @cached_property
    def keys(self) -> int:
        """Keys of a token; values take as much."""
        return self.split(self.work.model.kv_heads * self.work.model.head_dim) * self.item

    @cached_property
    def met(self) -> int:
        """Keys of a token that is laid out: by Ulysses some key-value heads are on several ranks."""
        cp = self.work.layout.cp if self.work.layout.cp_kind == "ulysses" else 1
        return self.keys * (cp // gcd(cp, self.split(self.work.model.kv_heads)))

    @cached_property
    def wide(self) -> int:
        """One product of a feed-forward network's first half, of every token."""
        return self.tokens * self.split(self.work.model.intermediate) * self.item

    @cached_property
    def sent(self) -> int:
        """Tokens on their way to experts, each once for each of its experts; of the ranks of tp each sends a part.
        Where tokens spread evenly, the experts that are whole on a rank get as many."""
        found = self.work.model.experts
        return self.split(self.tokens) * found.active if found else 0

    @cached_property
    def routed(self) -> int:
        """Hidden states on their way to experts."""
        return self.sent * self.work.model.hidden * self.item

    @cached_property
    def inner(self) -> int:
        """One product of the first half of a rank's experts, of all that they get: of an expert's etp ranks each gets
        what goes to all of them."""
        found = self.work.model.experts
        return self.sent * found.intermediate * self.item if found else 0

    @cached_property
    def shared(self) -> int:
        """One product of the first half of the experts that all tokens pass."""
        found = self.work.model.experts
        return self.tokens * self.split(found.shared) * self.item if found else 0

    @cached_property
    def router(self) -> int:
        """One figure for each token and expert."""
        found = self.work.model.experts
        return self.tokens * found.number * self.item if found else 0

    @cached_property
    def logit(self) -> int:
        """Logits of all scored tokens in float32, the whole vocabulary's; or their values."""
        return 4 * self.scored * self.work.model.outputs

    @cached_property
    def angles(self) -> int:
        """Cosines and sines of positions."""
        return 2 * self.tokens * self.work.model.head_dim * self.item

    @cached_property
    def rows(self) -> int:
        """Token ids and indices, 64-bit, and a few float32 columns of responses."""
        w = self.work
        laid = w.rows * w.fed
        scored = w.rows * w.response
        own = 3 * self.tokens + self.laid + self.scored * (1 if w.layout.cp == 1 else 2)
        return 8 * (laid + 3 * scored + own) + 4 * 6 * scored

    @cached_property
    def attention(self) -> int:
        """What the attention of a layer keeps for its backward: query, keys, values and output as laid out, its output
        by token, its log-sum-exp, the figures of norms."""
        scores = 4 * self.laid * self.split(self.work.model.heads) + 8 * self.tokens
        return self.laid * (2 * self.query + 2 * self.met) + self.tokens * self.query + scores

    @cached_property
    def last(self) -> int:
        """What the last norm keeps, and the states whose logits are asked for."""
        return (2 if self.item == 4 else 3) * self.hidden + self.scored * self.work.model.hidden * self.item

    # Weights, whole over dp.

    def _whole(self, tensors: Iterable[Tensor]) -> int:
        return held(kinds(tensors), replace(self.side, divided=False)) * self.item

    @cached_property
    def whole(self) -> int:
        return held(self.work.model.kinds, replace(self.side, divided=False)) * self.item

    @cached_property
    def layer(self) -> int:
        """The last one: where layers differ, it has experts."""
        return self._whole(t for t in self.work.model.tensors if t.layer == t.layers - 1)

    @cached_property
    def ends(self) -> int:
        """Embedding, last norm, head."""
        return self._whole(t for t in self.work.model.tensors if not 0 <= t.layer < t.layers)

    @cached_property
    def table(self) -> int:
        """The embedding's or the head's weights."""
        return self._whole(self.work.model.tensors[:1])

    @cached_property
    def matrix(self) -> int:
        """One of the three matrices of a feed-forward network, or those of its experts."""
        work = self.work
        found = self.work.model.experts
        if found:
            each = found.number // work.layout.ep * -(-found.intermediate // work.layout.etp)
            return each * work.model.hidden * self.item
        return self.split(work.model.intermediate) * work.model.hidden * self.item

    # At rest, in elements.

    @cached_property
    def side(self) -> Side:
        return Side(self.work.layout, self.work.divided)

    def parts(self, found: tuple[TensorKind, ...]) -> tuple[int, int]:
        """Elements that a rank holds of some tensors: of what every token passes, and of experts."""
        return max(stage_parts(found, self.side), key=sum)

    @cached_property
    def elements(self) -> int:
        return sum(self.parts(self.work.model.kinds))

    @cached_property
    def largest(self) -> int:
        """The largest tensor."""
        return _largest(self.work.model.kinds, self.side)


@lru_cache(maxsize=1 << 12)
def _largest(found: tuple[TensorKind, ...], side: Side) -> int:
    return max(elements(box_at(k.tensor, side, (0, 0, 0))) for k in found)


def around(s: Sizes, backward: bool) -> int:
    """What context parallelism adds where rows are laid out: of a ring the block of keys and values that is met and the
    one under way, those for each query's head, and what a block gives, in float32; of Ulysses what is exchanged, and
    the nodes of all ranks."""
    if s.work.layout.cp == 1:
        return 0
    if s.work.layout.cp_kind == "ulysses":
        return s.tokens * (2 * s.query + 2 * s.met)
    spread, more = 2 * s.query if s.query > s.keys else 0, 4 // s.item - 1  # float32 beside bf16
    if backward:
        return s.laid * (4 * s.keys + spread + 3 * s.query + more * (s.query + 2 * s.keys))
    return s.laid * (4 * s.keys + max(spread + (1 + more) * s.query, (1 + 3 * more) * s.query))


def step(s: Sizes) -> Moments:
    """The optimizer's step (optimizer/steps.py): the sum over copies by bucket, the norm in float64 by chunk, then
    part by part on float32 gradients."""
    work = s.work
    layout = s.work.layout
    gradients = GRADIENT * s.elements
    # Of what every token passes, and of experts.
    copies = (layout.cp, 1) if work.divided else (layout.cp * layout.dp, layout.edp)
    found: Moments = {"the gradient's norm": {"gradients": gradients, "workspace": 16 * min(s.largest, CHUNK)}}
    for number, experts in zip(copies, (False, True), strict=True):
        summed = tuple(k for k in work.model.kinds if k.tensor.experts is experts)
        if summed and number > 1:
            size = min(s.parts(summed)[experts], max(_largest(summed, s.side), CHUNK))
            found["the gradients' sum" + " of experts" * experts] = {
                "gradients": gradients,
                "workspace": GRADIENT * size,
            }
    if work.optimizer is None:
        return found
    left = gradients
    for rule, own_kinds in optimizer_spec.parted(work.optimizer, work.model.kinds):
        for number, count, experts in zip(copies, s.parts(own_kinds), (False, True), strict=True):
            if not count:
                continue
            flat = number > 1 and layout.zero == 1
            own = -(-count // number) if flat else count
            left -= count * GRADIENT  # of those that step later
            # A rank's float32 stretch of all weights, which lives only while a step lasts.
            master = 4 * own if flat and s.item == 4 else 0
            stepping_by = {"gradients": GRADIENT * own + left, "workspace": master}
            of = f" ({rule.name})" if len(work.optimizer.rules) > 1 else ""
            of += " of experts" * experts
            if flat:
                met = min(count, own + s.largest)  # those that it has a part of; others are gone by then
                found[f"the stretch of gradients{of}"] = {"gradients": left + GRADIENT * (met + own)}
                found[f"the stretch is stepped{of}"] = stepping_by
                found[f"weights are spread{of}"] = {
                    "gradients": left,
                    "workspace": master + number * min(4 * own, 4 * CHUNK),
                }
            if rule.whole:
                found["a matrix is made orthogonal" + " of experts" * experts] = {
                    **stepping_by,
                    "workspace": master + max(orthogonal(k, s.side) for k in own_kinds if k.tensor.experts is experts),
                }
    return found


def orthogonal(kind: TensorKind, side: Side) -> int:
    """A matrix and its next value, and two squares of its shorter side; of experts all of a rank are made whole beside
    its own part of them, and orthogonal one by one."""
    tensor = kind.tensor
    whole = tensor.elements // (side.layout.ep if tensor.experts else 1)
    own, (rows, columns) = elements(box_at(tensor, side, (0, 0, 0))), tensor.shape[-2:]
    return max(4 * (whole + rows * columns) + 8 * min(rows, columns) ** 2, 4 * (whole + own))
