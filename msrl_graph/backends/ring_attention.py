"""Causal ring attention: each of n ranks has every n-th position of all rows.

The positions are assigned in context_parallel.py. The keys and values of one rank are called a block. Blocks pass from
rank to rank.

Invariant: a rank holds at most three blocks: its own block, the block that it currently uses, and the block that it is
receiving. The results of blocks are merged in float32, or in float64 for float64 inputs.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from . import devices
from .kernels import chunked_attention

if TYPE_CHECKING:
    import torch

    from .context_parallel import ContextGroup
    from .kernels import ScoreRule


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    context: ContextGroup,
    rule: ScoreRule,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal attention over the positions of all ranks.

    Inputs and output are [rows, heads, width, size] and have only this rank's positions.
    """
    output: torch.Tensor = _make_function()(q, k, v, sinks, context, rule)
    return output


@cache
def _make_function() -> Any:
    import torch

    class Ring(torch.autograd.Function):
        @staticmethod
        def forward(
            saved: Any,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            sinks: Any,
            context: Any,
            rule: ScoreRule,
        ) -> torch.Tensor:
            dtype = torch.promote_types(q.dtype, torch.float32)
            out = torch.zeros_like(q, dtype=dtype)
            lse = q.new_full(q.shape[:3], -torch.inf, dtype=dtype)
            keys_values = torch.stack([k, v])
            for step in range(context.size):
                arriving = context.pass_on(keys_values) if step + 1 < context.size else None
                _merge_block(out, lse, q, keys_values, *_find_visible_keys(q, step, context, rule.window), rule)
                keys_values = keys_values if arriving is None else arriving()
            if sinks is not None:
                out, lse = chunked_attention.add_sinks(out, lse, sinks)
            result = out.to(q.dtype)
            saved.save_for_backward(q, k, v, sinks, result, lse)
            saved.settings = context, rule
            return result

        @staticmethod
        def backward(saved: Any, *grad_outputs: torch.Tensor) -> Any:
            q, k, v, sinks, out, lse = saved.saved_tensors
            context, rule = saved.settings
            keys_values = torch.stack([k, v])
            # Gradients of keys and values travel with the keys and values. One more step returns the gradients to the
            # rank that has the keys.
            dq = torch.zeros_like(q, dtype=lse.dtype)
            sums = torch.zeros_like(keys_values, dtype=lse.dtype)
            for step in range(context.size):
                arriving = context.pass_on(keys_values) if step + 1 < context.size else None
                _add_gradients(
                    dq,
                    sums,
                    grad_outputs[0],
                    (q, out, lse),
                    keys_values,
                    *_find_visible_keys(q, step, context, rule.window),
                    rule,
                )
                keys_values = keys_values if arriving is None else arriving()
                sums = context.pass_on(sums)()
            dsinks = None
            if sinks is not None:
                dsinks = chunked_attention.compute_sink_gradients(grad_outputs[0], sinks, out, lse)
            return dq.to(q.dtype), *sums.to(k.dtype), dsinks, None, None

    return Ring.apply


def _find_visible_keys(
    q: torch.Tensor, step: int, context: ContextGroup, window: int | None
) -> tuple[int, torch.Tensor | None]:
    """Return which keys of another rank each query of this rank sees.

    The other rank is `step` ranks before this rank in the ring. The result is a pair (first, mask):

    - Queries before index `first` see no key. Query i sees the keys up to index i - `first`. If the other rank has a
      higher index than this rank, `first` is 1, because the other rank's key i comes after this rank's query i. If not,
      `first` is 0.
    - Without a window, the mask is None. With a window, the mask is True where a query sees a key.
    """
    import torch

    source = (context.rank - step) % context.size
    first = int(source > context.rank)
    if window is None:
        return first, None
    positions = torch.arange(q.shape[2], device=q.device) * context.size
    distance = (positions + context.rank)[first:, None] - (positions + source)[: len(positions) - first]
    return first, (distance >= 0) & (distance < window)


