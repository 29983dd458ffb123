"""Kinds of mixers of tokens, one class each.

Invariant: the classes are plain data, as those of MLPs (mlps.py).

Dim 1 of a projection is its input. So tensor parallelism shards dim 0 of q, k and v, and dim 1 of o.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import msgspec

from ..sharding.tensors import Tensor
from .mamba import Mamba2
from .mlps import MakeTensor, iterate_linear
from .recurrent_mixers import GatedDeltaNet

KV_HEADS = "key-value heads"  # a size that some engines need not divide, because they replicate heads


class AttentionMixer(msgspec.Struct, frozen=True):
    """What all kinds of attention have."""

    heads: int
    module: ClassVar[str] = "self_attn"
    output: ClassVar[str] = "o_proj"

    @property
    def rotates(self) -> bool:
        """Whether queries and keys have rotary positions."""
        return True

    @property
    def kv_heads(self) -> int:
        return self.heads

    @property
    def head_dim(self) -> int:
        raise NotImplementedError

    @property
    def query_width(self) -> int:
        """The number of elements of a token's queries."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """The number of elements of a token's keys."""
        return self.kv_heads * self.head_dim

    @property
    def query_key_size(self) -> int:
        """The number of elements of a token's query and key."""
        return self.query_width + self.key_width

    @property
    def projected(self) -> int:
        """The widths of all projections together.

        They are the outputs of projections of a hidden state, and the inputs of the projection to one. Latents make the
        number smaller.
        """
        return 2 * self.query_key_size

    def count_flop(self, decode: bool) -> int:
        """Return one head's FLOP per pair of a query and a key."""
        raise NotImplementedError

    def share_of_pairs(self, tokens: float, decode: bool) -> float:
        """Return the share of pairs of a query and an earlier key that attention needs.

        A sequence has `tokens` tokens. With `decode`, only the last of them is a query.
        """
        return 1.0

    def count_state(self, tp: int = 1) -> int:
        """Return the number of float32 elements of a sequence's state: attention has none."""
        return 0


