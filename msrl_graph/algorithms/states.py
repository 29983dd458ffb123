"""Functions of states, which outlive an iteration.

They give the next value of a state, and weights that draw prompts by a state.
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
    """The next coefficient of a KL penalty, by its distance from a target.

    kl_coef (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon) (arXiv:1909.08593, section 2.2). kl is the mean over
    responses of the mean of old_logp - ref_logp over a response's tokens, in nats per token, as is `target`; n is
    the number of responses, `horizon` a number of responses. Empty responses do not count; if there are no others
    the coefficient stays. `mask` leaves out tokens of an environment. A nan in a response gives nan.
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

    It is decay times the mean's value, plus (1 - decay) times the mean of the group's rewards. A nan among the
    rewards gives nan.
    """
    import numpy as np

    return decay * float(mean) + (1 - decay) * float(np.mean(np.asarray(reward, np.float64)))


@function()
def around(state: NDArray[np.float32], *, target: Share = 0.5, floor: Share = 0.05) -> NDArray[np.float64]:
    """Weights for the source's `weights`: highest for states near a target.

    The weight is 1 if a state from 0 to 1 is at `target`, and falls linearly to 0 at the end that is farther away.
    `floor` is the least weight, so that every prompt can come back. Prompts that are always or never solved teach
    nothing if advantages are relative. `state` holds one number per prompt; returns as many.
    """
    import numpy as np

    distance = np.abs(np.asarray(state, np.float64) - target) / max(target, 1 - target)
    return np.maximum(1 - distance, floor)
