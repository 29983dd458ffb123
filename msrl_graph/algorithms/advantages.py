"""Advantage estimators: what a reward is worth beside its peers.

Each gives float64 arrays, one a row and as long as its response; a row that holds a nan or an infinite number gives one
to all that it is compared with, so that the run names what is wrong. KL penalties are of the estimate k1 = old_logp -
ref_logp, in nats. Where a `mask` is read, the tokens that it leaves out, an environment's, are nobody's actions: what
is estimated is as if they were not there, and 0 at them.
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
    """GRPO's advantage, (s - mean) / (std + 1e-6) over a prompt's responses, given to every token (arXiv:2402.03300,
    section 4.1.2).

    `response` holds one array of token ids a row, `reward` one number a row. The standard deviation is the unbiased
    one; `std = false` leaves the division out (arXiv:2503.20783). A group of one, or without spread, gets 0; one with a
    nan gets nan. Gives one array a row, as long as its response.
    """
    centred = _centred(reward)
    if std and centred.any():
        centred = centred / (centred.std(ddof=1) + 1e-6)
    return _each_token(response, centred)


@function(scope="group")
def leave_one_out(response: Sequence[NDArray[np.int32]], reward: NDArray[np.float32]) -> list[Array]:
    """RLOO's advantage, s minus the mean of the others' s among a prompt's responses, given to every token
    (arXiv:2402.14740).

    `response` holds one array of token ids a row, `reward` one number a row. A group of one, or without spread, gets 0;
    one with a nan gets nan. Gives one array a row, as long as its response.
    """
    n = len(reward)
    return _each_token(response, _centred(reward) * (n / (n - 1) if n > 1 else 0.0))  # s - (sum - s) / (n - 1)


@function(scope="group")
def optimal_baseline(response: Sequence[NDArray[np.int32]], reward: NDArray[np.float32]) -> list[Array]:
    """OPO's advantage, s minus the mean of a prompt's s weighted by their responses' lengths, given to every token
    (arXiv:2505.23585).

    `response` holds one array of token ids a row, `reward` one number a row. A group of one, or without spread, gets 0;
    one with a nan gets nan. Gives one array a row, as long as its response.
    """
    import numpy as np

    centred = _centred(reward)
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
    """ReMax's advantage: what a token's rewards from there on add up to, minus the reward of the prompt's greedy
    response (arXiv:2310.10505, algorithm 2).

    A token's reward is -kl (old_logp - ref_logp), and on the last token of the response its `reward` besides;
    `baseline` is the greedy response's. Without log-probabilities there is no penalty. `mask` leaves out tokens of an
    environment. Gives an array as long as the response.
    """
    (rewards,) = _token_rewards(
        [response],
        [reward],
        None if old_logp is None else [old_logp],
        None if ref_logp is None else [ref_logp],
        kl,
        None if mask is None else [mask],
    )
    return _laid([_returns(rewards, 1.0) - baseline], None if mask is None else [mask])[0]


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
    """REINFORCE++'s advantage: what a token's rewards from there on add up to, whitened over the batch
    (arXiv:2501.03262).

    A token's reward is -kl (old_logp - ref_logp), and on the last token of its response the row's `reward` besides;
    `gamma` discounts by token. Without log-probabilities there is no penalty. Whitened: (A - mean) / sqrt(variance +
    1e-8) over all tokens of the batch, the variance unbiased; 0 where there is no spread. `mask` leaves out tokens of
    an environment. Gives one array a row, as long as its response, empty for an empty one.
    """
    rewards = _token_rewards(response, reward, old_logp, ref_logp, kl, mask)
    return _laid(_whitened([_returns(r, gamma) for r in rewards]), mask)


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
    """Generalized advantage estimates, and the returns that a critic learns (arXiv:1506.02438, eq. 16; KL in the
    reward: arXiv:1909.08593).

    A token's reward r is -kl_coef (old_logp - ref_logp), and on the last token of its response the row's `score`
    besides; without log-probabilities there is no penalty. `value` is the value of the state before each token is
    written, 0 past the end: d = r + gamma V(next) - V, A = d + gamma lam A(next), and the returns are A + V. `whiten`
    then makes A into (A - mean) / sqrt(variance + 1e-8) over all tokens of the batch, the variance unbiased; 0 where
    there is no spread. `mask` leaves out tokens of an environment. Gives advantages and returns, one array a row each,
    as long as its response, empty for an empty one.
    """
    import numpy as np

    rewards = _token_rewards(response, score, old_logp, ref_logp, kl_coef, mask)
    values = [np.asarray(v, np.float64)[_own(mask, i)] for i, v in enumerate(value)]
    deltas = [r + gamma * np.append(v[1:], 0.0)[: len(v)] - v for r, v in zip(rewards, values, strict=True)]
    advantages = [_returns(d, gamma * lam) for d in deltas]
    returns = [a + v for a, v in zip(advantages, values, strict=True)]
    return _laid(_whitened(advantages) if whiten else advantages, mask), _laid(returns, mask)


def _centred(scores: NDArray[np.float32]) -> Array:
    """Scores minus their mean; exactly 0 where they are all the same, whatever the mean was rounded to."""
    import numpy as np

    exact = np.asarray(scores, np.float64)
    centred = exact - exact.mean()
    # Of the largest score: the rounding of a mean is 1e-15 of it for any number of them, a real spread of float32
    # scores 1e-8 at least.
    return np.zeros_like(centred) if np.all(np.abs(centred) <= 1e-12 * np.abs(exact).max(initial=0)) else centred


def _each_token(response: Sequence[NDArray[np.int32]], values: Array) -> list[Array]:
    import numpy as np

    return [np.full(len(tokens), v) for tokens, v in zip(response, values, strict=True)]


def _token_rewards(
    response: Sequence[NDArray[np.int32]],
    score: NDArray[np.float32] | Sequence[float],
    old_logp: Sequence[NDArray[np.float32]] | None,
    ref_logp: Sequence[NDArray[np.float32]] | None,
    kl: float,
    mask: Sequence[NDArray[np.bool_]] | None,
) -> list[Array]:
    """The KL penalty of each token that the mask leaves, and on the last one the row's score besides."""
    import numpy as np

    found = []
    for i, (tokens, s) in enumerate(zip(response, score, strict=True)):
        rewards = np.zeros(len(tokens))
        if old_logp is not None and ref_logp is not None:
            rewards = -kl * (np.asarray(old_logp[i], np.float64) - np.asarray(ref_logp[i], np.float64))
        if len(rewards) != len(tokens):
            raise ValueError(f"a response of {len(tokens)} tokens has {len(rewards)} log-probabilities")
        rewards = rewards[_own(mask, i)]
        rewards[-1:] += s
        found.append(rewards)
    return found


