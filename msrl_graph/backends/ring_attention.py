"""Causal attention round a ring: each rank has every n-th place of all rows (context_parallel.py); keys and values pass
by.

Invariant: beside its own a rank holds two blocks of keys and values, the one at hand and the one under way. What blocks
give is joined in float32, in float64 if that is what comes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from . import devices

if TYPE_CHECKING:
    import torch

    from .context_parallel import ContextGroup

SCORES = 1 << 24  # made at once where there is none


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: ContextGroup, scaling: float, window: int | None
) -> torch.Tensor:
    """Takes and gives [rows, heads, width, size], of this rank's places."""
    found: torch.Tensor = _function()(q, k, v, context, scaling, window)
    return found


@cache
def _function() -> Any:
    import torch

    class Ring(torch.autograd.Function):
        @staticmethod
        def forward(
            saved: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Any, scaling: float, window: Any
        ) -> torch.Tensor:
            kind = torch.promote_types(q.dtype, torch.float32)
            out = torch.zeros_like(q, dtype=kind)
            lse = q.new_full(q.shape[:3], -torch.inf, dtype=kind)
            here = torch.stack([k, v])
            for step in range(context.size):
                coming = context.passed_on(here) if step + 1 < context.size else None
                _join(out, lse, q, here, *_seen(q, step, context, window), scaling)
                here = here if coming is None else coming()
            found = out.to(q.dtype)
            saved.save_for_backward(q, k, v, found, lse)
            saved.how = context, scaling, window
            return found

        @staticmethod
        def backward(saved: Any, *slopes: torch.Tensor) -> Any:
            (q, k, v, out, lse), (context, scaling, window) = saved.saved_tensors, saved.how
            here = torch.stack([k, v])
            # Gradients of keys and values go round with them, and one step further, which brings them home.
            dq = torch.zeros_like(q, dtype=lse.dtype)
            sums = torch.zeros_like(here, dtype=lse.dtype)
            for step in range(context.size):
                coming = context.passed_on(here) if step + 1 < context.size else None
                _add(dq, sums, slopes[0], (q, out, lse), here, *_seen(q, step, context, window), scaling)
                here = here if coming is None else coming()
                sums = context.passed_on(sums)()
            return dq.to(q.dtype), *sums.to(k.dtype), None, None, None

    return Ring.apply


def _seen(q: torch.Tensor, step: int, context: ContextGroup, window: int | None) -> tuple[int, torch.Tensor | None]:
    """How a rank's queries see the keys of the one that is `step` before it: from the `first` query on each sees the
    keys up to its own place less `first`, since those of a later rank stand behind it; or those that a mask says."""
    import torch

    source = (context.rank - step) % context.size
    first = int(source > context.rank)
    if window is None:
        return first, None
    at = torch.arange(q.shape[2], device=q.device) * context.size
    back = (at + context.rank)[first:, None] - (at + source)[: len(at) - first]
    return first, (back >= 0) & (back < window)


def _join(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    here: torch.Tensor,
    first: int,
    mask: torch.Tensor | None,
    scaling: float,
) -> None:
    """Adds what a block gives to outputs and log-sum-exps. A rank's own block is the first, in which each query sees
    itself."""
    import torch

    if first == q.shape[2]:
        return
    keys, values = _met(q, here, first)
    part, more = _forward(q[:, :, first:], keys, values, mask, scaling)
    del keys, values
    both = torch.logaddexp(lse[:, :, first:], more)
    part = part.to(out.dtype).mul_((more - both).exp()[..., None])
    out[:, :, first:].mul_((lse[:, :, first:] - both).exp()[..., None]).add_(part)
    lse[:, :, first:] = both


def _add(
    dq: torch.Tensor,
    sums: torch.Tensor,
    slope: torch.Tensor,
    saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    here: torch.Tensor,
    first: int,
    mask: torch.Tensor | None,
    scaling: float,
) -> None:
    """Adds the gradients of a block to those of queries, and of the keys and values that are here."""
    if first == dq.shape[2]:
        return
    keys, values = _met(dq, here, first)
    q, out, lse = (x[:, :, first:] for x in saved)
    some, *pair = _backward(slope[:, :, first:], q, keys, values, out, lse, mask, scaling)
    dq[:, :, first:] += some
    for total, x in zip(sums, pair, strict=True):
        by_head = x.view(len(x), sums.shape[2], -1, *x.shape[2:])
        total[:, :, : keys.shape[2]] += by_head.sum(2, dtype=sums.dtype)


def _met(q: torch.Tensor, here: torch.Tensor, first: int) -> torch.Tensor:
    """Keys and values that queries from `first` on meet, for each of their heads."""
    times = q.shape[1] // here.shape[2]
    cut = here[:, :, :, : here.shape[3] - first]
    return cut.repeat_interleave(times, 2) if times > 1 else cut


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and log-sum-exps of scores; of a query that sees nothing 0 and -inf. Without a mask it is causal."""
    import torch

    if devices.of(q).kind.is_host:  # its kernels give and take the log-sum-exp
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = kernel(q, k, v, 0.0, mask is None, attn_mask=_added(q, mask), scale=scaling)
        return out, lse if mask is None else lse.masked_fill(~mask.any(-1), -torch.inf)
    parts = []
    for _, scores in _scores(q, k, mask, scaling):
        lse = scores.logsumexp(-1)
        parts.append(((scores - lse.nan_to_num(neginf=0.0)[..., None]).exp().to(v.dtype) @ v, lse))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _backward(
    slope: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of queries, keys and values; `out` and `lse` are those of all blocks together."""
    import torch

    if devices.of(q).kind.is_host:  # its kernels give and take the log-sum-exp
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        more = {"attn_mask": _added(q, mask), "scale": scaling}
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = kernel(
            slope, q, k, v, out, lse, 0.0, mask is None, **more
        )
        return found
    dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
    for some, scores in _scores(q, k, mask, scaling):
        share = (scores - lse[:, :, some, None]).exp()
        part = slope[:, :, some]
        delta = (part * out[:, :, some]).sum(-1, keepdim=True, dtype=lse.dtype)
        change = (share * ((part @ v.transpose(2, 3)) - delta) * scaling).to(q.dtype)
        dq[:, :, some] = change @ k
        dk += change.transpose(2, 3) @ q[:, :, some]
        dv += share.to(q.dtype).transpose(2, 3) @ part
    return dq, dk, dv


def _added(q: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """A mask as the kernel adds it to scores."""
    import torch

    return None if mask is None else torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, -torch.inf)


def _scores(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> Iterator[tuple[slice, torch.Tensor]]:
    """The scores of some queries at a time, and which."""
    import torch

    rows, heads, width, _ = q.shape
    if mask is None:
        mask = torch.ones(width, width, dtype=torch.bool, device=q.device).tril()
    each = max(1, SCORES // (rows * heads * width))
    for some in (slice(begin, begin + each) for begin in range(0, width, each)):
        scores = (q[:, :, some] @ k.transpose(2, 3)).to(torch.promote_types(q.dtype, torch.float32)) * scaling
        yield some, scores.masked_fill(~mask[some], -torch.inf)
