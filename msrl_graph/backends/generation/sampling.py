"""The draw of a token, the same for every engine that lets us: the inverse of the cumulative distribution at a number
that only a key decides, in float64.

Invariant: a row's token is a function of its logits, its key and the step alone, wherever in
whichever batch, engine or layout the row is: so two engines differ by the rounding of logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from ..spec import Sampling


def draw(
    logits: torch.Tensor, keys: NDArray[np.uint64], steps: NDArray[np.int64], sampling: Sampling, group: object = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next token of each row and its log-probability before any filter, [rows] each; at temperature 0 that of the
    only token there is, 0. `logits` [rows, vocabulary] are of float32 or finer, `sampling` is of these rows, `keys`
    and `steps` decide what is drawn of each (noise.py), `group` the ranks that must agree on the tokens."""
    import torch
    from torch import distributed as dist

    from ... import noise

    heat = torch.as_tensor(sampling.temperature, dtype=torch.float32, device=logits.device).reshape(-1, 1)
    cold = heat == 0
    token = logits.argmax(-1)
    if cold.all():
        whole = (logits - logits.amax(-1, keepdim=True)).exp()
    else:
        if cold.any():  # of these rows one token is certain
            certain = torch.full_like(logits, -torch.inf).scatter_(-1, token[:, None], 0.0)
            logits = logits.where(~cold, certain)
            heat = heat.where(~cold, 1.0)
        whole = share = (logits / heat).double().softmax(-1)
        if sampling.top_k:
            floor = logits.topk(min(sampling.top_k, logits.shape[-1]), dim=-1).values[:, -1:]
            share = share.masked_fill(logits < floor, 0.0)
        if sampling.top_p < 1:
            ordered, index = share.sort(-1, descending=True)
            ordered[ordered.cumsum(-1) - ordered >= sampling.top_p * ordered.sum(-1, keepdim=True)] = 0.0
            share = torch.zeros_like(share).scatter_(-1, index, ordered)
        total = share.cumsum(-1)
        numbers = noise.uniform(keys, steps)
        u = torch.from_numpy(numbers).to(logits.device, non_blocking=True)[:, None]
        token = (total <= u * total[:, -1:]).sum(-1).clamp(max=logits.shape[-1] - 1)
    if group is not None:
        # The ranks of a group must agree to the last bit: one draws for all.
        dist.broadcast(token, group=group, group_src=0)  # type: ignore[arg-type]
    return token, whole.gather(-1, token[:, None])[:, 0].log().float()
