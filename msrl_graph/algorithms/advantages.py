"""Advantage estimators: functions that turn rewards into the advantages of tokens.

Each function returns float64 arrays: one array per row, with one number per token of the row's response. KL penalties
use the estimate k1 = old_logp - ref_logp, in nats.

A `mask` is true for the tokens that the policy wrote. All other tokens come from an environment and are not actions.
The functions skip these other tokens: the results for them are 0.

Invariant: if an input of a row is nan or infinite, every result that depends on the row is nan or infinite, so the run
reports the bad number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .registry import NotNegative, Share, function

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]


@function(scope="group")
def group_norm(response: Sequence[NDArray[np.int32]], reward: NDArray[np.float32], *, std: bool = True) -> list[Array]:
    """GRPO's advantage: (reward - mean) / (deviation + 1e-6), in each group.

    A group is all responses to one prompt. The mean and the standard deviation are over the group's rewards. Every
    token of a response gets the same advantage (arXiv:2402.03300, section 4.1.2). The deviation is the unbiased
    estimate. `std = false` omits the division (arXiv:2503.20783).

    `response` has one array of token ids per row, and `reward` has one number per row. Returns one array per row, with
    one number per token of the row's response. The advantage is 0 if the group has one response or if all its rewards
    are equal. The advantage is nan if a reward of the group is nan.
    """
    centred = _center(reward)
    if std and centred.any():
        centred = centred / (centred.std(ddof=1) + 1e-6)
    return _each_token(response, centred)


@function(scope="group")
def leave_one_out(response: Sequence[NDArray[np.int32]], reward: NDArray[np.float32]) -> list[Array]:
    """RLOO's advantage: the reward minus the mean reward of the other responses.

    The mean is over all other responses to the same prompt. Every token of a response gets the same advantage
    (arXiv:2402.14740).

    `response` has one array of token ids per row, and `reward` has one number per row. Returns one array per row, with
    one number per token of the row's response. The advantage is 0 if the group has one response or if all its rewards
    are equal. The advantage is nan if a reward of the group is nan.
    """
    size = len(reward)
    return _each_token(response, _center(reward) * (size / (size - 1) if size > 1 else 0.0))  # s - (sum - s) / (n - 1)


@function(scope="group")
def optimal_baseline(response: Sequence[NDArray[np.int32]], reward: NDArray[np.float32]) -> list[Array]:
    """OPO's advantage: the reward minus the length-weighted mean of a group's rewards.

    The mean is over all responses to the same prompt. The weight of a response's reward is the length of the response
    in tokens. Every token of a response gets the same advantage (arXiv:2505.23585).

    `response` has one array of token ids per row, and `reward` has one number per row. Returns one array per row, with
    one number per token of the row's response. The advantage is 0 if the group has one response or if all its rewards
    are equal. The advantage is nan if a reward of the group is nan.
    """
    import numpy as np

    centred = _center(reward)
    lengths = np.array([len(tokens) for tokens in response], np.float64)
    return _each_token(response, centred - (centred * lengths).sum() / max(lengths.sum(), 1.0))


@function(together=("old_logp", "ref_logp", "kl"))
def over_baseline(
    response: NDArray[np.int32],
    reward: float,
    baseline: float,
    old_logp: NDArray[np.float32] | None = None,
    ref_logp: NDArray[np.float32] | None = None,
    mask: NDArray[np.bool_] | None = None,
    *,
    kl: NotNegative = 0.0,
) -> Array:
    """ReMax's advantage: the sum of rewards from a token on, minus a baseline.

    The baseline is the reward of the prompt's greedy response (arXiv:2310.10505, algorithm 2). The reward of a token
    is -kl (old_logp - ref_logp). The reward of the last token also includes the response's `reward`. If the node reads
    no log-probabilities, there is no KL penalty. The tokens that `mask` excludes were written by an environment: they
    are skipped, and their advantage is 0. Returns one number per token of the response.
    """
    (rewards,) = _token_rewards(
        [response],
        [reward],
        None if old_logp is None else [old_logp],
        None if ref_logp is None else [ref_logp],
        kl,
        None if mask is None else [mask],
    )
    return _place_tokens([_sum_returns(rewards, 1.0) - baseline], None if mask is None else [mask])[0]


@function(scope="batch", together=("old_logp", "ref_logp", "kl"))
def discounted(
    response: Sequence[NDArray[np.int32]],
    reward: NDArray[np.float32],
    old_logp: Sequence[NDArray[np.float32]] | None = None,
    ref_logp: Sequence[NDArray[np.float32]] | None = None,
    mask: Sequence[NDArray[np.bool_]] | None = None,
    *,
    kl: NotNegative = 0.0,
    gamma: Share = 1.0,
) -> list[Array]:
    """REINFORCE++'s advantage: the sum of rewards from a token on, whitened.

    Source: arXiv:2501.03262. The reward of a token is -kl (old_logp - ref_logp). The reward of a row's last token also
    includes the row's `reward`. `gamma` is the discount per token. If the node reads no log-probabilities, there is no
    KL penalty.

    Whitening replaces each sum A by (A - mean) / sqrt(variance + 1e-8). The mean and the unbiased variance are over all
    tokens of the batch. If all sums are equal, the advantages are 0.

    The tokens that `mask` excludes were written by an environment: they are skipped, and their advantage is 0. Returns
    one array per row, with one number per token of the row's response.
    """
    rewards = _token_rewards(response, reward, old_logp, ref_logp, kl, mask)
    return _place_tokens(_whiten([_sum_returns(row, gamma) for row in rewards]), mask)


@function(scope="batch", together=("old_logp", "ref_logp", "kl_coef"))
def gae(
    response: Sequence[NDArray[np.int32]],
    score: NDArray[np.float32],
    value: Sequence[NDArray[np.float32]],
    old_logp: Sequence[NDArray[np.float32]] | None = None,
    ref_logp: Sequence[NDArray[np.float32]] | None = None,
    kl_coef: float = 0.0,
    mask: Sequence[NDArray[np.bool_]] | None = None,
    *,
    gamma: Share = 1.0,
    lam: Share = 0.95,
    whiten: bool = True,
) -> tuple[list[Array], list[Array]]:
    """Generalized advantage estimates, and the returns that a critic learns.

    Source: arXiv:1506.02438, eq. 16; KL in the reward: arXiv:1909.08593.

    - The reward r of a token is -kl_coef (old_logp - ref_logp). The reward of a row's last token also includes the
      row's `score`. If the node reads no log-probabilities, there is no KL penalty.
    - `value` has the value V of each token: the critic's prediction before the token is written. The value after the
      last token is 0.
    - The advantage A of a token is d + gamma lam A(next token), where d = r + gamma V(next token) - V. The return of a
      token is A + V.
    - With `whiten`, each advantage A is replaced by (A - mean) / sqrt(variance + 1e-8) after the returns are computed.
      The mean and the unbiased variance are over all tokens of the batch. If all advantages are equal, the result is 0.
    - The tokens that `mask` excludes were written by an environment: they are skipped, and their results are 0.

    Returns the advantages and the returns. Both are lists with one array per row. An array has one number per token of
    the row's response.
    """
    import numpy as np

    rewards = _token_rewards(response, score, old_logp, ref_logp, kl_coef, mask)
    values = [
        np.asarray(row_value, np.float64)[_select_policy_tokens(mask, row)] for row, row_value in enumerate(value)
    ]
    deltas = [
        r + gamma * np.append(row_values[1:], 0.0)[: len(row_values)] - row_values
        for r, row_values in zip(rewards, values, strict=True)
    ]
    advantages = [_sum_returns(row_deltas, gamma * lam) for row_deltas in deltas]
    returns = [a + row_values for a, row_values in zip(advantages, values, strict=True)]
    return _place_tokens(_whiten(advantages) if whiten else advantages, mask), _place_tokens(returns, mask)


def _center(scores: NDArray[np.float32]) -> Array:
    """Return the scores minus their mean.

    The result is exactly 0 if all scores are equal, despite rounding errors.
    """
    import numpy as np

    exact = np.asarray(scores, np.float64)
    centred = exact - exact.mean()
    # Relative to the largest score, a mean's rounding error is 1e-15 for any number of scores, and the spread of
    # float32 scores that differ is at least 1e-8.
    return np.zeros_like(centred) if np.all(np.abs(centred) <= 1e-12 * np.abs(exact).max(initial=0)) else centred


def _each_token(response: Sequence[NDArray[np.int32]], values: Array) -> list[Array]:
    import numpy as np

    return [np.full(len(tokens), token_value) for tokens, token_value in zip(response, values, strict=True)]


def _token_rewards(
    response: Sequence[NDArray[np.int32]],
    score: NDArray[np.float32] | Sequence[float],
    old_logp: Sequence[NDArray[np.float32]] | None,
    ref_logp: Sequence[NDArray[np.float32]] | None,
    kl: float,
    mask: Sequence[NDArray[np.bool_]] | None,
) -> list[Array]:
    """Return the rewards of the tokens that the mask selects, one array per row.

    The reward of a token is -kl (old_logp - ref_logp), or 0 without log-probabilities. The reward of a row's last
    selected token also includes the row's `score`.
    """
    import numpy as np

    all_rewards = []
    for row, (tokens, row_score) in enumerate(zip(response, score, strict=True)):
        rewards = np.zeros(len(tokens))
        if old_logp is not None and ref_logp is not None:
            rewards = -kl * (np.asarray(old_logp[row], np.float64) - np.asarray(ref_logp[row], np.float64))
        if len(rewards) != len(tokens):
            raise ValueError(f"a response of {len(tokens)} tokens has {len(rewards)} log-probabilities")
        rewards = rewards[_select_policy_tokens(mask, row)]
        rewards[-1:] += row_score
        all_rewards.append(rewards)
    return all_rewards


def _select_policy_tokens(mask: Sequence[NDArray[np.bool_]] | None, row: int) -> NDArray[np.bool_] | slice:
    """Return an index that selects the tokens that the policy wrote in a row.

    `row` is the number of the row. Without a mask, the index selects all tokens.
    """
    return slice(None) if mask is None else mask[row]


def _place_tokens(rows: list[Array], mask: Sequence[NDArray[np.bool_]] | None) -> list[Array]:
    """Return one array per response, with a value for every token of the response.

    `rows` has the values of the tokens that `mask` selects, one array per response. The value of all other tokens is 0.
    """
    import numpy as np

    if mask is None:
        return rows
    responses = [np.zeros(len(row_mask)) for row_mask in mask]
    for values, mask_of_row, row in zip(responses, mask, rows, strict=True):
        values[mask_of_row] = row
    return responses


def _sum_returns(rewards: Array, discount: float) -> Array:
    """Return, for each token, the discounted sum of the rewards from this token on."""
    import numpy as np

    returns = np.empty_like(rewards)
    total = 0.0
    for token in range(len(rewards) - 1, -1, -1):
        total = rewards[token] + discount * total
        returns[token] = total
    return returns


def _whiten(rows: list[Array]) -> list[Array]:
    """Shift and scale the values of all tokens to mean 0 and variance 1.

    The result is 0 if there is only one token or if all values are equal.
    """
    import numpy as np

    flat = _center(np.concatenate(rows)) if rows and sum(map(len, rows)) else np.zeros(0)
    if flat.any():
        flat = flat / np.sqrt(flat.var(ddof=1) + 1e-8)
    return np.split(flat, np.cumsum([len(row) for row in rows])[:-1]) if rows else []
