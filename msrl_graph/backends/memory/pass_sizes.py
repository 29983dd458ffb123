"""Sizes of a forward pass of `fsdp` and `hf`, and of what it keeps.

Invariant: the counted tensor storages are those that autograd and transformers' models (Llama, Qwen2 and Qwen3-MoE)
create and keep. Sizes are bytes on the busiest rank, with every column at its maximum length.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from operator import mul

from ...model.layers import ClampedExpertMlp
from .head_sizes import HeadSizes
from .layer_sizes import INTO_ATTENTION, INTO_MLP, MLP_PROJECTIONS, LayerSizes
from .sizes import Sizes


@dataclass(frozen=True)
class PassLayer(LayerSizes):
    """Bytes that a layer of a transformers model keeps for its backward pass."""

    @property
    def mlp_part(self) -> str:
        """The name of the layer's MLP among the parts that can be recomputed."""
        return "mlp" if self.experts is None else "moe"

    @cached_property
    def feed(self) -> int:
        """Bytes that the feed-forward half keeps if nothing is recomputed.

        The half keeps some tensors of the intermediate size. With experts, it also keeps the hidden states that are
        sent to experts, as sent and as returned.
        """
        if self.experts is None:
            return self.kind.mlp.kept * self.wide
        return self._kept_inner * self.inner + self._kept_shared * self.shared + 2 * self.routed + self.routing

    @property
    def _kept_inner(self) -> int:
        """How many tensors of the intermediate size an expert saves for a token.

        The result of SiLU is not saved (experts.py).
        """
        mlp = self.kind.mlp
        return mlp.kept - (not mlp.ungated and not isinstance(mlp, ClampedExpertMlp))

    @property
    def _kept_shared(self) -> int:
        return 2 if self.kind.mlp.ungated else 4

    @cached_property
    def recomputed_feed(self) -> int:
        """The bytes of `feed` that a backward pass recomputes."""
        parts = self.whole.work.recompute.parts
        if self.mlp_part in parts:
            return self.feed - self._unsaved_feed
        if "activation" not in parts:
            return 0
        outputs = 2 - self.kind.mlp.ungated  # of gate and up
        own = (self.kind.mlp.kept - outputs) * self.wide if self.experts is None else 0
        inner = (self._kept_inner - outputs) * self.inner if self.experts else 0
        return own + inner + (self._kept_shared - outputs) * self.shared - self._unsaved_feed

    @property
    def recomputed_norms(self) -> int:
        """The bytes that a recomputed norm of one half does not keep.

        It then keeps its input in the weights' type, not in float32, and no normed input.
        """
        if "norms" not in self.whole.work.recompute.parts:
            return 0
        return self.whole.part * ((1 if self.whole.item == 4 else 2) - (self.whole.work.model.lora is not None))

    @cached_property
    def recomputed_attention(self) -> int:
        """The bytes that recomputed attention does not keep, without norms."""
        if "attention" not in self.whole.work.recompute.parts or not self.kind.has_mixer:
            return 0
        return self._heads + self.attention - self._unsaved_attention

    @cached_property
    def routing(self) -> int:
        """Bytes of the indices that sort tokens by expert, and of router results."""
        sorts = 5 if self.whole.work.layout.ep > 1 else 2
        return 8 * sorts * self.sent + self.whole.split(self.router) * 4 // self.whole.item

    @cached_property
    def products(self) -> int:
        """The peak bytes of a feed-forward half in a pass without gradients.

        With tp, the gathered states exist next to two products.
        """
        s = self.whole
        if self.experts is None:
            return max((3 + self.concatenates) * self.wide, (2 + self.concatenates) * self.wide + s.whole_part)
        sent_twice = 2 * self.routed * (s.work.layout.ep > 1)
        states = max(self.experts.held * self.inner + self.routed, 3 * self.routed)
        return states + sent_twice + self.shared + self.routing

    @cached_property
    def scattered(self) -> int:
        """The bytes while partial sums of a row-parallel product are scattered.

        Of a feed-forward half, they exist next to the product's input, and to the embeddings, the inputs of both
        halves, a normed input and the result; of attention, next to queries, keys, values and its output. Gloo sums a
        copy. The result is 0 without tp.
        """
        s = self.whole
        attention = s.tokens * (2 * self.query + 2 * self.keys)
        if self.recurrent:
            attention = s.tokens * self.query + self.recurrent.inputs
        sums = s.whole_part * (1 + s.work.on_host)
        return sums + max(5 * s.part + max(self.wide, self.shared), 4 * s.part + attention) if sums else 0

    @cached_property
    def saved(self) -> int:
        """All bytes that a layer saves for its backward pass.

        The layer saves:

        - the input, the normed input and the scaled input of its halves (attention and feed-forward),
        - with norms after the halves too, the output and the normed output of the halves,
        - the tensors that attention keeps,
        - the input and the result of the norms of query and key heads,
        - the tensors that the feed-forward half keeps.

        In bf16, norms keep their input in float32 instead of bf16.
        """
        s = self.whole
        norms = self.inputs
        if self.kind.norms.before and self.kind.norms.after:
            norms += 4 * s.part if s.item == 4 else 6 * s.part
        unsaved = self._unsaved_norms + self._unsaved_attention + self._unsaved_feed
        return norms + self._heads + self.attention + self.feed - unsaved

    @cached_property
    def kept(self) -> int:
        """The bytes that a layer keeps if parts of it are recomputed."""
        s = self.whole
        parts = s.work.recompute.parts
        norms = self.kind.norms.number * self.recomputed_norms
        if norms and "attention" not in parts:
            norms += self._heads - s.tokens * (self.query + self.keys) * self.mixer.head_norms
        inputs = 0
        if s.work.model.lora is not None:  # a part keeps its input, whether its projections need it or not
            adapted = s.work.model.adapted
            inputs += "attention" in parts and not adapted & INTO_ATTENTION
            inputs += self.mlp_part in parts and not adapted & INTO_MLP
        return self.saved - norms - self.recomputed_attention - self.recomputed_feed + inputs * s.part

    @property
    def _heads(self) -> int:
        """Bytes of the input and the result of the norms of query and key heads."""
        copies = (2 if self.whole.item == 4 else 3) - (self.whole.work.model.lora is not None)
        return self.whole.tokens * (self.query + self.keys) * copies * self.mixer.head_norms

    # The bytes that a layer does not save if an adapter is trained. A norm does not keep its normed input, and a
    # projection without an adapter does not keep its input. The inputs of B are saved in addition.

    @property
    def _unsaved_norms(self) -> int:
        model = self.whole.work.model
        if model.lora is None:
            return 0
        halves = 2 + (not model.adapted & INTO_ATTENTION) + (not model.adapted & INTO_MLP)
        return halves * self.whole.part

    @property
    def _unsaved_attention(self) -> int:
        model = self.whole.work.model
        if model.lora is None:
            return 0
        size = self.whole.tokens * self.query * ("o_proj" not in model.adapted)
        return size - self._count_inner_bytes(len(model.adapted - MLP_PROJECTIONS))

    @property
    def _unsaved_feed(self) -> int:
        model = self.whole.work.model
        if model.lora is None:
            return 0
        size = self.wide * ("down_proj" not in model.adapted)
        return size - self._count_inner_bytes(len(model.adapted & MLP_PROJECTIONS))

    def _count_inner_bytes(self, projections: int) -> int:
        """Return the bytes of the products of A, of a number of projections."""
        s = self.whole
        rank: int = 0 if s.work.model.lora is None else s.work.model.lora.rank
        size: int = s.tokens * rank * s.item * projections
        return size


