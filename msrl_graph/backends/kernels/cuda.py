"""Kernels for CUDA devices: those of torch, also for rows without padding.

Invariant: packed attention is used only where FlashAttention has a kernel: in 16 bits, for heads of a size that it
supports, on devices since Ampere, with a torch whose `varlen_attn` has windows and shared key-value heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any

from . import ScoreRule, torch_native

if TYPE_CHECKING:
    import torch

    from ..prefix_tree import PackedRows

LARGEST_HEAD = 256
ALIGNMENT = 8  # elements: sizes of heads are multiples of it
AMPERE = (8, 0)
VARLEN = "attention.varlen"  # a module whose function has other options in each version of torch
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
        or (varlen_attn := _find_varlen_attention(query.device)) is None
    ):
        return None
    # Keys before a query that it sees, or -1 for all, and keys after it.
    window = (-1 if rule.window is None else rule.window - 1, 0)

    def compute(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = varlen_attn(
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
        return output

    return compute


@cache
def _find_varlen_attention(device: torch.device) -> Any:
    """Return torch's `varlen_attn` if it has our options and a kernel for the device."""
    try:
        found = import_module(f"torch.nn.{VARLEN}").varlen_attn
    except ImportError:
        return None
    has_kernel = import_module(f"torch.{device.type}").get_device_capability(device) >= AMPERE
    return found if has_kernel and {*signature(found).parameters} >= OPTIONS else None


KERNELS = replace(torch_native.KERNELS, packed_attention=packed_attention)