class GroupedQueryAttention(AttentionMixer, frozen=True, tag="attention"):
    """Attention with grouped key-value heads.

    - `head_norms`: whether queries and keys are normalized (q_norm and k_norm): each head by itself, or all heads
      together with `joint_norms`.
    - `window`: how many tokens a token attends to; 0 for all tokens before it.
    - `no_rope`: whether queries and keys have no rotary positions.
    - `cap`: the cap of attention scores; 0 for none. A score s becomes cap · tanh(s / cap).
    - `sinks`: whether each head has a sink, the score of a further key without a value.
    - `fused`: whether the files have the projections of queries, keys and values as one tensor, `qkv_proj`.
    - `output_gate`: whether outputs are multiplied by gates, which `q_proj` computes behind each head's query.
    """

    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    head_norms: bool = False
    window: int = 0
    joint_norms: bool = False
    no_rope: bool = False
    cap: float = 0.0
    fused: bool = False
    sinks: bool = False
    output_gate: bool = False

    @property
    def rotates(self) -> bool:
        return not self.no_rope

    @property
    def projected(self) -> int:
        return 2 * self.query_key_size + self.output_gate * self.query_width

    @property
    def scores_itself(self) -> bool:
        """Whether the attention caps scores or has sinks, which no fused kernel does."""
        return self.cap > 0 or self.sinks

    def count_flop(self, decode: bool) -> int:
        return 4 * self.head_dim

    def share_of_pairs(self, tokens: float, decode: bool) -> float:
        if not self.window or tokens <= self.window:
            return 1.0
        share = self.window / tokens
        return share if decode else share * (2 - share)

    def count_cached(self, tokens: float, tp: int = 1, expanded: bool = False) -> float:
        """Return the number of elements of a sequence's KV cache on one of `tp` ranks.

        A layer with a window caches only the last tokens. `expanded` is for latent attention.
        """
        visible = min(tokens, self.window) if self.window else tokens
        return 2 * -(-self.kv_heads // tp) * self.head_dim * visible

    def count_saved(self) -> tuple[int, int]:
        """Return how many elements per token are saved for a backward pass.

        The result is a pair: elements that each tp rank saves, and elements that are sharded over tp.
        """
        return 0, 2 * self.query_key_size + 2 * self.output_gate * self.query_width

    def list_divided(self) -> Iterator[tuple[int, str]]:
        """Yield the sizes that tp must divide, with their names."""
        yield self.heads, "heads"
        yield self.kv_heads, KV_HEADS

    def list_features(self) -> Iterator[str]:
        if self.qkv_bias:
            yield "qkv_bias"
        if self.output_bias:
            yield "output_bias"
        if self.head_norms:
            yield "joint_norms" if self.joint_norms else "head_norms"
        if self.window:
            yield "sliding_window"
        if self.no_rope:
            yield "no_rope"
        if self.cap:
            yield "attention_cap"
        if self.sinks:
            yield "attention_sinks"
        if self.output_gate:
            yield "output_gate"

    def list_tensors(self, make: MakeTensor, hidden: int) -> Iterator[Tensor]:
        """Yield the tensors of the attention.

        A head is never split between ranks. If there are more ranks than key-value heads, several ranks have a copy of
        the same head.
        """
        unit = self.head_dim
        q = self.query_width
        kv = self.key_width
        fused = {"fused": "qkv_proj"} if self.fused else {}
        outputs = 2 if self.output_gate else 1
        size = (outputs * q, hidden)
        yield from iterate_linear(make, "self_attn.q_proj", size, 0, self.qkv_bias, unit=outputs * unit, **fused)
        for name, start in (("k", q), ("v", q + kv)):
            more = {"start": start, **fused} if self.fused else {}
            yield from iterate_linear(
                make, f"self_attn.{name}_proj", (kv, hidden), 0, self.qkv_bias, unit=unit, shared=True, **more
            )
        yield from iterate_linear(make, "self_attn.o_proj", (hidden, q), 1, self.output_bias, unit=unit)
        if self.head_norms:
            yield make("self_attn.q_norm.weight", (q if self.joint_norms else unit,))
            yield make("self_attn.k_norm.weight", (kv if self.joint_norms else unit,))
        if self.sinks:
            yield make("self_attn.sinks", (self.heads,), 0)


class MultiHeadLatentAttention(AttentionMixer, frozen=True, tag="latent_attention"):
    """Multi-head latent attention (arXiv:2405.04434).

    - `q_rank`: the size of the latent vector of queries; 0 if queries have no latent vector.
    - `kv_rank`: the size of the latent vector of keys and values.
    - `nope`: for each head, the size of the part of a key that has no rotary position.
    - `rope`: for each head, the size of the part of a key that has a rotary position.
    - `value`: for each head, the size of a value.
    - `qkv_bias`: whether the projections down to the latents, and the output, have biases.
    """

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int
    qkv_bias: bool = False

    @property
    def head_norms(self) -> bool:
        return False

    @property
    def head_dim(self) -> int:
        return self.nope + self.rope

    @property
    def window(self) -> int:
        return 0

    def count_flop(self, decode: bool) -> int:
        """Return one head's FLOP per pair of a query and a key (arXiv:2405.04434, 2.1.2)."""
        return 2 * (2 * self.kv_rank + self.rope if decode else self.nope + self.rope + self.value)

    def count_cached(self, tokens: float, tp: int = 1, expanded: bool = False) -> float:
        """Return the number of elements of a sequence's KV cache on one of `tp` ranks.

        These are the latents and the rotary keys, which each rank has. If the cache is `expanded`, it has keys and
        values instead.
        """
        return (2 * -(-self.heads // tp) * self.head_dim if expanded else self.kv_rank + self.rope) * tokens

    def count_saved(self) -> tuple[int, int]:
        """Return how many elements per token are saved for a backward pass.

        The result is a pair: the latents and the rotary key, which each tp rank saves, and the elements of the expanded
        heads, which are sharded over tp.
        """
        return self.q_rank + self.kv_rank + self.rope, 2 * self.heads * (self.head_dim + self.value)

    def list_divided(self) -> Iterator[tuple[int, str]]:
        """Yield the sizes that tp must divide, with their names."""
        yield self.heads, "heads"

    def list_features(self) -> Iterator[str]:
        yield "latent_attention"
        if self.qkv_bias:
            yield "latent_bias"

    def list_tensors(self, make: MakeTensor, hidden: int) -> Iterator[Tensor]:
        """Yield the tensors of the attention.

        Projections down to the latents are copied on all ranks. Projections up from the latents are sharded by heads.
        """
        unit = self.head_dim
        if self.q_rank:
            yield from iterate_linear(make, "self_attn.q_a_proj", (self.q_rank, hidden), -1, self.qkv_bias)
            yield make("self_attn.q_a_layernorm.weight", (self.q_rank,))
            yield make("self_attn.q_b_proj.weight", (self.heads * unit, self.q_rank), 0, unit=unit)
        else:
            yield make("self_attn.q_proj.weight", (self.heads * unit, hidden), 0, unit=unit)
        down = (self.kv_rank + self.rope, hidden)
        yield from iterate_linear(make, "self_attn.kv_a_proj_with_mqa", down, -1, self.qkv_bias)
        yield make("self_attn.kv_a_layernorm.weight", (self.kv_rank,))
        both = self.nope + self.value
        yield make("self_attn.kv_b_proj.weight", (self.heads * both, self.kv_rank), 0, unit=both)
        out = (hidden, self.heads * self.value)
        yield from iterate_linear(make, "self_attn.o_proj", out, 1, self.qkv_bias, unit=self.value)


class NoMixer(msgspec.Struct, frozen=True, tag="no_mixer"):
    """The mixer of a layer that has only an MLP: it has no weights and costs nothing."""

    module: ClassVar[str] = ""
    heads: ClassVar[int] = 0
    kv_heads: ClassVar[int] = 0
    head_dim: ClassVar[int] = 0
    head_norms: ClassVar[bool] = False
    window: ClassVar[int] = 0
    query_width: ClassVar[int] = 0
    key_width: ClassVar[int] = 0
    query_key_size: ClassVar[int] = 0
    projected: ClassVar[int] = 0

    def count_flop(self, decode: bool) -> int:
        return 0

    def share_of_pairs(self, tokens: float, decode: bool) -> float:
        return 1.0

    def count_cached(self, tokens: float, tp: int = 1, expanded: bool = False) -> float:
        return 0.0

    def count_state(self, tp: int = 1) -> int:
        return 0

    def count_saved(self) -> tuple[int, int]:
        return 0, 0

    def list_divided(self) -> Iterator[tuple[int, str]]:
        yield from ()

    def list_features(self) -> Iterator[str]:
        yield "single_layers"

    def list_tensors(self, make: MakeTensor, hidden: int) -> Iterator[Tensor]:
        yield from ()


Mixer = GroupedQueryAttention | MultiHeadLatentAttention | GatedDeltaNet | Mamba2 | NoMixer
