"""The layers of a model: each has a mixer of tokens and an MLP.

Invariant: the classes are plain data. Each class yields the tensors of its part of a layer, with the names that
transformers gives them, and counts what costs and memory depend on: pairs of queries and keys, the cache, what is saved
for a backward pass. So a new kind of mixer or MLP is one class. A family (families/) says which layers its models have.

Dim 1 of a projection is its input. So tensor parallelism shards dim 0 of q, k, v, gate and up, and dim 1 of o and down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any, Literal

import msgspec

from ..sharding.tensors import Tensor

# What Mixtral's files call a layer's experts, and an expert's projections.
BLOCK_SPARSE = "block_sparse_moe"
BLOCK_SPARSE_PROJECTIONS = {"gate": "w1", "up": "w3", "down": "w2"}
KV_HEADS = "key-value heads"  # a size that some engines need not divide, because they replicate heads
MakeTensor = Callable[..., Tensor]  # (name in the layer, shape, dim that tp shards, options of Tensor)


class GroupedQueryAttention(msgspec.Struct, frozen=True, tag="attention"):
    """Attention with grouped key-value heads.

    - `head_norms`: whether queries and keys are normalized (q_norm and k_norm): each head by itself, or all heads
      together with `joint_norms`.
    - `window`: how many tokens a token attends to; 0 for all tokens before it.
    - `no_rope`: whether queries and keys have no rotary positions.
    - `cap`: the cap of attention scores; 0 for none. A score s becomes cap · tanh(s / cap).
    - `fused`: whether the files have the projections of queries, keys and values as one tensor, `qkv_proj`.
    """

    heads: int
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

    @property
    def query_key_size(self) -> int:
        """The number of elements of a token's query and key."""
        return (self.heads + self.kv_heads) * self.head_dim

    def count_flop(self, decode: bool) -> int:
        """Return one head's FLOP per pair of a query and a key."""
        return 4 * self.head_dim

    def share_of_pairs(self, tokens: float, decode: bool) -> float:
        """Return the share of pairs of a query and an earlier key that attention needs.

        A sequence has `tokens` tokens. With `decode`, only the last of them is a query.
        """
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
        return 0, 2 * self.query_key_size

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

    def list_tensors(self, make: MakeTensor, hidden: int) -> Iterator[Tensor]:
        """Yield the tensors of the attention.

        A head is never split between ranks. If there are more ranks than key-value heads, several ranks have a copy of
        the same head.
        """
        unit = self.head_dim
        q = self.heads * unit
        kv = self.kv_heads * unit
        fused = {"fused": "qkv_proj"} if self.fused else {}
        yield from iterate_linear(make, "self_attn.q_proj", (q, hidden), 0, self.qkv_bias, unit=unit, **fused)
        for name, start in (("k", q), ("v", q + kv)):
            more = {"start": start, **fused} if self.fused else {}
            yield from iterate_linear(
                make, f"self_attn.{name}_proj", (kv, hidden), 0, self.qkv_bias, unit=unit, shared=True, **more
            )
        yield from iterate_linear(make, "self_attn.o_proj", (hidden, q), 1, self.output_bias, unit=unit)
        if self.head_norms:
            yield make("self_attn.q_norm.weight", (q if self.joint_norms else unit,))
            yield make("self_attn.k_norm.weight", (kv if self.joint_norms else unit,))


class MultiHeadLatentAttention(msgspec.Struct, frozen=True, tag="latent_attention"):
    """Multi-head latent attention (arXiv:2405.04434).

    - `q_rank`: the size of the latent vector of queries; 0 if queries have no latent vector.
    - `kv_rank`: the size of the latent vector of keys and values.
    - `nope`: for each head, the size of the part of a key that has no rotary position.
    - `rope`: for each head, the size of the part of a key that has a rotary position.
    - `value`: for each head, the size of a value.
    - `qkv_bias`: whether the projections down to the latents, and the output, have biases.
    """

    heads: int
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
    def kv_heads(self) -> int:
        return self.heads

    @property
    def head_dim(self) -> int:
        return self.nope + self.rope

    @property
    def window(self) -> int:
        return 0

    @property
    def query_key_size(self) -> int:
        """The number of elements of a token's query and key."""
        return 2 * self.heads * self.head_dim

    def count_flop(self, decode: bool) -> int:
        """Return one head's FLOP per pair of a query and a key (arXiv:2405.04434, 2.1.2)."""
        return 2 * (2 * self.kv_rank + self.rope if decode else self.nope + self.rope + self.value)

    def share_of_pairs(self, tokens: float, decode: bool) -> float:
        return 1.0

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


