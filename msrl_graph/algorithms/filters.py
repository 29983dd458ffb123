"""Filters: functions that choose which rows the nodes after a filter get.

A row *continues* if the nodes after the filter get the row. A `keep` function returns one truth value per row. A
`select` function returns the positions of the rows that continue, counted from 0, in the order in which the rows
continue. A position may occur several times. Each function raises ValueError if a score is not a finite number, because
such scores have no order.

Two scores count as equal if they differ by at most 1e-5 of the larger of the two. The tolerance is necessary because a
reward model on another layout makes different rounding errors, and these must not change the choice. Two scores also
count as equal if a chain of other scores leads from one to the other, and neighbors in the chain differ by at most this
tolerance.

Invariant: scores that differ only by rounding lead to the same choice.
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
    """A `keep`: the whole group if some responses are correct and some are incorrect.

    A group whose responses are all correct or all incorrect is dropped (arXiv:2503.14476, eq. 11). A response is
    correct if its `score` is over `above`. A group of one response is therefore always dropped.
    """
    correct = _check_finite(score) > above
    return [bool(correct.any() and not correct.all())] * len(correct)


@function(scope="group")
def best_of_n(score: NDArray[np.float32], *, n: Count = 1) -> list[int]:
    """A `select`: the `n` best rows of the group, in their original order.

    If the group has at most `n` rows, all rows continue. Of rows with equal scores, the first rows are selected.
    Scores that differ by at most 1e-5 of the larger of the two are equal, because such a difference can be a rounding
    error.
    """
    import numpy as np

    return sorted(int(position) for position in np.argsort(-_rank(score), kind="stable")[:n])


@function(scope="group")
def best_random(score: NDArray[np.float32], rng: np.random.Generator) -> list[int]:
    """A `select`: the best row of the group and one other row, drawn at random.

    The two rows are in their original order (arXiv:2409.06957). If several rows have the best score, the first of
    these rows is selected; `best_of_n` defines when scores are equal. A group of one row continues unchanged.
    """
    best = int(_rank(score).argmax())
    others = [position for position in range(len(score)) if position != best]
    return sorted([best, *([int(rng.choice(others))] if others else [])])


@function(scope="group")
def best_worst(score: NDArray[np.float32]) -> list[int]:
    """A `select`: the best and the worst row of the group, in their original order.

    Source: arXiv:2409.06957. If several rows have the best score, the first of these rows is selected. If several rows
    have the worst score, the last of these rows is selected. `best_of_n` defines when scores are equal. A group of one
    row continues unchanged.
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
    """A `select`: rows drawn with replacement, weighted by their scores.

    The number of drawn rows is the number of rows in the batch. The drawn rows are in their original order
    (arXiv:2409.06957). `weights` sets the weight of a row:

    - `pow(k)`: |score|^k.
    - `max_min`: 1 for the highest and the lowest score of the batch, 0 for other scores.
    - `max_random`: 0.4 for the highest score of the batch, 0.1 for other scores.

    If all weights are 0, for example because all scores are 0, all rows get the same weight.
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
    """The weights |score|^k, for `resample`.

    The scores are divided by the largest |score| first, so that no weight overflows.
    """
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