def _own(mask: Sequence[NDArray[np.bool_]] | None, row: int) -> NDArray[np.bool_] | slice:
    """Which tokens of a row the policy wrote: all where no mask says."""
    return slice(None) if mask is None else mask[row]


def _laid(rows: list[Array], mask: Sequence[NDArray[np.bool_]] | None) -> list[Array]:
    """Values of the tokens that the mask leaves at their places in whole responses, with 0 at the others."""
    import numpy as np

    if mask is None:
        return rows
    whole = [np.zeros(len(m)) for m in mask]
    for values, own, row in zip(whole, mask, rows, strict=True):
        values[own] = row
    return whole


def _returns(rewards: Array, discount: float) -> Array:
    """What the rewards from each token on add up to, discounted by token."""
    import numpy as np

    returns = np.empty_like(rewards)
    total = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        total = rewards[t] + discount * total
        returns[t] = total
    return returns


def _whitened(rows: list[Array]) -> list[Array]:
    """All tokens with mean 0 and variance 1; 0 where there is no spread, and for a single token."""
    import numpy as np

    flat = _centred(np.concatenate(rows)) if rows and sum(map(len, rows)) else np.zeros(0)
    if flat.any():
        flat = flat / np.sqrt(flat.var(ddof=1) + 1e-8)
    return np.split(flat, np.cumsum([len(r) for r in rows])[:-1]) if rows else []
