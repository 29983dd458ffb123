"""Sizes of the tensors on a rank of a pipeline stage, by Megatron-Core's modules.

Invariant: sizes are bytes on the busiest rank of the stage, as in backends/memory/sizes.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from ...ir.workload import in_flight
from ...model.layers import MultiHeadLatentAttention
from ...sharding.layout import Side, TensorKind, box_at, elements, stage_parts
from ..memory.head_sizes import HeadSizes
from ..memory.layer_sizes import INTO_ATTENTION, INTO_MLP, MLP_PROJECTIONS, LayerSizes
from ..memory.sizes import Sizes

# Projections of attention that tensor parallelism shards by columns.
BY_COLUMNS = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj")
# A rank's part of the vocabulary is padded to a multiple of this (make_vocab_size_divisible_by).
PADDED = 128


@dataclass(frozen=True)
class StageSizes(Sizes):
    """Sizes of the tensors on a rank of one pipeline stage.

    Sequence parallelism shards tokens (`part`).
    """

    stage: int = 0
    other: StageSizes | None = None  # another stage, whose sizes of layers are the same

    @cached_property
    def side(self) -> Side:
        return Side(self.work.layout, multiple=PADDED)

    def parts(self, tensor_kinds: tuple[TensorKind, ...]) -> tuple[int, int]:
        return stage_parts(tensor_kinds, self.side)[self.stage]

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last_stage(self) -> bool:
        return self.stage == self.work.layout.pp - 1

    @cached_property
    def kinds(self) -> tuple[StageLayer, ...]:
        """The sizes of each kind of the model's layers, on any stage."""
        if self.other is not None:
            return self.other.kinds
        return tuple(StageLayer(self, kind) for kind in self.work.model.layer_kinds)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """The number of the stage's layers of each kind."""
        return self.work.model.count_kinds(*self.work.layout.stage_layers(self.stage, self.work.model.layers))

    @cached_property
    def trained_stretches(self) -> tuple[tuple[int, int], ...]:
        """The ranges of the stage's layers that a backward pass reaches.

        If layers are recomputed as a whole, it reaches all layers of a chunk, also those below the first trained one.
        """
        first = self.work.model.first_trained
        stretches = self.work.layout.stage_layers(self.stage, self.work.model.layers)
        return tuple(
            (start if self.work.recompute.layers and first < stop else max(start, first), max(stop, first))
            for start, stop in stretches
        )

    @cached_property
    def whole_layers(self) -> frozenset[int]:
        """The stage's layers that a backward pass recomputes as a whole."""
        recompute = self.work.recompute
        first = self.work.model.first_trained
        stretches = self.work.layout.stage_layers(self.stage, self.work.model.layers)
        return frozenset(
            layer
            for start, stop in stretches
            for layer in range(start, start + recompute.count_of_chunk(start, stop, first))
        )

    @cached_property
    def trained_layers(self) -> tuple[int, ...]:
        """The number of the stage's layers of each kind that a backward pass reaches."""
        return self.work.model.count_kinds(*self.trained_stretches)

    @cached_property
    def gradients(self) -> int:
        return self.gradient * self.elements

    @cached_property
    def buffer(self) -> int:
        """Bytes of Megatron's gather buffer.

        Linear layers with trained weights share it. A pass has one, unless an adapter is trained. The backward pass has
        a second one while the gradient of a row-parallel product is gathered.
        """
        return 0 if self.is_adapted else self.whole_part

    @cached_property
    def norm(self) -> int:
        """Bytes of the tensors that a torch.nn.RMSNorm keeps for the backward pass.

        The tensors are the norm's input, the normed input and the scaled result. In bf16 the norm keeps a float32 copy
        of its input, and the normed input in float32.
        """
        return (3 if self.item == 4 else 5) * self.part

    @cached_property
    def kept(self) -> int:
        """Bytes that layers save on the device; 0 if activations are offloaded.

        The bytes are for one micro-batch. Without offload, the result equals `stored`.
        """
        return 0 if self.work.activations_away else self.stored

    @cached_property
    def stored(self) -> int:
        """Bytes that the stage's layers save for the backward pass of one micro-batch.

        A layer that is recomputed as a whole saves only its input.
        """
        return self.sum_kept(layer for stretch in self.trained_stretches for layer in range(*stretch))

    def sum_kept(self, layers: Iterable[int]) -> int:
        """Return the bytes that layers of the model save for the backward pass."""
        kinds = self.work.model.kind_of_layer
        return sum(self.part if layer in self.whole_layers else self.kinds[kinds[layer]].kept for layer in layers)

    @cached_property
    def in_flight_batches(self) -> float:
        """The number of micro-batches whose activations the stage holds at the same time.

        A micro-batch counts as a fraction if only some of the stage's chunks hold its activations.
        """
        return in_flight(self.work, self.stage)

    @cached_property
    def schedule_state(self) -> int:
        """Bytes that micro-batches in flight hold in addition to saved activations.

        The bytes are for the rotary angles, the gather buffer (`buffer`), and the output of each chunk except the
        model's last chunk. The schedule holds an output until the output's gradient arrives. The autograd graph of a
        recomputed layer holds the angles as long as the loss exists.
        """
        vpp = self.work.layout.vpp
        outputs = ceil(self.in_flight_batches * vpp) - self.last_stage
        angles = ceil(self.in_flight_batches) + (self.work.recompute.layers > 0 and self.work.batches > 1)
        return angles * self.angles + outputs * self.part * (self.work.layout.pp > 1) + self.buffer

    @cached_property
    def states(self) -> int:
        """Bytes of the requested states, and of the tensors that the last norm keeps.

        The requested states are the hidden states for which logits are computed. The result of the last norm is not
        included.
        """
        return self.norm - self.part - self.normed * self.is_adapted + self.requested_states

    @property
    def is_adapted(self) -> bool:
        """Whether only an adapter is trained."""
        return self.work.model.lora is not None

    @property
    def normed(self) -> int:
        """Bytes of a norm's normed input.

        A norm keeps it if the norm's weight is trained.
        """
        return self.norm // 5 * 2 if self.item == 2 else self.part

    @cached_property
    def requested_states(self) -> int:
        return self.scored * self.work.model.hidden * self.item

    @cached_property
    def head_sizes(self) -> HeadSizes:
        work = self.work
        ids = 1 if work.model.scores else self.head // work.model.hidden
        return HeadSizes(self.scored, ids, work.model.hidden, self.item, with_entropy=work.entropy)

    @cached_property
    def head(self) -> int:
        """The number of elements of the head on this rank; the embedding is as large."""
        kind = next(candidate for candidate in self.work.model.kinds if candidate.tensor.padded)
        return elements(box_at(kind.tensor, self.side, (0, 0, 0)))


