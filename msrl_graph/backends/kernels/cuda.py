"""Kernels for CUDA devices: those of torch, also for rows without padding.

Invariant: packed attention is used only where FlashAttention has a kernel: in 16 bits, for heads of a size that it
supports, on devices since Ampere, with a torch whose `varlen_attn` has windows and shared key-value heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any

from . import ScoreRule, torch_native

if TYPE_CHECKING:
    import torch

    from ..prefix_tree import PackedRows

LARGEST_HEAD = 256
ALIGNMENT = 8  # elements: sizes of heads are multiples of it
AMPERE = (8, 0)
OPTIONS = {"scale", "window_size", "enable_gqa"}


def packed_attention(
    query: torch.Tensor, rows: PackedRows, rule: ScoreRule, sinks: torch.Tensor | None = None
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None:
    import torch

    size = query.shape[-1]
    if (
        rule.cap
        or sinks is not None
        or query.dtype not in (torch.bfloat16, torch.float16)
        or size > LARGEST_HEAD
        or size % ALIGNMENT
        or not _has_flash_attention(query.device)
    ):
        return None
    from torch.nn.attention.varlen import varlen_attn

    # Keys before a query that it sees, or -1 for all, and keys after it.
    window = (-1 if rule.window is None else rule.window - 1, 0)

    def compute(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: Any = varlen_attn(
            q,
            k,
            v,
            rows.begins,
            rows.begins,
            rows.longest,
            rows.longest,
            scale=rule.scaling,
            window_size=window,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        output: torch.Tensor = out
        return output

    return compute


@cache
def _has_flash_attention(device: torch.device) -> bool:
    import torch

    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return torch.cuda.get_device_capability(device) >= AMPERE and {*signature(varlen_attn).parameters} >= OPTIONS


KERNELS = replace(torch_native.KERNELS, packed_attention=packed_attention)
