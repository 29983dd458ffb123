"""What a policy tells of tokens, where each rank has a part of the vocabulary.

Invariant: figures and gradients are those of the whole vocabulary, on all ranks of the group the same; no rank has more
logits than its own part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .spec import ForwardRequest, Outputs

if TYPE_CHECKING:
    import torch


def outputs(
    logits: torch.Tensor, first: int, token: torch.Tensor, given: torch.Tensor | None, asked: ForwardRequest, group: Any
) -> Outputs:
    """`logits` [tokens, part] are float32, divided by the temperature, of the ids from `first` on; `token` [tokens] and
    `given` [tokens, k] are whole ids; `group` the ranks that have the parts, None where this one has all."""
    import torch

    highest = logits.detach().amax(-1) if logits.shape[-1] else logits.new_full(logits.shape[:1], -torch.inf)
    highest = _highest(highest, group)
    total = _sum((logits - highest[:, None]).exp().sum(-1), group).log() + highest

    def of(ids: torch.Tensor) -> torch.Tensor:
        """The log-probabilities of some ids, [tokens, k]."""
        local = ids - first
        outside = (local < 0) | (local >= logits.shape[-1])
        found = logits.gather(1, local.masked_fill(outside, 0)).masked_fill(outside, 0.0) if logits.shape[-1] else None
        return _sum(logits.new_zeros(ids.shape) if found is None else found, group) - total[:, None]

    entropy = None
    if asked.entropy or torch.is_grad_enabled():
        with torch.set_grad_enabled(asked.entropy):
            share = (logits - total[:, None]).exp()
            entropy = total - _sum((share * logits).sum(-1), group)
    best = None
    ids = None
    if asked.best:
        best, ids = _best(logits.detach() - total.detach()[:, None], first, asked.best, group)
    return Outputs(
        logp=of(token[:, None])[:, 0], entropy=entropy, given=None if given is None else of(given), best=best, ids=ids
    )


def _best(logps: torch.Tensor, first: int, number: int, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest ids of all parts, each part's own first."""
    import torch
    from torch import distributed as dist

    size = 1 if group is None else group.size()
    own = torch.full((*logps.shape[:1], number), -torch.inf, device=logps.device)
    ids = torch.zeros(own.shape, dtype=torch.long, device=logps.device)
    kept = min(number, logps.shape[-1])
    own[:, :kept], at = logps.topk(kept)
    ids[:, :kept] = at + first
    if size > 1:
        parts = [[torch.empty_like(x) for _ in range(size)] for x in (own, ids)]
        for part, x in zip(parts, (own, ids), strict=True):
            dist.all_gather(part, x.contiguous(), group=group)
        own, ids = (torch.cat(part, -1) for part in parts)
    best, at = own.topk(number)
    return best, ids.gather(1, at)


def _highest(own: torch.Tensor, group: Any) -> torch.Tensor:
    from torch import distributed as dist

    if group is not None:
        dist.all_reduce(own, op=dist.ReduceOp.MAX, group=group)
    return own


def _sum(own: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum over the group, whose gradient each rank has already: it computes the same loss."""
    import torch
    from torch import distributed as dist

    if group is None:
        return own

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            total = x.clone()
            dist.all_reduce(total, group=group)
            return total

        @staticmethod
        def backward(context: Any, *slopes: torch.Tensor) -> torch.Tensor:
            return slopes[0]

    found: torch.Tensor = Sum.apply(own)  # type: ignore[no-untyped-call]
    return found
