"""Kernels of torch itself, for any device that supports them.

Invariant: these kernels do no more work than transformers' own operators. Predictions of memory and time (memory/, the
engines' `calls`) count the operators of these kernels.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from . import Kernels, ScoreRule, chunked_attention

if TYPE_CHECKING:
    import torch


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rule: ScoreRule,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    import torch

    if rule.cap or sinks is not None:  # torch's fused kernels have neither
        return chunked_attention.attention(q, k, v, rule, sinks)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=rule.scaling,
            enable_gqa=k.shape[1] != q.shape[1],
        )

    width = q.shape[2]
    window = rule.window
    if window is None or width <= window:
        return attend(q, k, v)
    # Each block of `window` queries sees keys of its own block and of the block before, so that work and mask do not
    # grow with the square of the width. The first block has no block before.
    mask = _make_mask(window, q.dtype, q.device)
    parts = [attend(q[:, :, :window], k[:, :, :window], v[:, :, :window])]
    for start in range(window, width, window):
        stop = min(start + window, width)
        seen = slice(start - window, stop)
        block = mask[: stop - start, : stop - start + window]
        parts.append(attend(q[:, :, start:stop], k[:, :, seen], v[:, :, seen], block))
    return torch.cat(parts, 2)


@lru_cache(maxsize=2)
def _make_mask(window: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return what is added to the scores of a block's queries, [window, 2 window].

    The keys are those of the block and of the block before. All layers share the result.
    """
    import torch

    mask = torch.full((window, 2 * window), -torch.inf, dtype=dtype, device=device)
    return mask.triu(1 + window) + mask.tril()


def grouped(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    from torch.nn.functional import grouped_mm

    return grouped_mm(rows, weights, offs=ends)


KERNELS = Kernels(attention, grouped)
