"""Sizes of the tensors of one layer, to count the memory of engines.

Invariant: sizes are bytes of tensor storages on the busiest rank, with every column at its maximum length, as in
sizes.py. A model has one `LayerSizes` for each kind of its layers. The counts for experts assume that the router sends
the same number of tokens to each expert. The real number of tokens that one rank receives is known only to the router,
and no program bounds that number.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import gcd

from ...model.layers import (
    DenseMlp,
    ExpertMlp,
    GatedDeltaNet,
    GroupedQueryAttention,
    Layer,
    Mamba2,
    Mixer,
    RecurrentMixer,
)
from ..recurrent.mamba_memory import MambaSizes
from ..recurrent.memory import DeltaSizes
from .sizes import SCORES, Sizes

# The projections that read a layer's normed hidden states.
INTO_ATTENTION = {"q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa"}
INTO_MLP = {"gate_proj", "up_proj"}
MLP_PROJECTIONS = {*INTO_MLP, "down_proj"}


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of the tensors of a layer of one kind, in a forward pass on a rank.

    - `whole`: the sizes that do not depend on the kind of a layer.
    - `kind`: the kind of the layer. Its `count` is the number of layers of this kind in the model.
    """

    whole: Sizes
    kind: Layer

    @property
    def mixer(self) -> Mixer:
        return self.kind.mixer

    @cached_property
    def experts(self) -> ExpertMlp | None:
        return self.kind.mlp if isinstance(self.kind.mlp, ExpertMlp) else None

    @cached_property
    def inputs(self) -> int:
        """Bytes of the input, the normed input and the scaled input of the layer's halves."""
        return self.kind.halves * self.whole.part * (3 if self.whole.item == 4 else 4)

    # Attention.

    @cached_property
    def query(self) -> int:
        """Bytes of one token's queries."""
        return self.whole.split(self.mixer.query_width) * self.whole.item

    @cached_property
    def keys(self) -> int:
        """Bytes of one token's keys; the token's values need the same number of bytes."""
        return self.whole.split(self.mixer.key_width) * self.whole.item

    @cached_property
    def attended_keys(self) -> int:
        """Bytes of one token's keys where tokens are laid out row by row for attention.

        Ulysses attention repeats some key-value heads, so that each rank has whole heads.
        """
        if self.is_capped:  # each query head has a copy
            return self.query
        layout = self.whole.work.layout
        if isinstance(self.mixer, RecurrentMixer):  # without context parallelism
            return self.keys
        cp = layout.cp if layout.cp_kind == "ulysses" else 1
        return self.keys * (cp // gcd(cp, self.whole.split(self.mixer.kv_heads)))

    @cached_property
    def is_capped(self) -> bool:
        """Whether attention caps its scores or has sinks (kernels/chunked_attention.py)."""
        return isinstance(self.mixer, GroupedQueryAttention) and self.mixer.scores_itself

    @cached_property
    def chunk_scores(self) -> int:
        """The largest number of scores that attention with caps has at once."""
        s = self.whole
        heads = s.split(self.mixer.heads)
        width = -(-s.work.fed // s.work.layout.cp)
        per_query = s.row_tokens * heads
        return min(max(SCORES, per_query), per_query * width) if self.is_capped else 0

    @cached_property
    def is_banded(self) -> bool:
        """Whether attention is computed in blocks: rows are longer than the window.

        Ring attention computes its own blocks, those of other ranks. Attention with capped scores computes others.
        """
        layout = self.whole.work.layout
        ring = layout.cp > 1 and layout.cp_kind == "ring"
        return 0 < self.mixer.window < self.whole.work.fed and not ring and not self.is_capped

    def find_recurrent(self, rows: int, width: int) -> DeltaSizes | MambaSizes | None:
        """Return the sizes of a recurrent mixer; None for attention.

        The mixer scans `rows` rows of `width` tokens.
        """
        if isinstance(self.mixer, Mamba2):
            return MambaSizes(self.whole, self.mixer, rows, width)
        return DeltaSizes(self.whole, self.mixer, rows, width) if isinstance(self.mixer, GatedDeltaNet) else None

    @cached_property
    def recurrent(self) -> DeltaSizes | MambaSizes | None:
        """The sizes of a recurrent mixer in a pass over a micro-batch."""
        work = self.whole.work
        rows = -(-work.fed_tokens // work.fed)
        return self.find_recurrent(rows, work.fed_tokens // rows)

    @cached_property
    def attention(self) -> int:
        """Bytes of the tensors that a layer's attention keeps for its backward pass.

        The tensors are:

        - queries, keys, values and the output, laid out row by row,
        - the output, laid out token by token,
        - the log-sum-exp, and the statistics of norms.
        """
        s = self.whole
        if self.recurrent:
            return self.recurrent.kept + s.tokens * self.query
        scores = 4 * s.row_tokens * s.split(self.mixer.heads) + 8 * s.tokens
        return s.row_tokens * (2 * self.query + 2 * self.attended_keys) + s.tokens * self.query + scores

    def context_parallel_extra(self, backward: bool) -> int:
        """Return the bytes that context parallelism adds to the memory of attention.

        A block is the keys and values of one rank. With ring attention, the bytes are for:

        - the current block,
        - the block that is being received,
        - a copy of a block's keys and values for each query head,
        - a block's result in float32,
        - with a window, which keys of a block the queries see, and what is added to their scores.

        With Ulysses attention, the bytes are for the exchanged tensors, and for the queries, keys and values of the
        nodes of all ranks.
        """
        s = self.whole
        if s.work.layout.cp == 1:
            return 0
        if s.work.layout.cp_kind == "ulysses":
            return s.tokens * (2 * self.query + 2 * self.attended_keys)
        width = -(-s.work.fed // s.work.layout.cp)
        mask = width**2 * (1 + s.item) if self.mixer.window else 0
        spread = 2 * self.query if self.query > self.keys else 0
        more = 4 // s.item - 1  # float32 next to bf16
        if backward:
            return mask + s.row_tokens * (4 * self.keys + spread + 3 * self.query + more * (self.query + 2 * self.keys))
        part = 4 * self.keys + max(spread + (1 + more) * self.query, (1 + 3 * more) * self.query)
        return mask + s.row_tokens * part

    # MLP.

    @cached_property
    def wide(self) -> int:
        """Bytes of the gate projection's output in an MLP without experts.

        The size is for all tokens. The output of the up projection has the same size.
        """
        return 0 if self.experts else self.whole.tokens * self.whole.split(self.kind.mlp.intermediate) * self.whole.item

    @cached_property
    def concatenates(self) -> bool:
        """Whether outputs of gate and up are concatenated (hf_modules.py)."""
        return isinstance(self.kind.mlp, DenseMlp) and self.kind.mlp.concatenates

    @cached_property
    def sent(self) -> int:
        """Number of tokens that a rank sends to experts.

        A token counts once for each of its experts. Each tp rank sends only a part of the tokens. If the router
        distributes tokens evenly, a rank with whole experts receives as many tokens as it sends.
        """
        return self.whole.split(self.whole.tokens) * self.experts.active if self.experts else 0

    @cached_property
    def routed(self) -> int:
        """Bytes of the hidden states that a rank sends to experts."""
        return self.sent * self.whole.work.model.hidden * self.whole.item

    @cached_property
    def inner(self) -> int:
        """Bytes of the gate projection's output in the experts on a rank.

        The output of the up projection has the same size. Both outputs are computed for all tokens that the experts
        receive. Each etp rank of an expert receives the tokens of all etp ranks.
        """
        return self.sent * self.experts.intermediate * self.whole.item if self.experts else 0

    @cached_property
    def shared(self) -> int:
        """Bytes of the gate projection's output in the shared experts, for all tokens.

        The output of the up projection has the same size.
        """
        return self.whole.tokens * self.whole.split(self.experts.shared) * self.whole.item if self.experts else 0

    @cached_property
    def router(self) -> int:
        """Bytes of one value for each pair of a token and an expert."""
        return self.whole.tokens * self.experts.number * self.whole.item if self.experts else 0

    # Weights, not sharded over dp.

    @cached_property
    def matrix(self) -> int:
        """Bytes of one of the matrices of an MLP.

        With experts: bytes of one of the matrices for all experts on the rank.
        """
        layout = self.whole.work.layout
        width = self.whole.split(self.kind.mlp.intermediate)
        if self.experts:
            width = self.experts.number // layout.ep * -(-self.experts.intermediate // layout.etp)
        return width * self.whole.work.model.hidden * self.whole.item
