"""Kernels of torch itself, for any device that supports them.

Invariant: these kernels do no more work than transformers' own operators. Predictions of memory and time (peaks.py, the
engines' `calls`) count the operators of these kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import Kernels

if TYPE_CHECKING:
    import torch


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, window: int | None) -> torch.Tensor:
    import torch

    width = q.shape[2]
    mask = None
    if window is not None and width > window:
        mask = torch.ones(width, width, dtype=torch.bool, device=q.device).tril().triu(1 - window)
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=k.shape[1] != q.shape[1]
    )


def grouped(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    from torch.nn.functional import grouped_mm

    return grouped_mm(rows, weights, offs=ends)


KERNELS = Kernels(attention, grouped)
