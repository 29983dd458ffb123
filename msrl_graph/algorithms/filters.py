"""Filters: which rows go on.

A `keep` gives one truth value a row; a `select` the positions, from 0, of the rows that go on among those that it was
given, in the order in which they go on, where one may stand several times. Each refuses scores that are no finite
numbers (ValueError): they have no order. Two scores count as equal where they differ by less than 1e-5 of the larger of
these two: a reward model rounds otherwise on another layout, and of responses that are the same each must choose the
same one. Other scores of the group play no part in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from .registry import Count, NotNegative, function, option

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    import numpy as np
    from numpy.typing import NDArray

    Weights: TypeAlias = Callable[[NDArray[np.float64]], NDArray[np.float64]]


@function(scope="group")
def mixed(score: NDArray[np.float32], *, above: float = 0.0) -> list[bool]:
    """A `keep`: the whole group if some of its responses are correct and some are not, else nothing (arXiv:2503.14476,
    eq. 11).

    Correct is a `score` over `above`. A group of one is never mixed.
    """
    correct = _finite(score) > above
    return [bool(correct.any() and not correct.all())] * len(correct)


@function(scope="group")
def best_of_n(score: NDArray[np.float32], *, n: Count = 1) -> list[int]:
    """A `select`: the `n` best of the group in their order, all where it has no more; of equal ones the first.

    Scores that differ by less than 1e-5 of the larger of the two are equal: that much is rounding.
    """
    import numpy as np

    return sorted(int(i) for i in np.argsort(-_ranks(score), kind="stable")[:n])


@function(scope="group")
def best_random(score: NDArray[np.float32], rng: np.random.Generator) -> list[int]:
    """A `select`: the best of the group and one of the others at random, in their order (arXiv:2409.06957).

    Of equal ones (as `best_of_n` has it) the first is the best. A group of one goes on as it is.
    """
    best = int(_ranks(score).argmax())
    others = [i for i in range(len(score)) if i != best]
    return sorted([best, *([int(rng.choice(others))] if others else [])])


@function(scope="group")
def best_worst(score: NDArray[np.float32]) -> list[int]:
    """A `select`: the best and the worst of the group, in their order (arXiv:2409.06957).

    Of equal ones (as `best_of_n` has it) the first is the best, the last the worst. A group of one goes on as it is.
    """
    ranks = _ranks(score)
    return sorted({int(ranks.argmax()), len(ranks) - 1 - int(ranks[::-1].argmin())})


@function(scope="batch")
def resample(
    score: NDArray[np.float32],
    rng: np.random.Generator,
    *,
    weights: Literal["max_min", "max_random"] | Weights = "max_min",
) -> list[int]:
    """A `select`: as many rows as there are, drawn with replacement by weights of their scores, in their order
    (arXiv:2409.06957).

    `pow(k)` weighs by |score|^k; `max_min` by 1 at the batch's highest and lowest score and 0 elsewhere; `max_random`
    by 0.4 at the highest and 0.1 elsewhere. Weights that are all 0, as those of scores that are, count as equal.
    """
    import numpy as np

    scores = _finite(score)
    if not len(scores):
        return []
    ranks = _ranks(score)
    if weights == "max_min":
        weighed = np.where((ranks == ranks.max()) | (ranks == 0), 1.0, 0.0)
    elif weights == "max_random":
        weighed = np.where(ranks == ranks.max(), 0.4, 0.1)
    else:
        weighed = weights(scores)
    total = weighed.sum()
    chances = weighed / total if total > 0 else np.full(len(scores), 1 / len(scores))
    return sorted(int(i) for i in rng.choice(len(scores), len(scores), p=chances))


@option
def pow(*, k: NotNegative = 2.0) -> Weights:
    """Weights |score|^k, as a share of the largest, so that none is too large for a number."""
    import numpy as np

    def weigh(scores: NDArray[np.float64]) -> NDArray[np.float64]:
        size = np.abs(scores)
        return (size / size.max()) ** k if size.any() else np.zeros_like(size)

    return weigh


def _ranks(score: NDArray[np.float32]) -> NDArray[np.int64]:
    """The place of each score among those that differ, from 0 for the lowest."""
    import numpy as np

    scores = _finite(score)
    order = np.argsort(scores)
    lower = scores[order[:-1]]
    higher = scores[order[1:]]
    ranks = np.zeros(len(scores), np.int64)
    ranks[order[1:]] = np.cumsum(higher - lower > 1e-5 * np.maximum(np.abs(lower), np.abs(higher)))
    return ranks


def _finite(score: NDArray[np.float32]) -> NDArray[np.float64]:
    import numpy as np

    scores = np.asarray(score, np.float64)
    wrong = np.flatnonzero(~np.isfinite(scores))
    if len(wrong):
        raise ValueError(
            f"of {len(scores)} rows, row {wrong[0]} (from 0) has the score {scores[wrong[0]]}, which is no "
            "finite number"
        )
    return scores
