"""torch_npu's fused operators, for Ascend.

Never run on an NPU: none was at hand. Names and arguments are held to the schemas that torch_npu registers
(tests/test_contracts.py), and the values to the plain formulas by operators that were written from its documentation
(tests/test_kernels.py).

Invariant: what an operator is documented not to take is not given to it. Those without a gradient of their own get it
here, from the same operator or from a matrix product.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from . import Kernels

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch_npu._C._distributed_c10d import ProcessGroupHCCL

MASK = 2048  # what a compressed mask is wide: of any length, one of this size tells what is masked
CAUSAL, BAND = 3, 4  # by which mask; the other numbers are not used here
BY_ROWS, BY_INNER = 0, 2  # which dimension of a product the groups divide
ONE_TENSOR = 2  # comes out, and not one for each group
ENDS = 0  # is what a list of groups says, and not counts
CARDS = (1, 2, 4, 8)  # joined to each other, as a fused sum wants them


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, window: int | None) -> torch.Tensor:
    import torch_npu

    _, heads, width, _ = q.shape
    seen: Any = {"sparse_mode": CAUSAL}
    if window is not None and width > window:
        seen = {"sparse_mode": BAND, "pre_tockens": window - 1, "next_tockens": 0}
    # Rows are laid by node and then by head, so that these are no copies.
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    mask = _later(q.device)
    out = torch_npu.npu_fusion_attention(q, k, v, heads, "BSND", scale=scaling, atten_mask=mask, **seen)
    found: torch.Tensor = out[0].transpose(1, 2)
    return found


@cache
def _later(device: torch.device) -> torch.Tensor:
    """Where a key comes after a query: True is masked."""
    import torch

    return torch.ones(MASK, MASK, dtype=torch.bool, device=device).triu(1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    import torch_npu

    found: torch.Tensor = torch_npu.npu_rms_norm(x, weight, epsilon=epsilon)[0]
    return found


def swiglu(joined: torch.Tensor) -> torch.Tensor:
    import torch_npu

    found: torch.Tensor = torch_npu.npu_swiglu(joined, dim=-1)
    return found


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    import torch_npu

    found: torch.Tensor = torch_npu.npu_rotary_mul(x, cos, sin, rotary_mode="half")
    return found


def grouped(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    import torch

    found: torch.Tensor = _grouped()(rows, weights, ends.to(torch.int64))
    return found


def _by_rows(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    import torch_npu

    if not len(rows):  # of which nothing is documented: an expert's rank may get none
        return rows.new_empty(0, weights.shape[2])
    found: torch.Tensor = torch_npu.npu_grouped_matmul(
        [rows], [weights], group_list=ends, split_item=ONE_TENSOR, group_type=BY_ROWS, group_list_type=ENDS
    )[0]
    return found


@cache
def _grouped() -> Any:
    import torch

    class GroupedRows(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(rows, weights, ends)
            return _by_rows(rows.contiguous(), weights, ends)

        @staticmethod
        def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
            rows, weights, ends = ctx.saved_tensors
            slope = slopes[0].contiguous()
            return _by_rows(slope, weights.transpose(1, 2), ends), _of_weights(rows, slope, weights, ends), None

    return GroupedRows.apply


def _of_weights(rows: torch.Tensor, slope: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    import torch
    import torch_npu

    if not len(rows):
        return torch.zeros_like(weights)
    found: torch.Tensor = torch_npu.npu_grouped_matmul(
        [rows.contiguous().T],  # as a view: that it is turned is what the operator goes by
        [slope],
        group_list=ends,
        split_item=ONE_TENSOR,
        group_type=BY_INNER,
        group_list_type=ENDS,
    )[0]
    # It is not documented what a group without rows gets, and what was never written would go into a gradient unseen.
    none = ends == torch.nn.functional.pad(ends[:-1], (1, 0))
    return found.masked_fill_(none[:, None, None], 0)


def summed(x: torch.Tensor, weight: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    found: torch.Tensor = _summed()(x, weight, group)
    return found


def _product(x: torch.Tensor, weight: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    import torch
    import torch_npu
    from torch import distributed as dist

    if x.dtype not in (torch.bfloat16, torch.float16) or group.size() not in CARDS:
        part = x @ weight.T
        dist.all_reduce(part, group=group)
        return part
    backend: ProcessGroupHCCL = group._get_backend(x.device)
    name = backend.get_hccl_comm_name(dist.get_rank())  # by a rank's number among all
    found: torch.Tensor = torch_npu.npu_mm_all_reduce_base(x.contiguous(), weight.T, name, reduce_op="sum")
    return found


@cache
def _summed() -> Any:
    import torch

    class RowParallel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            return _product(x, weight, group)

        @staticmethod
        def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
            x, weight = ctx.saved_tensors
            slope = slopes[0]
            return slope @ weight, slope.flatten(0, -2).T @ x.flatten(0, -2), None

    return RowParallel.apply


KERNELS = Kernels(attention, grouped, rms_norm, swiglu, rotary, summed)
