"""Filters of the package: which rows go on, worked out by hand."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrl_graph import algorithms
from msrl_graph.algorithms import filters

mixed, best_of_n, best_random, best_worst, resample = (
    algorithms.load("function", name) for name in ("mixed", "best_of_n", "best_random", "best_worst", "resample")
)
power = algorithms.load("option", "pow")

scores = st.lists(st.integers(-4, 4), min_size=1, max_size=9).map(lambda s: np.array(s, np.float32))


def generator(seed=0):
    return np.random.default_rng(seed)


@pytest.mark.parametrize(
    ("score", "above", "stays"),
    [
        ([1, 0], 0, True),
        ([1, 1], 0, False),
        ([0, 0], 0, False),
        ([1], 0, False),
        ([-1, 1], 0, True),
        ([0.4, 0.6], 0.5, True),
        ([2, 3], 1, False),
    ],
)
def test_mixed_keeps_groups_whose_answers_differ(score, above, stays):
    assert mixed(np.array(score), above=above) == [stays] * len(score)


def test_best_of_n_by_hand():
    assert best_of_n(np.array([1, 3, 2, 3])) == [1]
    assert best_of_n(np.array([1, 3, 2, 3]), n=3) == [1, 2, 3]
    assert best_of_n(np.array([1, 1]), n=5) == [0, 1]


def test_an_outlier_makes_no_other_scores_equal():
    score = np.array([0.1, 0.9, -1e5, 0.5])
    assert best_of_n(score) == [1] and best_of_n(score, n=2) == [1, 3] and best_worst(score) == [1, 2]
    assert all(1 in best_random(score, generator(seed)) for seed in range(9))


@given(scores, st.integers(1, 9))
def test_best_of_n_leaves_nothing_better_behind(score, n):
    kept = best_of_n(score, n=n)
    assert kept == sorted(set(kept)) and len(kept) == min(n, len(score))
    left = [score[i] for i in range(len(score)) if i not in kept]
    assert not left or max(left) <= min(score[kept])


def test_best_worst_by_hand():
    assert best_worst(np.array([1, 3, 0, 3, 0])) == [1, 4]
    assert best_worst(np.array([2, 2, 2])) == [0, 2]
    assert best_worst(np.array([7])) == [0]


@given(scores, st.integers(0, 99))
def test_best_random_is_the_best_and_any_other(score, seed):
    kept = best_random(score, generator(seed))
    assert int(score.argmax()) in kept and len(set(kept)) == len(kept) == min(2, len(score))
    assert kept == best_random(score, generator(seed))


def test_best_random_reaches_all_others():
    drawn = Counter(i for seed in range(300) for i in best_random(np.array([0, 5, 1, 2]), generator(seed)))
    assert drawn[1] == 300 and all(70 < drawn[i] < 130 for i in (0, 2, 3))


def test_weights_of_resample():
    score = np.array([-3, 0, 1, 3], np.float64)
    assert list(power(k=2)(score)) == pytest.approx([1, 0, 1 / 9, 1], rel=1e-9)
    assert list(power(k=1)(score)) == pytest.approx([1, 0, 1 / 3, 1], rel=1e-9) and list(power(k=0)(score)) == [
        1,
        1,
        1,
        1,
    ]
    assert list(power(k=2)(np.array([1e200, 5e199]))) == pytest.approx([1, 0.25], rel=1e-9)


@pytest.mark.parametrize(
    ("weights", "score", "chances"),
    [
        (power(k=2), [-3, 0, 1, 3], [9 / 19, 0, 1 / 19, 9 / 19]),
        (power(k=2), [0, 0, 0, 0], [0.25] * 4),
        ("max_min", [1, 3, 0, 3], [0, 1 / 3, 1 / 3, 1 / 3]),
        ("max_random", [1, 3, 0, 2], [1 / 7, 4 / 7, 1 / 7, 1 / 7]),
    ],
)
def test_resample_draws_by_weight(weights, score, chances):
    rounds = 3000
    drawn = Counter()
    rng = generator()
    for _ in range(rounds):
        kept = resample(np.array(score, np.float32), rng, weights=weights)
        assert len(kept) == len(score) and kept == sorted(kept)
        drawn.update(kept)
    total = rounds * len(score)
    for i, p in enumerate(chances):
        assert abs(drawn[i] - p * total) <= 5 * math.sqrt(total * p * (1 - p)), (i, drawn[i] / total, p)


@given(scores, st.integers(0, 99))
def test_resample_depends_on_the_seed_and_on_nothing_else(score, seed):
    one, two = (resample(score, generator(seed), weights=power(k=1)) for _ in range(2))
    assert one == two
    # The scale of the scores is none of their order.
    assert resample(score * 2, generator(seed), weights=power(k=1)) == one


def test_an_empty_batch_stays_empty():
    assert resample(np.zeros(0), generator()) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("select", [mixed, best_of_n, best_worst, best_random, resample])
def test_scores_without_an_order_are_refused_with_their_row(select, bad):
    more = (generator(),) if select in (best_random, resample) else ()
    with pytest.raises(
        ValueError, match=rf"of 3 rows, row 1 \(from 0\) has the score {bad}, which is not a finite number"
    ):
        select(np.array([1, bad, 0]), *more)


@pytest.mark.parametrize("noise", [0.0, 2e-7, -2e-7])
def test_rounding_chooses_between_equal_responses_as_none_would(noise):
    """Two responses that are the same, scored on two ranks."""
    score = np.array([0.3, 0.7, -0.2, 0.7, -0.2], np.float64)
    score[3] += noise
    score[4] += noise
    assert (
        filters.best_worst(score) == [1, 4]
        and filters.best_of_n(score) == [1]
        and filters.best_of_n(score, n=3) == [0, 1, 3]
    )
    generator = np.random.default_rng(0)
    assert 1 in filters.best_random(score, generator)
    drawn = filters.resample(score, np.random.default_rng(5), weights="max_min")
    assert drawn == filters.resample(np.round(score, 3), np.random.default_rng(5), weights="max_min") and set(
        drawn
    ) <= {1, 2, 3, 4}
