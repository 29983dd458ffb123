"""Results of k attempts at a prompt, estimated from n: pass@k, best@k, maj@k.

Invariant: each result is the mean over all subsets of k of the n attempts. The mean is computed exactly, without
sampling subsets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from ..data.columns import Array


def pass_at(attempts: int, passed: int, k: int) -> float:
    """Return the chance that at least one of k attempts passes.

    The chance is 1 - C(n - c, k) / C(n, k), for n attempts of which c passed (Chen et al. 2021, arXiv:2107.03374,
    equation 1).
    """
    return 1.0 - math.comb(attempts - passed, k) / math.comb(attempts, k)


def best_at(values: Array, k: int) -> float:
    """Return the largest of k values, averaged over all subsets of k values.

    The i-th smallest of the n values is the largest value in C(i - 1, k - 1) subsets.
    """
    shares = [math.comb(i, k - 1) / math.comb(len(values), k) for i in range(len(values))]
    return float(np.sort(values) @ shares)


def majority_at(values: Array, answers: Sequence[bytes], k: int) -> float:
    """Return the mean value of the attempts with the majority answer of k attempts.

    Answers with equal numbers of votes have equal weights. An empty answer is not a vote. If none of the k attempts
    votes, the result is the mean value of the attempts without an answer.
    """
    own: dict[bytes, list[float]] = {}
    for answer, value in zip(answers, values, strict=True):
        own.setdefault(answer, []).append(value)
    silent = own.pop(b"", [])
    shares = _vote_shares(tuple(sorted(map(len, own.values()))), len(silent), k)
    total = sum(shares[len(group)] * math.fsum(group) / len(group) for group in own.values())
    if silent:
        total += math.comb(len(silent), k) / math.comb(len(values), k) * math.fsum(silent) / len(silent)
    return total


@lru_cache(maxsize=4096)
def _vote_shares(counts: tuple[int, ...], silent: int, k: int) -> dict[int, float]:
    """Return the chance that an answer wins the vote, by its number of attempts.

    `counts` has the number of attempts of each answer. `silent` is the number of attempts without an answer. For an
    answer that gets `votes` of the k votes, `ways[s, t]` is the number of choices of s other attempts in which no other
    answer has more votes, and t other answers have the same number of votes.
    """
    shares: dict[int, float] = {}
    for count in sorted(set(counts)):
        others = list(counts)
        others.remove(count)
        total = 0.0
        for votes in range(1, min(count, k) + 1):
            remaining = k - votes
            ways = np.zeros((remaining + 1, remaining // votes + 1))
            ways[:, 0] = [math.comb(silent, abstentions) for abstentions in range(remaining + 1)]
            for other in others:
                ways = _with_answer(ways, other, votes)
            ties = np.arange(ways.shape[1])
            total += math.comb(count, votes) * float((ways[remaining] / (ties + 1)).sum())
        shares[count] = total / math.comb(sum(counts) + silent, k)
    return shares


def _with_answer(ways: Array, attempts: int, votes: int) -> Array:
    """Return `ways` after adding one more answer, which gets at most `votes` votes.

    `ways` is defined in `_vote_shares`. `attempts` is the number of attempts with the added answer.
    """
    added = np.zeros_like(ways)
    for drawn in range(min(attempts, votes, len(ways) - 1) + 1):
        chosen = math.comb(attempts, drawn) * ways[: len(ways) - drawn]
        if drawn == votes:
            added[drawn:, 1:] += chosen[:, :-1]
        else:
            added[drawn:] += chosen
    return added