class DenseMlp(msgspec.Struct, frozen=True, tag="mlp"):
    """A gated MLP.

    With `fused`, the files have the projections gate and up as one tensor, `gate_up_proj`.
    """

    intermediate: int
    bias: bool = False
    fused: bool = False

    @property
    def width(self) -> int:
        """The intermediate size that a token passes through."""
        return self.intermediate

    def count_saved(self, hidden: int, etp: int) -> tuple[int, int]:
        """Return how many elements per token are saved for a backward pass.

        The result is a pair: elements that each tp rank saves, and elements that are sharded over tp.
        """
        return 0, 4 * self.intermediate

    def list_divided(self) -> Iterator[tuple[int, str]]:
        """Yield the sizes that tp must divide, with their names."""
        yield self.intermediate, "intermediate size"

    def list_features(self) -> Iterator[str]:
        if self.bias:
            yield "mlp_bias"

    def list_tensors(self, make: MakeTensor, hidden: int) -> Iterator[Tensor]:
        starts = {"gate": 0, "up": self.intermediate} if self.fused else {}
        for name, size, tp_dim in _projections(hidden, self.intermediate):
            more = {"fused": "gate_up_proj", "start": starts[name]} if name in starts else {}
            yield from iterate_linear(make, f"mlp.{name}_proj", size, tp_dim, self.bias, **more)


class ExpertMlp(msgspec.Struct, frozen=True, tag="experts"):
    """Experts, of which a router picks some for each token.

    - `number`: the number of experts.
    - `active`: the number of experts that the router picks for each token.
    - `intermediate`: the intermediate size of one expert.
    - `shared`: the intermediate size of all shared experts together. Every token passes through the shared experts.
    - `router`: `softmax` scores all experts. `sigmoid` does so, too, and a bias corrects its scores. `grouped_sigmoid`
      also first chooses groups of experts (arXiv:2412.19437).
    - `block_sparse`: whether experts and projections have other names in the files, those of Mixtral's.
    """

    number: int
    active: int
    intermediate: int
    shared: int = 0
    router: Literal["softmax", "sigmoid", "grouped_sigmoid"] = "softmax"
    block_sparse: bool = False

    @property
    def width(self) -> int:
        """The intermediate size that a token passes through."""
        return self.active * self.intermediate + self.shared

    @property
    def corrected(self) -> bool:
        """Whether a bias corrects the router's scores."""
        return self.router in ("sigmoid", "grouped_sigmoid")

    def count_saved(self, hidden: int, etp: int) -> tuple[int, int]:
        """Return how many elements per token are saved for a backward pass.

        The result is a pair: the router's scores, which each tp rank saves, and elements that are sharded over tp. A
        copy of each token is sent to each expert that the router chooses; the copies are spread evenly over ep. For
        each copy, its input, its output and 4 f elements are saved, with the intermediate size f. Each of an expert's
        `etp` ranks receives all of the expert's tokens, and has a part of the width.
        """
        return self.number, 4 * self.shared + self.active * (2 * hidden * etp + 4 * self.intermediate)

    def list_divided(self) -> Iterator[tuple[int, str]]:
        """Yield the sizes that tp must divide, with their names."""
        if self.shared:
            yield self.shared, "shared experts' size"

    def list_features(self) -> Iterator[str]:
        yield f"{self.router}_router"
        if self.shared:
            yield "shared_experts"

    def list_tensors(self, make: MakeTensor, hidden: int) -> Iterator[Tensor]:
        """Yield the tensors of the router and the experts.

        The experts form one tensor per projection. The bias that corrects the router's scores is a buffer.
        """

        def name_in_files(name: str) -> dict[str, str]:
            """Return the option `file_name` of a tensor, if it has another name in the files."""
            return {"file_name": f"{BLOCK_SPARSE}.{name}"} if self.block_sparse else {}

        yield make("mlp.gate.weight", (self.number, hidden), **name_in_files("gate.weight"))
        for name, size, tp_dim in _projections(hidden, self.intermediate):
            file_name = name_in_files(f"experts.*.{BLOCK_SPARSE_PROJECTIONS[name]}.weight")
            stacked = (self.number, *size)
            yield make(f"mlp.experts.*.{name}_proj.weight", stacked, tp_dim + 1, experts=True, **file_name)
        for name, size, tp_dim in _projections(hidden, self.shared) if self.shared else ():
            yield make(f"mlp.shared_experts.{name}_proj.weight", size, tp_dim)
        if self.corrected:
            # Transformers has the bias next to the router if the files do.
            owner = "mlp" if self.block_sparse else "mlp.gate"
            file_name = name_in_files("e_score_correction_bias")
            yield make(f"{owner}.e_score_correction_bias", (self.number,), role="buffer", **file_name)


