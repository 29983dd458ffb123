"""The draw of a token, shared by all engines that accept custom sampling.

A draw applies the inverse of the tokens' cumulative distribution function to a random number, in float64. The random
number depends only on the noise key and on the step, which is the number of the token in its response.

Invariant: a row's token is a function of the row's logits, noise key, step and sampling parameters. The batch, the
engine and the layout do not matter. Two engines draw different tokens only if they round the logits differently.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from ..engine_protocols import Sampling


def draw(
    logits: torch.Tensor, keys: NDArray[np.uint64], steps: NDArray[np.int64], sampling: Sampling, group: object = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the next token of each row.

    Return two tensors [rows]: the tokens, and their log-probabilities in the distribution before top_k, top_p and
    min_p are applied. At temperature 0 the likeliest token is certain, so its log-probability is 0.

    - `logits` [rows, vocabulary]: float32 or a more precise dtype.
    - `keys` and `steps`: each row's noise key and step (the number of the token in its response). They decide the row's
      random number (noise.py).
    - `sampling`: the sampling parameters of these rows.
    - `group`: the ranks that must get the same tokens; one of them draws for all. None if this rank is alone.
    """
    import torch
    from torch import distributed as dist

    from ... import noise

    temperature = torch.as_tensor(sampling.temperature, dtype=torch.float32, device=logits.device).reshape(-1, 1)
    greedy = temperature == 0
    token = logits.argmax(-1)
    if greedy.all():
        unfiltered = (logits - logits.amax(-1, keepdim=True)).exp()
    else:
        if greedy.any():  # in these rows one token is certain
            certain = torch.full_like(logits, -torch.inf).scatter_(-1, token[:, None], 0.0)
            logits = logits.where(~greedy, certain)
            temperature = temperature.where(~greedy, 1.0)
        unfiltered = share = (logits / temperature).double().softmax(-1)
        if sampling.top_k:
            threshold = logits.topk(min(sampling.top_k, logits.shape[-1]), dim=-1).values[:, -1:]
            share = share.masked_fill(logits < threshold, 0.0)
        if sampling.top_p < 1:
            ordered, index = share.sort(-1, descending=True)
            ordered[ordered.cumsum(-1) - ordered >= sampling.top_p * ordered.sum(-1, keepdim=True)] = 0.0
            share = torch.zeros_like(share).scatter_(-1, index, ordered)
        if sampling.min_p:  # the last filter, as in transformers
            share = share.masked_fill(unfiltered < sampling.min_p * unfiltered.amax(-1, keepdim=True), 0.0)
        total = share.cumsum(-1)
        uniforms = noise.uniform(keys, steps)
        u = torch.from_numpy(uniforms).to(logits.device, non_blocking=True)[:, None]
        token = (total <= u * total[:, -1:]).sum(-1).clamp(max=logits.shape[-1] - 1)
    if group is not None:
        # The ranks of a group must agree to the last bit, so one rank draws for all.
        dist.broadcast(token, group=group, group_src=0)  # type: ignore[arg-type]
    return token, unfiltered.gather(-1, token[:, None])[:, 0].log().float()
