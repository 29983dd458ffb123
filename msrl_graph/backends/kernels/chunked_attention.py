"""Attention that computes its scores itself, for some queries at a time.

It serves where no fused kernel does: kernels that cap scores (arXiv:2408.00118, section 2) or have sinks
(arXiv:2508.10925, section 2.3) are rare, and few kernels return the log-sum-exps of scores or accept them.

Invariant: no more than `SCORES` scores exist at once, or the scores of one query of each head and row. Scores are in
float32, or in float64 for float64 inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from ..memory.sizes import SCORES

if TYPE_CHECKING:
    import torch

    from . import ScoreRule


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rule: ScoreRule,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal attention; see `Attention` in this package."""
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1:
        k = k.repeat_interleave(repeats, 1)
        v = v.repeat_interleave(repeats, 1)
    output: torch.Tensor = _make_function()(q, k, v, sinks, rule)
    return output


@cache
def _make_function() -> Any:
    import torch

    class Chunked(torch.autograd.Function):
        @staticmethod
        def forward(
            saved: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: Any, rule: ScoreRule
        ) -> torch.Tensor:
            out, lse = compute_outputs(q, k, v, _make_mask(q, rule.window), rule)
            if sinks is not None:
                out, lse = add_sinks(out, lse, sinks)
            saved.save_for_backward(q, k, v, sinks, out, lse)
            saved.rule = rule
            return out

        @staticmethod
        def backward(saved: Any, *grad_outputs: torch.Tensor) -> Any:
            q, k, v, sinks, out, lse = saved.saved_tensors
            mask = _make_mask(q, saved.rule.window)
            dq, dk, dv = compute_gradients(grad_outputs[0], q, k, v, out, lse, mask, saved.rule)
            dsinks = None if sinks is None else compute_sink_gradients(grad_outputs[0], sinks, out, lse)
            return dq, dk.to(k.dtype), dv.to(v.dtype), dsinks, None

    return Chunked.apply


def _make_mask(q: torch.Tensor, window: int | None) -> torch.Tensor | None:
    """Return which keys each query sees; None without a window."""
    import torch

    width = q.shape[2]
    if window is None or width <= window:
        return None
    return torch.ones(width, width, dtype=torch.bool, device=q.device).tril().triu(1 - window)


def compute_outputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    rule: ScoreRule,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs and the log-sum-exps of attention.

    `mask` says which keys each query sees, instead of the window of `rule`. Attention is causal if `mask` is None. For
    a query that sees no key, the output is 0 and the log-sum-exp is -inf.
    """
    import torch

    parts = []
    for _, seen, scores in _iterate_scores(q, k, mask, rule):
        lse = scores.logsumexp(-1)
        parts.append(((scores - lse.nan_to_num(neginf=0.0)[..., None]).exp().to(v.dtype) @ v[:, :, seen], lse))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def compute_gradients(
    grad_output: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    rule: ScoreRule,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of queries, keys and values.

    Those of keys and values are in the type of `lse`. `out` and `lse` are the output and the log-sum-exp of attention,
    perhaps to more keys than `k`.
    """
    import torch

    dq = torch.zeros_like(q)
    dk, dv = (torch.zeros_like(tensor, dtype=lse.dtype) for tensor in (k, v))
    for span, seen, scores in _iterate_scores(q, k, mask, rule):
        share = (scores - lse[:, :, span, None]).exp()
        part = grad_output[:, :, span]
        delta = (part * out[:, :, span]).sum(-1, keepdim=True, dtype=lse.dtype)
        change = share * ((part @ v[:, :, seen].transpose(2, 3)) - delta) * rule.scaling
        if rule.cap:  # the slope of the cap; a key that is not seen has no share
            change = change * (1 - (scores / rule.cap).clamp(min=-1).square())
        change = change.to(q.dtype)
        dq[:, :, span] = change @ k[:, :, seen]
        dk[:, :, seen] += change.transpose(2, 3) @ q[:, :, span]
        dv[:, :, seen] += share.to(q.dtype).transpose(2, 3) @ part
    return dq, dk, dv


def add_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Add each head's sink to the outputs and the log-sum-exps of attention.

    A sink is the score of a further key, whose value is 0.
    """
    total = lse.logaddexp(sinks.to(lse.dtype)[:, None])
    return out * (lse - total).exp()[..., None].to(out.dtype), total


def compute_sink_gradients(
    grad_output: torch.Tensor, sinks: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> torch.Tensor:
    """Return the gradients of sinks. `out` and `lse` are results of `add_sinks`."""
    share = (sinks.to(lse.dtype)[:, None] - lse).exp()
    return -(share * (grad_output * out).sum(-1, dtype=lse.dtype)).sum((0, 2)).to(sinks.dtype)


def _iterate_scores(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, rule: ScoreRule
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Yield the scores of some queries at a time.

    Each result is a slice of the queries, a slice of the keys, and the queries' scores with these keys.
    """
    import torch

    rows, heads, width, _ = q.shape
    chunk = max(1, SCORES // (rows * heads * width))
    for begin in range(0, width, chunk):
        span = slice(begin, min(begin + chunk, width))
        seen = slice(0, span.stop if mask is None else width)
        scores = (q[:, :, span] @ k[:, :, seen].transpose(2, 3)).to(torch.promote_types(q.dtype, torch.float32))
        scores = scores * rule.scaling
        if rule.cap:
            scores = (scores / rule.cap).tanh() * rule.cap
        if mask is None:
            visible = torch.ones(span.stop - begin, span.stop, dtype=torch.bool, device=q.device).tril(begin)
        else:
            visible = mask[span]
        yield span, seen, scores.masked_fill(~visible, -torch.inf)
