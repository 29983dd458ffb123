"""Terms of a loss over pairs of responses to a prompt.

Of a pair, `chosen` is preferred to `rejected`. A term returns one value per pair (`Rows`). losses.py says what the
arguments of terms are.

Invariant: the value of a pair depends on that pair alone.
"""

from __future__ import annotations

from typing import Literal

from .losses import sum_rows
from .registry import Figures, LogProbs, NotNegative, Positive, Rows, Scores, Share, Tokens, loss_term


@loss_term
def dpo(
    chosen: LogProbs,
    rejected: LogProbs,
    ref_chosen: Tokens,
    ref_rejected: Tokens,
    chosen_lengths: Rows,
    rejected_lengths: Rows,
    *,
    beta: Positive = 0.1,
    form: Literal["sigmoid", "hinge", "ipo"] = "sigmoid",
    smoothing: Share = 0.0,
) -> tuple[Rows, Figures]:
    """Direct preference optimization, one value per pair (arXiv:2305.18290, eq. 7).

    The loss of a pair is (1 - s) f(z) + s f(-z), where s is `smoothing` and z = (chosen - rejected) - (ref_chosen -
    ref_rejected). In z, each name is the sum of the log-probabilities of a response's tokens: `chosen` and `rejected`
    under the weights being updated, `ref_chosen` and `ref_rejected` under the reference. The sum of an empty response
    is 0.

    `form` sets f(z). `sigmoid` is -log sigmoid(beta z). `hinge` is max(0, 1 - beta z) (arXiv:2305.10425). `ipo`
    (arXiv:2310.12036, eq. 17) is (z - 1 / (2 beta))^2, and z uses means over a response's tokens in place of sums.
    Reports the `margin` z of each pair, and whether the margin is above 0 (`accuracy`).
    """
    from torch.nn.functional import softplus

    better = sum_rows(chosen - ref_chosen, chosen_lengths)
    worse = sum_rows(rejected - ref_rejected, rejected_lengths)
    if form == "ipo":
        better = better / chosen_lengths.clamp(min=1)
        worse = worse / rejected_lengths.clamp(min=1)
    z = better - worse

    def f(z: Rows) -> Rows:
        if form == "sigmoid":
            return softplus(-beta * z)
        return (1 - beta * z).clamp(min=0) if form == "hinge" else (z - 1 / (2 * beta)).square()

    loss = (1 - smoothing) * f(z) + smoothing * f(-z) if smoothing else f(z)
    return loss, {"margin": z, "accuracy": (z > 0).float()}


@loss_term
def bradley_terry(chosen: Scores, rejected: Scores, *, margin: NotNegative = 0.0) -> tuple[Rows, Figures]:
    """The loss of a reward model that learns from pairs, one value per pair.

    The loss of a pair is -log sigmoid(chosen - rejected - margin) (arXiv:2203.02155, eq. 1; with a margin
    arXiv:2307.09288, eq. 2). `chosen` and `rejected` are the scores of the prompt followed by the chosen or the
    rejected response, under the weights being updated. `margin` is the amount by which `chosen` should exceed
    `rejected`. Reports chosen - rejected as the `margin` of each pair, and whether this difference is above 0
    (`accuracy`).
    """
    from torch.nn.functional import softplus

    difference = chosen - rejected
    return softplus(margin - difference), {"margin": difference, "accuracy": (difference > 0).float()}
