"""pass@k, best@k and maj@k: results of k attempts, estimated from n attempts.

Invariant: each result is the mean over all choices of k attempts from the n attempts at one prompt. The mean is
computed exactly, without sampling.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from ..data.columns import Array


def pass_at(attempts: int, passed: int, k: int) -> float:
    """Return the chance that at least one of k attempts passes.

    The chance is 1 - C(n - c, k) / C(n, k), for n attempts of which c have passed (Chen et al. 2021, arXiv:2107.03374,
    equation 1). `attempts` is n, and `passed` is c.
    """
    return 1.0 - math.comb(attempts - passed, k) / math.comb(attempts, k)


def best_at(values: Array, k: int) -> float:
    """Return the largest of k values, averaged over all choices of k of the n values.

    `values` has the n values, one for each attempt. The i-th smallest of these values is the largest value in C(i - 1,
    k - 1) choices.
    """
    shares = [math.comb(i, k - 1) / math.comb(len(values), k) for i in range(len(values))]
    return float(np.sort(values) @ shares)


def majority_at(values: Array, answers: Sequence[bytes], k: int) -> float:
    """Return the mean value of the answers that win a vote of k attempts.

    `values` and `answers` have one element for each attempt. Each choice of k attempts is a vote. The most frequent
    answer wins, and its value is the mean value of all attempts with this answer. If several answers are equally
    frequent, the value of the vote is the mean of these answers' values. An attempt with an empty answer does not vote.
    If none of the k attempts votes, the value of the vote is the mean value of all attempts without an answer.
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
    """Return the chance of each answer to win a vote of k attempts.

    `counts` has, for each answer, the number of attempts that gave this answer. `silent` is the number of attempts
    without an answer. A key of the result is a number from `counts`. The value is the chance that an answer with this
    number of attempts wins.

    The code counts choices of k attempts in which one answer, the winner, gets `votes` votes and no other answer gets
    more. The local array `ways` counts choices of the attempts that did not vote for the winner: `ways[s, t]` is the
    number of choices of s attempts in which t other answers also get `votes` votes.
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
    """Add one more answer to a table of counted choices; return the new table.

    `ways` is the table: `ways[s, t]` is the number of choices of s attempts in which t answers get exactly `votes`
    votes and no answer gets more. `attempts` is the number of attempts that gave the added answer. The new table also
    counts the choices with 1 to `votes` of these attempts.
    """
    added = np.zeros_like(ways)
    for drawn in range(min(attempts, votes, len(ways) - 1) + 1):
        chosen = math.comb(attempts, drawn) * ways[: len(ways) - drawn]
        if drawn == votes:
            added[drawn:, 1:] += chosen[:, :-1]
        else:
            added[drawn:] += chosen
    return added
