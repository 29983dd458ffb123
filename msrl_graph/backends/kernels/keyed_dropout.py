"""Dropout of the inputs of LoRA adapters.

Each projection has masks of its own, as in the library PEFT: in an update, A multiplies inputs of which a share is set
to 0, and the others are divided by 1 - share.

Invariant: whether an element of an input is set to 0 depends only on the seed, the projection, the element's index
among the projection's inputs, and the key of the token (`Tree.keys`). The key depends on the optimizer step and on the
tokens of the row up to this one. So no mask depends on the layout, the micro-batch or the rank. A prompt has the same
masks for all its responses, and two rows with the same tokens have the same masks.

Masks are not stored: a backward pass computes them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from ...noise import RandomStream

if TYPE_CHECKING:
    import torch

    from ...model.lora_settings import Lora

ELEMENTS = 1 << 22  # of a mask that exist at once


@dataclass
class TokenKeys:
    """The keys (int32) of the tokens that an engine's layers compute.

    They are None in a pass without dropout.
    """

    keys: torch.Tensor | None = None


class InputDropout:
    """The dropout of the inputs of one projection's adapter.

    - `name`: the name of the projection's weight.
    - `inputs`: the range of the projection's inputs that this rank has.
    - `features`: the keys (int32) of these inputs.
    - `tokens`: the keys of all tokens. `select` returns those of the tokens that this rank's part of the layer has.
    """

    def __init__(
        self,
        lora: Lora,
        name: str,
        inputs: tuple[int, int],
        tokens: TokenKeys,
        select: Callable[[torch.Tensor], torch.Tensor] = lambda keys: keys,
    ) -> None:
        import numpy as np
        import torch

        keys = RandomStream(lora.seed, "dropout", name).keys(np.arange(*inputs))
        self.features = torch.from_numpy((keys >> np.uint64(32)).astype(np.uint32).view(np.int32))
        self._share = lora.dropout
        self._tokens = tokens
        self._select = select

    def multiply(self, x: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        """Return the product of A, `down`, and the inputs `x`.

        If the pass has dropout, it is applied to the inputs.
        """
        import torch

        if self._tokens.keys is None:
            return torch.nn.functional.linear(x, down)
        self.features = self.features.to(x.device)
        keys = self._select(self._tokens.keys)
        product: torch.Tensor = _make_product()(x, down, keys, self.features, self._share)
        return product


def is_dropped(tokens: torch.Tensor, features: torch.Tensor, share: float) -> torch.Tensor:
    """Return which elements [tokens, features] are set to 0, by the keys of both.

    The bits of the combined keys are mixed by the function `lowbias32` of C. Wellons' hash-prospector, without its last
    shift, which changes low bits alone.
    """
    bits = tokens[:, None] ^ features
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        bits ^= (bits >> shift).bitwise_and_((1 << (32 - shift)) - 1)
        bits *= factor
    return bits < round(share * 2**32) - 2**31


@cache
def _make_product() -> Any:
    import torch

    def iterate_parts(x: torch.Tensor, tokens: torch.Tensor, features: torch.Tensor, share: float) -> Iterator[Any]:
        """Yield ranges of tokens, with their inputs and their masks."""
        step = max(1, ELEMENTS // max(1, x.shape[1]))
        for start in range(0, len(x), step):
            part = slice(start, start + step)
            yield part, x[part], is_dropped(tokens[part], features, share)

    class DroppedProduct(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, x: torch.Tensor, down: torch.Tensor, tokens: torch.Tensor, features: torch.Tensor, share: float
        ) -> torch.Tensor:
            ctx.save_for_backward(x, down, tokens, features)
            ctx.share = share
            flat = x.flatten(0, -2)
            product = flat.new_empty(len(flat), len(down))
            for part, inputs, dropped in iterate_parts(flat, tokens, features, share):
                torch.mm(inputs.masked_fill(dropped, 0), down.t(), out=product[part])
            return product.div_(1 - share).view(*x.shape[:-1], len(down))

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            x, down, tokens, features = ctx.saved_tensors
            flat = x.flatten(0, -2)
            gradient = gradient.flatten(0, -2) / (1 - ctx.share)
            of_x = torch.empty_like(flat) if ctx.needs_input_grad[0] else None
            of_down = torch.zeros_like(down)
            for part, inputs, dropped in iterate_parts(flat, tokens, features, ctx.share):
                of_down.addmm_(gradient[part].t(), inputs.masked_fill(dropped, 0))
                if of_x is not None:
                    torch.mm(gradient[part], down, out=of_x[part]).masked_fill_(dropped, 0)
            return None if of_x is None else of_x.view(x.shape), of_down, None, None, None

    return DroppedProduct.apply
