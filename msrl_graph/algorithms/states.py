"""Functions for states, the values that an algorithm keeps between iterations.

`adaptive_kl` and `moving_mean` return the next value of a state. `around` returns a sampling weight for each prompt,
computed from a state.

Invariant: a function returns the new value and changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .registry import Positive, Share, function

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray


@function(scope="batch")
def adaptive_kl(
    old_logp: Sequence[NDArray[np.float32]],
    ref_logp: Sequence[NDArray[np.float32]],
    kl_coef: float,
    mask: Sequence[NDArray[np.bool_]] | None = None,
    *,
    target: Positive,
    horizon: Positive,
) -> float:
    """The next coefficient of a KL penalty, adapted to reach a target divergence.

    The result is kl_coef (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon) (arXiv:1909.08593, section 2.2).

    - kl is the mean of old_logp - ref_logp over the tokens of a response, and then over the responses. kl and `target`
      are in nats per token.
    - n is the number of responses. `horizon` is also a number of responses.
    - Empty responses do not count. If all responses are empty, the coefficient does not change.
    - The tokens that `mask` excludes were written by an environment and do not count.
    - If a log-probability is nan, the result is nan.
    """
    import numpy as np

    estimates = [
        np.asarray(old, np.float64) - np.asarray(ref, np.float64) for old, ref in zip(old_logp, ref_logp, strict=True)
    ]
    policy_estimates = (
        estimates if mask is None else [row[row_mask] for row, row_mask in zip(estimates, mask, strict=True)]
    )
    means = [float(row.mean()) for row in policy_estimates if len(row)]
    if not means:
        return float(kl_coef)
    error = float(np.clip(np.mean(means) / target - 1, -0.2, 0.2))
    return float(kl_coef) * (1 + error * len(means) / horizon)


@function(scope="group")
def moving_mean(reward: NDArray[np.float32], mean: float, *, decay: Share = 0.9) -> float:
    """The next value of an exponential moving mean of rewards.

    The result is decay * mean + (1 - decay) * (the mean of the group's rewards), where `mean` is the previous value.
    If a reward of the group is nan, the result is nan.
    """
    import numpy as np

    return decay * float(mean) + (1 - decay) * float(np.mean(np.asarray(reward, np.float64)))


@function()
def around(state: NDArray[np.float32], *, target: Share = 0.5, floor: Share = 0.05) -> NDArray[np.float64]:
    """Weights for drawing prompts, highest for prompts whose state is near `target`.

    Use the weights as the attribute `weights` of the source. `state` has one number from 0 to 1 per prompt. The weight
    of a prompt is 1 if its state equals `target`, and falls linearly with the distance of the state from `target`. The
    fall is so steep that the weight reaches 0 at the state 0 or 1, whichever is farther from `target`. A weight below
    `floor` is raised to `floor`, so that every prompt can be drawn again. Returns one weight per prompt.

    The reason for the weights: if advantages are relative to a group, prompts that are always or never solved teach
    nothing.
    """
    import numpy as np

    distance = np.abs(np.asarray(state, np.float64) - target) / max(target, 1 - target)
    return np.maximum(1 - distance, floor)
