"""Kernels for Ascend: the fused operators of torch_npu.

The kernels have never run on an NPU, because no NPU was available. One test checks names and arguments against the
schemas that torch_npu registers (tests/project/test_contracts.py). Another test checks values: it replaces the
operators by functions that are written from torch_npu's documentation, and compares the results with the plain formulas
(tests/backends/kernels/test_kernels.py).

Invariant: no operator gets an input that its documentation excludes. This file adds a gradient to each operator that
has none. The gradient is computed by the same operator or by a matrix product.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from . import Kernels, ScoreRule, chunked_attention

if TYPE_CHECKING:
    import torch

    from ..prefix_tree import PackedRows

MASK = 2048  # width of a compressed mask, which the operator applies to any length
CAUSAL, BAND = 3, 4  # sparse_mode; the other modes are not used here
BY_ROWS, BY_INNER = 0, 2  # group_type: the dimension of a product that groups divide
ONE_TENSOR = 2  # split_item: one output tensor instead of one for each group
ENDS = 0  # group_list_type: ends of groups, not counts
PACKED_ROWS = 2048  # rows that the fused attention supports without padding


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rule: ScoreRule,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    import torch_npu

    if rule.cap or sinks is not None:  # the fused operator has neither
        return chunked_attention.attention(q, k, v, rule, sinks)

    _, heads, width, _ = q.shape
    mask_options: Any = {"sparse_mode": CAUSAL}
    if rule.window is not None and width > rule.window:
        mask_options = {"sparse_mode": BAND, "pre_tockens": rule.window - 1, "next_tockens": 0}
    # Tensors are stored by node, then by head, so these are not copies.
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    mask = _build_causal_mask(q.device)
    out = torch_npu.npu_fusion_attention(q, k, v, heads, "BSND", scale=rule.scaling, atten_mask=mask, **mask_options)
    output: torch.Tensor = out[0].transpose(1, 2)
    return output


def packed_attention(
    query: torch.Tensor, rows: PackedRows, rule: ScoreRule, sinks: torch.Tensor | None = None
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """Return the fused operator for rows without padding.

    The result is None for rows for which the operator is not documented.
    """
    import torch_npu

    # Its documentation does not say that bands of rows of different lengths are right.
    has_band = rule.window is not None and rows.longest > rule.window
    if rule.cap or sinks is not None or has_band or len(rows.ends) > PACKED_ROWS:
        return None

    def compute(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ends = [*rows.ends]
        out: torch.Tensor = torch_npu.npu_fusion_attention(
            q,
            k,
            v,
            q.shape[1],
            "TND",
            scale=rule.scaling,
            atten_mask=_build_causal_mask(q.device),
            actual_seq_qlen=ends,
            actual_seq_kvlen=ends,
            sparse_mode=CAUSAL,
        )[0]
        return out

    return compute


@cache
def _build_causal_mask(device: torch.device) -> torch.Tensor:
    """Return a square mask that is True where the key comes after the query."""
    import torch

    return torch.ones(MASK, MASK, dtype=torch.bool, device=device).triu(1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    import torch_npu

    output: torch.Tensor = torch_npu.npu_rms_norm(x, weight, epsilon=epsilon)[0]
    return output


def swiglu(joined: torch.Tensor) -> torch.Tensor:
    import torch_npu

    output: torch.Tensor = torch_npu.npu_swiglu(joined, dim=-1)
    return output


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    import torch_npu

    output: torch.Tensor = torch_npu.npu_rotary_mul(x, cos, sin, rotary_mode="half")
    return output


def grouped(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    import torch

    output: torch.Tensor = _grouped()(rows, weights, ends.to(torch.int64))
    return output


def _multiply_by_rows(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    import torch_npu

    if not len(rows):  # the operator is not documented for zero rows, and a rank's experts may get zero rows
        return rows.new_empty(0, weights.shape[2])
    output: torch.Tensor = torch_npu.npu_grouped_matmul(
        [rows], [weights], group_list=ends, split_item=ONE_TENSOR, group_type=BY_ROWS, group_list_type=ENDS
    )[0]
    return output


@cache
def _grouped() -> Any:
    import torch

    class GroupedRows(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(rows, weights, ends)
            return _multiply_by_rows(rows.contiguous(), weights, ends)

        @staticmethod
        def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
            rows, weights, ends = ctx.saved_tensors
            slope = slopes[0].contiguous()
            return (
                _multiply_by_rows(slope, weights.transpose(1, 2), ends),
                _compute_weight_gradient(rows, slope, weights, ends),
                None,
            )

    return GroupedRows.apply


def _compute_weight_gradient(
    rows: torch.Tensor, slope: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    import torch
    import torch_npu

    if not len(rows):
        return torch.zeros_like(weights)
    gradient: torch.Tensor = torch_npu.npu_grouped_matmul(
        [rows.contiguous().T],  # a view: the operator detects the transposition
        [slope],
        group_list=ends,
        split_item=ONE_TENSOR,
        group_type=BY_INNER,
        group_list_type=ENDS,
    )[0]
    # The result for an empty group is not documented; unwritten memory would enter a gradient unnoticed.
    empty_groups = ends == torch.nn.functional.pad(ends[:-1], (1, 0))
    return gradient.masked_fill_(empty_groups[:, None, None], 0)


KERNELS = Kernels(attention, grouped, packed_attention, rms_norm, swiglu, rotary)