@dataclass(frozen=True)
class StageLayer(LayerSizes):
    """Sizes of the tensors of a layer of one kind, on a rank of one pipeline stage."""

    whole: StageSizes

    @cached_property
    def qkv(self) -> int:
        """Bytes of queries, keys and values together, which one matrix product computes."""
        return self.whole.tokens * (self.query + 2 * self.keys)

    @cached_property
    def heads(self) -> int:
        """Bytes of the tensors that the norms of query heads and of key heads keep.

        The tensors are the norms' inputs and the normed values. In float32 the inputs are views of the queries, keys
        and values (`qkv`), so all of `qkv` is kept. In bf16 the inputs are float32 copies.
        """
        pair = self.whole.tokens * (self.query + self.keys)
        return (self.qkv + pair if self.whole.item == 4 else 4 * pair) * self.mixer.head_norms

    @cached_property
    def latents(self) -> int:
        """Bytes of latent attention's latents, and of tensors that norms of latents keep."""
        if not isinstance(latent := self.mixer, MultiHeadLatentAttention):
            return 0
        return self.whole.tokens * (3 * (latent.q_rank + latent.kv_rank) + latent.rope) * self.whole.item

    @cached_property
    def feed(self) -> int:
        """Bytes of the tensors that a layer's feed-forward half keeps.

        - A dense half keeps the concatenation of gate and up, silu(gate), up + 0 (Megatron adds an offset), and
          silu(gate) * (up + 0).
        - A half with experts keeps the tensors of a dense half for the tokens that the rank's experts receive. It also
          keeps the product scaled by the router's weight, the tokens sorted by expert, the index of each token, the
          router's weights, the router's map, and the transposes of these weights and of this map.
        """
        if self.experts is None:
            return 5 * self.wide
        item = self.whole.item
        map_of = self.whole.split(self.router) * 2 * (item + 1) // item
        return 6 * self.inner + self.received + 8 * self.sent + map_of + 5 * self.shared

    @cached_property
    def received(self) -> int:
        """Bytes of the hidden states that a rank's experts receive.

        Each etp rank receives the hidden states that are sent to any of the etp ranks.
        """
        return self.routed * self.whole.work.layout.etp

    @cached_property
    def saved(self) -> int:
        """All bytes that a layer saves if nothing is recomputed."""
        s = self.whole
        inputs = 0
        if s.work.model.lora is not None:  # a linear layer without an adapter keeps no input, but a router does
            adapted = {*s.work.model.lora.targets}
            inputs = (not adapted & INTO_ATTENTION) + (not adapted & INTO_MLP and self.experts is None)
        return 2 * (s.norm - s.normed * s.is_adapted) - inputs * s.part + self._saved_attention + self._saved_feed

    @cached_property
    def kept(self) -> int:
        """The bytes that a layer keeps if parts of it are recomputed."""
        s = self.whole
        parts = s.work.recompute.parts
        inputs = 0
        if s.work.model.lora is not None:  # a part keeps its input
            adapted = {*s.work.model.lora.targets}
            inputs += "attention" in parts and not adapted & INTO_ATTENTION
            inputs += "mlp" in parts and self.experts is None and not adapted & INTO_MLP
        heads = 0
        if "norms" in parts and "attention" not in parts and self.mixer.head_norms:
            heads = self.heads - self.qkv
        again = 2 * self.recomputed_norms + self.recomputed_attention + self.recomputed_feed
        return self.saved - again - heads + inputs * s.part

    @property
    def recomputed_norms(self) -> int:
        """The bytes that a recomputed norm of one half does not keep."""
        s = self.whole
        return s.norm - s.normed * s.is_adapted - 2 * s.part if "norms" in s.work.recompute.parts else 0

    @property
    def recomputed_attention(self) -> int:
        return self._saved_attention if "attention" in self.whole.work.recompute.parts else 0

    @property
    def recomputed_feed(self) -> int:
        name = "mlp" if self.experts is None else "moe"
        return self._saved_feed if name in self.whole.work.recompute.parts else 0

    # With a trained adapter, a norm does not keep its normed input, and a linear layer without an adapter does not keep
    # its input. The inputs of B are saved in addition.

    @cached_property
    def _saved_attention(self) -> int:
        s = self.whole
        size = self.attention + self.heads + self.latents
        if (lora := s.work.model.lora) is None:
            return size
        adapted = {*lora.targets}
        size -= s.tokens * (self.query + self.keys) * self.mixer.head_norms * (1 if s.item == 4 else 2)
        size -= s.tokens * self.query * ("o_proj" not in adapted)
        if isinstance(latent := self.mixer, MultiHeadLatentAttention):
            kept = {latent.q_rank: "q_b_proj", latent.kv_rank: "kv_b_proj"}
            size -= sum(s.tokens * rank * (1 + (name not in adapted)) * s.item for rank, name in kept.items())
        return size + self.count_inner_tokens(adapted - MLP_PROJECTIONS) * lora.rank * s.item

    @cached_property
    def _saved_feed(self) -> int:
        s = self.whole
        if (lora := s.work.model.lora) is None:
            return self.feed
        adapted = {*lora.targets}
        size = self.feed - (self.wide + self.inner + self.shared) * ("down_proj" not in adapted)
        size -= self.received * (not adapted & INTO_MLP)
        return size + self.count_inner_tokens(adapted & MLP_PROJECTIONS) * lora.rank * s.item

    def count_inner_tokens(self, adapted: set[str]) -> int:
        """Return the number of tokens whose products of A a layer keeps.

        `adapted` are the projections that have an adapter. A token counts once for each of them. With tensor
        parallelism, a linear layer that is sharded by rows has a part of the tokens.
        """
        s = self.whole
        own = s.split(s.tokens)
        of_attention = sum(s.tokens if name.endswith(BY_COLUMNS) else own for name in adapted - MLP_PROJECTIONS)
        of_mlp = {name: own if name == "down_proj" else s.tokens for name in adapted & MLP_PROJECTIONS}
        if self.experts is None:
            return of_attention + sum(of_mlp.values())
        shared = sum(of_mlp.values()) * (self.experts.shared > 0)
        return of_attention + shared + self.sent * s.work.layout.etp * len(of_mlp)
