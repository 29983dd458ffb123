"""Outputs of a policy whose vocabulary is sharded over ranks.

Invariant: values and gradients equal the results of a computation with the whole vocabulary on one rank. Values and
gradients are the same on all ranks of the group. No rank holds logits of another rank's part of the vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .engine_protocols import ForwardRequest, MicroBatch, Outputs

if TYPE_CHECKING:
    import torch


def outputs(logits: torch.Tensor, first: int, micro_batch: MicroBatch, request: ForwardRequest, group: Any) -> Outputs:
    """Compute a policy's outputs from one rank's part of the logits.

    - `logits` [tokens, ids on this rank]: float32 logits of consecutive token ids, divided by the temperature. `first`
      is the first of these ids.
    - `micro_batch`: its columns `token` [tokens] and `given` [tokens, k] have ids of the whole vocabulary, whose
      log-probabilities are computed.
    - `request`: the other outputs to compute.
    - `group`: the ranks that together have the whole vocabulary; None if this rank has the whole vocabulary.
    """
    import torch

    token = micro_batch["token"]
    given = micro_batch.get("given", None)
    highest = logits.detach().amax(-1) if logits.shape[-1] else logits.new_full(logits.shape[:1], -torch.inf)
    highest = _highest(highest, group)
    total = _sum((logits - highest[:, None]).exp().sum(-1), group).log() + highest

    def log_probabilities(ids: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities of the token ids `ids` [tokens, k]."""
        local = ids - first
        outside = (local < 0) | (local >= logits.shape[-1])
        values = logits.gather(1, local.masked_fill(outside, 0)).masked_fill(outside, 0.0) if logits.shape[-1] else None
        return _sum(logits.new_zeros(ids.shape) if values is None else values, group) - total[:, None]

    entropy = None
    if request.entropy or torch.is_grad_enabled():
        with torch.set_grad_enabled(request.entropy):
            share = (logits - total[:, None]).exp()
            entropy = total - _sum((share * logits).sum(-1), group)
    best = None
    ids = None
    if request.best:
        best, ids = _best(logits.detach() - total.detach()[:, None], first, request.best, group)
    return Outputs(
        logp=log_probabilities(token[:, None])[:, 0],
        entropy=entropy,
        given=None if given is None else log_probabilities(given),
        best=best,
        ids=ids,
    )


def _best(logps: torch.Tensor, first: int, number: int, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities and ids of the `number` likeliest next tokens.

    `logps` [tokens, ids on this rank] are log-probabilities of consecutive ids, the first of which is `first`. Each
    rank finds the likeliest ids of its own part of the vocabulary. The result is chosen from the likeliest ids of all
    parts.
    """
    import torch
    from torch import distributed as dist

    size = 1 if group is None else group.size()
    own = torch.full((*logps.shape[:1], number), -torch.inf, device=logps.device)
    ids = torch.zeros(own.shape, dtype=torch.long, device=logps.device)
    count = min(number, logps.shape[-1])
    own[:, :count], positions = logps.topk(count)
    ids[:, :count] = positions + first
    if size > 1:
        parts = [[torch.empty_like(tensor) for _ in range(size)] for tensor in (own, ids)]
        for part, tensor in zip(parts, (own, ids), strict=True):
            dist.all_gather(part, tensor.contiguous(), group=group)
        own, ids = (torch.cat(part, -1) for part in parts)
    best, positions = own.topk(number)
    return best, ids.gather(1, positions)


def _highest(own: torch.Tensor, group: Any) -> torch.Tensor:
    from torch import distributed as dist

    if group is not None:
        dist.all_reduce(own, op=dist.ReduceOp.MAX, group=group)
    return own


def _sum(own: torch.Tensor, group: Any) -> torch.Tensor:
    """Sum a tensor over the ranks of a group, differentiably.

    The backward pass needs no communication: each rank already has the whole gradient, because each rank computes the
    same loss.
    """
    import torch
    from torch import distributed as dist

    if group is None:
        return own

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, values: torch.Tensor) -> torch.Tensor:
            total = values.clone()
            dist.all_reduce(total, group=group)
            return total

        @staticmethod
        def backward(context: Any, *slopes: torch.Tensor) -> torch.Tensor:
            return slopes[0]

    result: torch.Tensor = Sum.apply(own)  # type: ignore[no-untyped-call]
    return result
