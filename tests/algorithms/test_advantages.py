"""Advantages, rewards and states, against values worked out by hand or from their definitions; relative 1e-9, in
float64."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrl_graph import algorithms

leave_one_out, discounted, gae, adaptive_kl, moving_mean, around, overlong, weighted_sum = (
    algorithms.load("function", name)
    for name in (
        "leave_one_out",
        "discounted",
        "gae",
        "adaptive_kl",
        "moving_mean",
        "around",
        "overlong",
        "weighted_sum",
    )
)

number = st.floats(-5, 5).map(lambda x: round(x, 3))
lengths = st.lists(st.integers(0, 6), min_size=1, max_size=6)


def tokens(*sizes):
    return [np.zeros(n, np.int32) for n in sizes]


def rows(*values):
    return [np.array(v, np.float64) for v in values]


def near(expected):
    return pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_leave_one_out_by_hand():
    got = leave_one_out(tokens(2, 1, 0), np.array([1, 0, 4], np.float32))
    assert [list(g) for g in got] == [[near(-1), near(-1)], [near(-2.5)], []]  # 1 - (0 + 4) / 2, 0 - (1 + 4) / 2


@given(st.lists(number, min_size=2, max_size=9))
def test_leave_one_out_is_the_definition_and_sums_to_zero(scores):
    got = [float(g[0]) for g in leave_one_out(tokens(*[1] * len(scores)), np.array(scores))]
    expected = [s - sum(scores[:i] + scores[i + 1 :]) / (len(scores) - 1) for i, s in enumerate(scores)]
    assert got == near(expected) and sum(got) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("scores", [[0.7], [1, 1, 1], [0.1] * 8, [-0.3] * 7])
def test_groups_without_spread_have_no_advantage(scores):
    got = leave_one_out(tokens(*[2] * len(scores)), np.array(scores, np.float32))
    assert all((g == 0).all() and len(g) == 2 for g in got)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_goes_on_to_all_that_is_compared_with_it(bad):
    with np.errstate(invalid="ignore"):
        assert not np.isfinite(np.concatenate(leave_one_out(tokens(1, 2), np.array([bad, 1])))).any()
        zero = rows([0, 0], [0])
        assert not np.isfinite(np.concatenate(discounted(tokens(2, 1), np.array([1, bad]), zero, zero))).any()
        advantage, returns = gae(tokens(2, 1), np.array([1, 0]), rows([0, 0], [bad]), zero, zero, 0.1)
    assert not np.isfinite(np.concatenate(advantage)).any()
    assert np.isfinite(returns[0]).all() and not np.isfinite(returns[1]).any()


def test_discounted_by_hand():
    # Rewards -0.5 (old - ref), the score on the last token: (-0.5, 2.5) and (-1,); returns at gamma 0.5: (0.75, 2.5),
    # (-1).
    got = discounted(
        tokens(2, 1, 0), np.array([2, 0, 9]), rows([1, -1], [2], []), rows([0, 0], [0], []), kl=0.5, gamma=0.5
    )
    mean = 0.75
    returns = (0.75, 2.5, -1.0)
    scale = math.sqrt((0 + 1.75**2 + 1.75**2) / 2 + 1e-8)
    assert list(np.concatenate(got)) == near([(r - mean) / scale for r in returns]) and [len(g) for g in got] == [
        2,
        1,
        0,
    ]


def test_gae_by_hand():
    # beta 0.1 and old - ref = (1, 2): rewards -0.1 and 1 - 0.2. V = (0.5, 0.25), gamma 0.9, lambda 0.5.
    d2 = 0.8 - 0.25
    d1 = -0.1 + 0.9 * 0.25 - 0.5
    a1 = d1 + 0.45 * d2
    a2 = d2
    args = (tokens(2), np.array([1.0]), rows([0.5, 0.25]), rows([-1, -1]), rows([-2, -3]), 0.1)
    advantage, returns = gae(*args, gamma=0.9, lam=0.5, whiten=False)
    assert list(advantage[0]) == near([-0.1275, 0.55]) and [a1, a2] == near([-0.1275, 0.55])
    assert list(returns[0]) == near([-0.1275 + 0.5, 0.8])
    white, same = gae(*args, gamma=0.9, lam=0.5)
    half = (a2 - a1) / 2
    assert list(white[0]) == near([-half / math.sqrt(2 * half**2 + 1e-8), half / math.sqrt(2 * half**2 + 1e-8)])
    assert list(same[0]) == near(list(returns[0])), "returns are of the advantages before whitening"


@given(lengths, st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.randoms(use_true_random=False))
def test_gae_is_the_double_sum_of_its_definition(sizes, gamma, lam, beta, rng):
    def draw():
        return rows(*[[rng.uniform(-2, 2) for _ in range(n)] for n in sizes])

    old = draw()
    ref = draw()
    value = draw()
    score = np.array([rng.uniform(-2, 2) for _ in sizes])
    advantage, returns = gae(tokens(*sizes), score, value, old, ref, beta, gamma=gamma, lam=lam, whiten=False)
    for i, n in enumerate(sizes):
        assert len(advantage[i]) == len(returns[i]) == n
        reward = [-beta * (old[i][t] - ref[i][t]) + (score[i] if t == n - 1 else 0) for t in range(n)]
        after = [*value[i], 0.0]
        delta = [reward[t] + gamma * after[t + 1] - after[t] for t in range(n)]
        for t in range(n):
            total = math.fsum((gamma * lam) ** k * delta[t + k] for k in range(n - t))
            assert advantage[i][t] == near(total) and returns[i][t] == near(total + value[i][t])


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(lambda s: sum(s) > 3), st.integers(0, 99))
def test_whitened_tokens_have_mean_0_and_variance_1(sizes, seed):
    rng = np.random.default_rng(seed)
    # Large, so that the 1e-8 beside the variance is nothing to it.
    old, ref, value = (rows(*[rng.normal(size=n) * 100 for n in sizes]) for _ in range(3))
    score = rng.normal(size=len(sizes)) * 100
    for got in (
        discounted(tokens(*sizes), score, old, ref, kl=0.1),
        gae(tokens(*sizes), score, value, old, ref, 0.1)[0],
    ):
        flat = np.concatenate(got)
        assert [len(g) for g in got] == sizes
        assert flat.mean() == pytest.approx(0, abs=1e-9) and flat.var(ddof=1) == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("sizes", [(1,), (0,), (0, 0), (3, 3)])
def test_a_batch_without_spread_is_whitened_to_zero(sizes):
    zero = rows(*[np.zeros(n) for n in sizes])
    ends = np.array([0.0] * len(sizes))
    for got in (discounted(tokens(*sizes), ends, zero, zero), gae(tokens(*sizes), ends, zero, zero, zero, 0.1)[0]):
        assert [len(g) for g in got] == list(sizes) and all((g == 0).all() for g in got)


def test_without_log_probabilities_there_is_no_penalty():
    score = np.array([2.0, -1.0])
    value = rows([0.1, 0.2], [0.3])
    ones = rows([1, 1], [1])
    zeros = rows([0, 0], [0])
    plain = gae(tokens(2, 1), score, value)
    none = gae(tokens(2, 1), score, value, ones, zeros, 0.0)
    assert [list(a) for part in plain for a in part] == [list(a) for part in none for a in part]
    plain = discounted(tokens(2, 1), score)
    none = discounted(tokens(2, 1), score, ones, zeros, kl=0.0)
    assert [list(a) for a in plain] == [list(a) for a in none]


def test_log_probabilities_of_another_length_are_refused():
    with pytest.raises(ValueError, match="a response of 3 tokens has 2 log-probabilities"):
        discounted(tokens(3), np.array([1.0]), rows([0, 0]), rows([0, 0]))


@given(lengths, st.integers(0, 99))
def test_tokens_that_a_mask_leaves_out_are_as_if_they_were_not_there(sizes, seed):
    rng = np.random.default_rng(seed)
    mask = [rng.random(n) < 0.6 for n in sizes]
    old, ref, value = ([np.where(m, rng.normal(size=len(m)), np.nan) for m in mask] for _ in range(3))
    score = rng.normal(size=len(sizes))
    left = [[row[m] for row, m in zip(part, mask, strict=True)] for part in (tokens(*sizes), old, ref, value)]

    def check(whole, alone):
        for row, m, own in zip(whole, mask, alone, strict=True):
            assert len(row) == len(m) and list(row[m]) == list(own) and not row[~m].any()

    whole = discounted(tokens(*sizes), score, old, ref, mask, kl=0.1, gamma=0.9)
    check(whole, discounted(left[0], score, left[1], left[2], kl=0.1, gamma=0.9))
    for whiten in (True, False):
        whole = gae(tokens(*sizes), score, value, old, ref, 0.1, mask, gamma=0.9, lam=0.8, whiten=whiten)
        alone = gae(left[0], score, left[3], left[1], left[2], 0.1, gamma=0.9, lam=0.8, whiten=whiten)
        for pair in zip(whole, alone, strict=True):
            check(*pair)
    expected = adaptive_kl(left[1], left[2], 0.05, target=0.4, horizon=10)
    assert adaptive_kl(old, ref, 0.05, mask, target=0.4, horizon=10) == expected


def test_adaptive_kl_by_hand():
    old = rows([1.0, 0.0], [0.4], [])
    ref = rows([0.0, 0.0], [0.0], [])
    # Means 0.5 and 0.4 of two responses, the empty one aside: kl 0.45.
    assert adaptive_kl(old, ref, 0.05, target=0.4, horizon=10) == near(0.05 * (1 + 0.125 * 2 / 10))
    assert adaptive_kl(old, ref, 0.05, target=0.1, horizon=10) == near(0.05 * (1 + 0.2 * 2 / 10))  # 3.5, clipped
    assert adaptive_kl(old, ref, 0.05, target=4, horizon=10) == near(0.05 * (1 - 0.2 * 2 / 10))
    assert adaptive_kl(rows([]), rows([]), 0.05, target=1, horizon=10) == 0.05
    assert math.isnan(adaptive_kl(rows([math.nan]), rows([0]), 0.05, target=1, horizon=10))


def test_moving_mean_by_hand():
    assert moving_mean(np.array([1, 0, 0, 1]), 0.2, decay=0.9) == near(0.9 * 0.2 + 0.1 * 0.5)
    assert math.isnan(moving_mean(np.array([math.nan, 1]), 0.2))


def test_around_by_hand():
    assert list(around(np.array([0, 0.25, 0.5, 0.75, 1]), target=0.5)) == near([0.05, 0.5, 1, 0.5, 0.05])
    assert list(around(np.array([0, 0.2, 1]), target=0.2, floor=0)) == near([0.75, 1, 0])
    assert list(around(np.array([0.0, 1.0]), target=1, floor=0)) == near([0, 1])


def test_overlong_by_hand():
    # No cost up to 12 of 16 tokens, then a quarter of the factor a token.
    got = [overlong(np.zeros(n), 1.0, max=16, buffer=4, factor=2.0) for n in (0, 12, 13, 16, 17, 60)]
    assert got == near([1, 1, 0.5, -1, -1, -1])  # and no more beyond, as equation 13
    assert math.isnan(overlong(np.zeros(3), math.nan, max=16, buffer=4))


def test_a_buffer_over_the_length_is_refused():
    with pytest.raises(ValueError, match="the buffer of 17 tokens is over max = 16"):
        overlong(np.zeros(3), 1.0, max=16, buffer=17)
    assert overlong(np.zeros(4), 1.0, max=16, buffer=16) == near(0.75)


def test_weighted_sum_by_hand():
    assert weighted_sum(1.0, 0.5, weights=[0.7, 0.3]) == near(0.85)
    assert math.isnan(weighted_sum(1.0, math.nan, weights=[1, 0]))
    with pytest.raises(ValueError):
        weighted_sum(1.0, weights=[0.7, 0.3])
