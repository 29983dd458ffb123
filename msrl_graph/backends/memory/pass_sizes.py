"""Sizes of a forward pass of `fsdp` and `hf`, and of what it keeps.

Invariant: the counted tensor storages are those that autograd and transformers' models (Llama, Qwen2 and Qwen3-MoE)
create and keep. Sizes are bytes on the busiest rank, with every column at its maximum length.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from operator import mul

from .head_sizes import HeadSizes
from .layer_sizes import INTO_ATTENTION, INTO_MLP, LayerSizes
from .sizes import Sizes


@dataclass(frozen=True)
class PassLayer(LayerSizes):
    """Bytes that a layer of a transformers model keeps for its backward pass."""

    @cached_property
    def feed(self) -> int:
        """Bytes that the feed-forward half keeps for its backward pass.

        The half keeps some tensors of the intermediate size. With experts, it also keeps the hidden states that are
        sent to experts: as sent, as returned, and as scaled by the router.
        """
        if self.experts is None:
            return self.kind.mlp.kept * self.wide
        return self.experts.kept * (self.inner + self.shared) + 3 * self.routed + self.routing

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
        heads = s.tokens * (self.query + self.keys) * (2 if s.item == 4 else 3) * self.mixer.head_norms
        return norms + heads + self.attention + self.feed - self.unsaved

    @cached_property
    def unsaved(self) -> int:
        """The bytes that a layer does not save if an adapter is trained.

        A norm does not keep its normed input, and a projection without an adapter does not keep its input. The inputs
        of B are saved in addition.
        """
        s = self.whole
        model = s.work.model
        if model.lora is None:
            return 0
        adapted = model.adapted
        halves = 2 + (not adapted & INTO_ATTENTION) + (not adapted & INTO_MLP)
        size = halves * s.part + s.tokens * (self.query + self.keys) * self.mixer.head_norms
        size += s.tokens * self.query * ("o_proj" not in adapted) + self.wide * ("down_proj" not in adapted)
        return size - s.tokens * model.lora.rank * s.item * len(adapted)


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
        if self.work.recompute:
            return (stop - first) * self.part
        return sum(map(mul, self.work.model.count_kinds((first, stop)), (kind.saved for kind in self.kinds)))

    def sum_gradients(self, first: int) -> int:
        """Return the bytes of the gradients of the layers from `first` on.

        The gradients have the weights' type.
        """
        return sum(map(mul, self.work.model.count_kinds((first, self.work.model.layers)), self.gradients_by_kind))
