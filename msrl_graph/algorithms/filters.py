"""Filters: functions that choose the rows that continue.

A `keep` returns one truth value per row. A `select` returns positions, from 0, of the given rows that continue, in
the order in which they continue; a position may occur several times. Each raises ValueError for scores that are not
finite numbers, because they have no order.

Two scores count as equal if they differ by less than 1e-5 of the larger of the two. A reward model rounds
differently on another layout, and identical responses must lead to the same choice. Other scores of the group have
no influence on that.
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
    """A `keep`: the whole group if some responses are correct and some are not.

    Otherwise nothing of the group (arXiv:2503.14476, eq. 11). Correct is a `score` over `above`. A group of one is
    never mixed.
    """
    correct = _check_finite(score) > above
    return [bool(correct.any() and not correct.all())] * len(correct)


@function(scope="group")
def best_of_n(score: NDArray[np.float32], *, n: Count = 1) -> list[int]:
    """A `select`: the `n` best rows of the group, in their order.

    All rows if there are no more than `n`; of equal rows the first. Scores that differ by less than 1e-5 of the
    larger of the two are equal: that much is rounding.
    """
    import numpy as np

    return sorted(int(position) for position in np.argsort(-_rank(score), kind="stable")[:n])


@function(scope="group")
def best_random(score: NDArray[np.float32], rng: np.random.Generator) -> list[int]:
    """A `select`: the best row of the group and a random other one, in their order.

    Source: arXiv:2409.06957. Of equal rows (as `best_of_n` defines it) the first is the best. A group of one
    continues as it is.
    """
    best = int(_rank(score).argmax())
    others = [position for position in range(len(score)) if position != best]
    return sorted([best, *([int(rng.choice(others))] if others else [])])


@function(scope="group")
def best_worst(score: NDArray[np.float32]) -> list[int]:
    """A `select`: the best and the worst row of the group, in their order.

    Source: arXiv:2409.06957. Of equal rows (as `best_of_n` defines it) the first is the best, the last the worst. A
    group of one continues as it is.
    """
    ranks = _rank(score)
    return sorted({int(ranks.argmax()), len(ranks) - 1 - int(ranks[::-1].argmin())})


@function(scope="batch")
def resample(
    score: NDArray[np.float32],
    rng: np.random.Generator,
    *,
    weights: Literal["max_min", "max_random"] | Weights = "max_min",
) -> list[int]:
    """A `select`: rows drawn with replacement by weights of their scores.

    It draws as many rows as there are and returns them in their order (arXiv:2409.06957). `pow(k)` weighs by
    |score|^k; `max_min` by 1 at the batch's highest and lowest score and 0 elsewhere; `max_random` by 0.4 at the
    highest and 0.1 elsewhere. Weights that are all 0, as those of scores that are all 0, count as equal.
    """
    import numpy as np

    scores = _check_finite(score)
    if not len(scores):
        return []
    ranks = _rank(score)
    if weights == "max_min":
        weight_values = np.where((ranks == ranks.max()) | (ranks == 0), 1.0, 0.0)
    elif weights == "max_random":
        weight_values = np.where(ranks == ranks.max(), 0.4, 0.1)
    else:
        weight_values = weights(scores)
    total = weight_values.sum()
    chances = weight_values / total if total > 0 else np.full(len(scores), 1 / len(scores))
    return sorted(int(position) for position in rng.choice(len(scores), len(scores), p=chances))


@option
def pow(*, k: NotNegative = 2.0) -> Weights:
    """Weights |score|^k, relative to the largest, so that none overflows."""
    import numpy as np

    def weigh(scores: NDArray[np.float64]) -> NDArray[np.float64]:
        size = np.abs(scores)
        return (size / size.max()) ** k if size.any() else np.zeros_like(size)

    return weigh


def _rank(score: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the rank of each score among the distinct scores, from 0 for the lowest."""
    import numpy as np

    scores = _check_finite(score)
    order = np.argsort(scores)
    lower = scores[order[:-1]]
    higher = scores[order[1:]]
    ranks = np.zeros(len(scores), np.int64)
    ranks[order[1:]] = np.cumsum(higher - lower > 1e-5 * np.maximum(np.abs(lower), np.abs(higher)))
    return ranks


def _check_finite(score: NDArray[np.float32]) -> NDArray[np.float64]:
    import numpy as np

    scores = np.asarray(score, np.float64)
    bad_rows = np.flatnonzero(~np.isfinite(scores))
    if len(bad_rows):
        raise ValueError(
            f"of {len(scores)} rows, row {bad_rows[0]} (from 0) has the score {scores[bad_rows[0]]}, which is not a "
            "finite number"
        )
    return scores