def _merge_block(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    keys_values: torch.Tensor,
    first: int,
    mask: torch.Tensor | None,
    rule: ScoreRule,
) -> None:
    """Merge a block's attention result into `out` and `lse`, in place.

    A block is the keys and values of one rank. `lse` are the log-sum-exps of the scores. `first` and `mask` are results
    of `_find_visible_keys`. A rank's own block must be merged first, because that block has at least one key that a
    query sees: the key at the query's position.
    """
    import torch

    if first == q.shape[2]:
        return
    keys, values = _select_keys(q, keys_values, first)
    part, block_lse = _forward(q[:, :, first:], keys, values, mask, rule)
    del keys, values
    total_lse = torch.logaddexp(lse[:, :, first:], block_lse)
    part = part.to(out.dtype).mul_((block_lse - total_lse).exp()[..., None])
    out[:, :, first:].mul_((lse[:, :, first:] - total_lse).exp()[..., None]).add_(part)
    lse[:, :, first:] = total_lse


def _add_gradients(
    dq: torch.Tensor,
    sums: torch.Tensor,
    grad_output: torch.Tensor,
    saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    keys_values: torch.Tensor,
    first: int,
    mask: torch.Tensor | None,
    rule: ScoreRule,
) -> None:
    """Add the gradients of the attention to one block to `dq` and `sums`, in place.

    A block is the keys and values of one rank. `dq` is the gradient of this rank's queries. `sums` are the gradients of
    the block's keys and values. `first` and `mask` are results of `_find_visible_keys`.
    """
    if first == dq.shape[2]:
        return
    keys, values = _select_keys(dq, keys_values, first)
    q, out, lse = (tensor[:, :, first:] for tensor in saved)
    query_gradient, *pair = _backward(grad_output[:, :, first:], q, keys, values, out, lse, mask, rule)
    dq[:, :, first:] += query_gradient
    for total, gradient in zip(sums, pair, strict=True):
        by_head = gradient.view(len(gradient), sums.shape[2], -1, *gradient.shape[2:])
        total[:, :, : keys.shape[2]] += by_head.sum(2, dtype=sums.dtype)


def _select_keys(q: torch.Tensor, keys_values: torch.Tensor, first: int) -> torch.Tensor:
    """Return the keys and values that are visible to queries.

    The queries are those from index `first` on. Each key-value head is repeated for the query heads that share it.
    """
    repeats = q.shape[1] // keys_values.shape[2]
    cut = keys_values[:, :, :, : keys_values.shape[3] - first]
    return cut.repeat_interleave(repeats, 2) if repeats > 1 else cut


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, rule: ScoreRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs and the log-sum-exps of attention.

    Attention is causal if `mask` is None. For a query that sees no key, the output is 0 and the log-sum-exp is -inf.
    """
    import torch

    if devices.device_of(q).kind.is_host and not rule.cap:  # its kernels return and accept the log-sum-exp
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = kernel(q, k, v, 0.0, mask is None, attn_mask=_make_additive_mask(q, mask), scale=rule.scaling)
        return out, lse if mask is None else lse.masked_fill(~mask.any(-1), -torch.inf)
    return chunked_attention.compute_outputs(q, k, v, mask, rule)


def _backward(
    grad_output: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    rule: ScoreRule,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of queries, keys and values for the attention to one block.

    A block is the keys and values of one rank. `out` and `lse` are the output and the log-sum-exp of attention to the
    blocks of all ranks.
    """
    import torch

    if devices.device_of(q).kind.is_host and not rule.cap:  # its kernels return and accept the log-sum-exp
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        options = {"attn_mask": _make_additive_mask(q, mask), "scale": rule.scaling}
        gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = kernel(
            grad_output, q, k, v, out, lse, 0.0, mask is None, **options
        )
        return gradients
    return chunked_attention.compute_gradients(grad_output, q, k, v, out, lse, mask, rule)


def _make_additive_mask(q: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """Convert a boolean mask to a mask that the attention kernel adds to scores."""
    import torch

    return None if mask is None else torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
