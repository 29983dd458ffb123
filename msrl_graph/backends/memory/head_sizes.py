"""The bytes of tensors that a policy's head needs (policy_head.py)."""

from __future__ import annotations

from dataclasses import dataclass

from .sizes import count_ids_at_once, count_slice_rows


@dataclass(frozen=True)
class HeadSizes:
    """The tensors of a head on one rank.

    - `tokens`: the number of tokens that outputs are computed for.
    - `ids`: the number of ids of the rank's part of the vocabulary; 1 for a scoring model.
    - `hidden`: the model's hidden size.
    - `item`: the bytes of an element of the weights.
    - `capped`: whether logits are capped.
    - `with_entropy`: whether the loss uses the entropy.
    """

    tokens: int
    ids: int
    hidden: int
    item: int
    capped: bool = False
    with_entropy: bool = False

    @property
    def ids_at_once(self) -> int:
        return min(self.ids, count_ids_at_once(self.tokens, self.item))

    @property
    def part(self) -> int:
        """The float32 logits that exist at once."""
        return 4 * self.tokens * self.ids_at_once

    @property
    def inference(self) -> int:
        """A pass without a backward pass.

        Next to logits there are their products in the weights' type, or a slice of them.
        """
        return self._add_copies(1)

    @property
    def forward(self) -> int:
        """The forward pass of an update. It has another slice, for the entropy."""
        return self._add_copies(2)

    @property
    def backward(self) -> int:
        """The backward pass. Logits are overwritten by their gradients."""
        return self._add_copies(self.with_entropy + self.capped)

    @property
    def states_gradients(self) -> int:
        """The gradients of the states in the backward pass.

        Those of a policy are a product and its float32 sum, those of a scoring model one product.
        """
        return self.tokens * self.hidden * (self.item if self.ids == 1 else 4 + self.item)

    def _add_copies(self, slices: int) -> int:
        size = 4 * count_slice_rows(self.tokens, self.ids_at_once) * self.ids_at_once
        return self.part + max(slices * size, self.part // 2 if self.item < 4 else 0)