Mixer = GroupedQueryAttention | MultiHeadLatentAttention
Mlp = DenseMlp | ExpertMlp


class LayerNorms(msgspec.Struct, frozen=True):
    """The names of a layer's norms: those of the mixer and of the MLP.

    - `before`: the norms of the inputs. Without them, mixer and MLP read the residual itself.
    - `after`: the norms of the outputs, before they are added to the residual.
    """

    before: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    after: tuple[str, ...] = ()

    @property
    def number(self) -> int:
        return len(self.before) + len(self.after)

    def list_features(self) -> Iterator[str]:
        if self.after:
            yield "sandwich_norms" if self.before else "post_norms"

    def list_tensors(self, make: MakeTensor, hidden: int) -> Iterator[Tensor]:
        for name in (*self.before, *self.after):
            yield make(f"{name}.weight", (hidden,))


BEFORE = LayerNorms()


class Layer(msgspec.Struct, frozen=True):
    """A kind of layer, and how many such layers follow each other."""

    mixer: GroupedQueryAttention | MultiHeadLatentAttention
    mlp: DenseMlp | ExpertMlp
    count: int = 1
    norms: LayerNorms = BEFORE

    @property
    def kind(self) -> Layer:
        """The layer without its count."""
        return msgspec.structs.replace(self, count=1)

    def list_features(self) -> Iterator[str]:
        for part in (self.mixer, self.mlp, self.norms):
            yield from part.list_features()

    def list_tensors(self, make: MakeTensor, hidden: int) -> Iterator[Tensor]:
        for part in (self.mixer, self.mlp, self.norms):
            yield from part.list_tensors(make, hidden)

    def count_flop(self, hidden: int, tokens: int) -> float:
        """Return the FLOP of one of these layers for a token.

        The result is the mean over the tokens of a row with `tokens` tokens. `hidden` is the model's hidden size.
        """
        attention = self.mixer.heads * self.mixer.count_flop(False) * self.mixer.share_of_pairs(tokens, False)
        return 2 * hidden * (2 * self.mixer.query_key_size + 3 * self.mlp.width) + attention * tokens / 2


def group_layers(layers: Iterable[tuple[Mixer, Mlp]], norms: LayerNorms = BEFORE) -> Iterator[Layer]:
    """Yield layers, of which equal ones that follow each other are one item."""
    for (mixer, mlp), same in groupby(layers):
        yield Layer(mixer, mlp, len([*same]), norms)


def iterate_linear(
    make: MakeTensor, name: str, size: tuple[int, int], tp_dim: int, bias: bool, **more: Any
) -> Iterator[Tensor]:
    """Yield the weight of a projection, and its bias if it has one."""
    yield make(f"{name}.weight", size, tp_dim, **more)
    if bias:
        # The bias of a row-parallel projection is added once, after the sum, so every rank has it.
        yield make(f"{name}.bias", size[:1], *((0,) if tp_dim == 0 else ()), **(more if tp_dim == 0 else {}))


def _projections(hidden: int, width: int) -> tuple[tuple[str, tuple[int, int], int], ...]:
    """Return the (name, shape, sharded dim) of each projection of a gated MLP."""
    return ("gate", (width, hidden), 0), ("up", (width, hidden), 0), ("down", (hidden, width), 1)