@dataclass(frozen=True)
class PassSizes(Sizes):
    """Sizes of a forward pass, and of each kind of the model's layers."""

    @cached_property
    def kinds(self) -> tuple[PassLayer, ...]:
        return tuple(PassLayer(self, kind) for kind in self.work.model.layer_kinds)

    @cached_property
    def head(self) -> HeadSizes:
        work = self.work
        ids = 1 if work.model.scores else self.split(work.model.vocabulary)
        capped = "logits_cap" in work.model.features
        return HeadSizes(self.scored, ids, work.model.hidden, self.item, capped, work.entropy)

    @cached_property
    def common(self) -> int:
        """Bytes that all layers share: rotary angles, and masks of windows.

        The mask of a window has the scores of two windows of keys for each query (kernels/torch_native.py).
        """
        windows = {kind.mixer.window for kind in self.kinds if kind.is_banded}
        return self.angles + sum(2 * window**2 * self.item for window in windows)

    def sum_kept(self, first: int, stop: int) -> int:
        """Return the bytes that the layers [first, stop) keep for a backward pass."""
        whole = self.whole_layers
        after = min(stop, max(first, whole.stop))
        counts = self.work.model.count_kinds((after, stop))
        parts: int = sum(map(mul, counts, (kind.kept for kind in self.kinds)))
        return (after - first) * self.part + parts

    @cached_property
    def whole_layers(self) -> range:
        """The layers that a backward pass recomputes as a whole."""
        model = self.work.model
        return self.work.recompute.find_whole_layers(model.first_trained, model.layers)

    def sum_gradients(self, first: int) -> int:
        """Return the bytes of the gradients of the layers from `first` on.

        The gradients have the weights' type.
        """
        return sum(map(mul, self.work.model.count_kinds((first, self.work.model.layers)), self.gradients_by_kind))
