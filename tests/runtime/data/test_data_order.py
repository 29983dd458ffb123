"""The order of rows: every pass deals each once, draws follow weights, and any part can be had at once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from sample import examples

from msrl_graph.noise import RandomStream
from msrl_graph.runtime.data import data_order

STREAM = RandomStream(0, "weighted")
WEIGHTS = st.lists(
    st.one_of(st.just(0.0), st.floats(0, allow_nan=False, allow_infinity=False)), min_size=1, max_size=30
)


@given(WEIGHTS, st.integers(0, 3), st.integers(0, 50), st.data())
def test_any_part_of_an_order_is_the_same_whatever_came_before(weights, seed, iteration, data):
    weights = np.array(weights)
    size = len(weights)
    deals = (
        lambda position, count: data_order.RowOrder(RandomStream(seed, "order"), size).take(position, count),
        lambda position, count: data_order.draw_rows(
            RandomStream(seed, "weighted"), iteration, weights, position, count
        ),
    )
    for deal in deals:
        whole = deal(0, 3 * size)
        for turn in range(3):
            assert sorted(whole[turn * size : (turn + 1) * size]) == list(range(size))
        cuts = sorted(data.draw(st.lists(st.integers(0, 3 * size), max_size=4)))
        rounds = list(zip([0, *cuts], [*cuts, 3 * size], strict=True))
        dealt = {(begin, end): deal(begin, end - begin) for begin, end in data.draw(st.permutations(rounds))}
        assert np.concatenate([dealt[ends] for ends in rounds]).tolist() == whole.tolist()


@given(WEIGHTS, st.integers(0, 50))
def test_rows_without_weight_come_last_and_weights_are_relative(weights, iteration):
    weights = np.array(weights)
    drawn = data_order.draw_rows(STREAM, iteration, weights, 0, len(weights))
    certain = int((weights > 0).sum())
    assert set(drawn[:certain]) == set(np.flatnonzero(weights > 0))
    if not certain:
        assert (
            drawn.tolist() == data_order.draw_rows(STREAM, iteration, np.ones(len(weights)), 0, len(weights)).tolist()
        )
    if 0 < weights.max() < 1e300 and weights[weights > 0].min() > 1e-290:
        assert drawn.tolist() == data_order.draw_rows(STREAM, iteration, weights * 4, 0, len(weights)).tolist()


def test_draws_are_in_proportion_to_the_weights():
    weights = np.array([1.0, 2, 0, 3, 4])
    times = 4000
    drawn = np.array([data_order.draw_rows(RandomStream(7, "weighted"), i, weights, 0, 2) for i in range(times)])
    share = weights / weights.sum()
    # One row after another: the first by the shares, the second by the shares of those that are left.
    first = np.bincount(drawn[:, 0], minlength=5)
    both = share[:, None] * share / (1 - share)[:, None]
    np.fill_diagonal(both, 0)
    second = np.bincount(drawn[:, 1], minlength=5)
    for counted, expected in ((first, share), (second, both.sum(0))):
        expected = expected * times
        assert counted[2] == expected[2] == 0
        there = expected > 0
        # 3 degrees of freedom: above 16.3 once in 1000.
        assert ((counted - expected)[there] ** 2 / expected[there]).sum() < 16.3


def test_a_draw_is_another_with_another_seed_iteration_or_pass():
    weights = np.linspace(0.5, 1, 20)
    first = data_order.draw_rows(STREAM, 0, weights, 0, 20).tolist()
    others = [
        data_order.draw_rows(RandomStream(1, "weighted"), 0, weights, 0, 20),
        data_order.draw_rows(STREAM, 1, weights, 0, 20),
        data_order.draw_rows(STREAM, 0, weights, 20, 20),
    ]
    assert all(first != other.tolist() for other in others)


@given(st.integers(0, 10_000))
@examples(20)
def test_the_chance_of_a_row_does_not_depend_on_where_it_stands(iteration):
    """The keys are those of rows: to take a row's weight moves no other past another."""
    weights = np.random.default_rng(iteration).random(12) + 0.1
    drawn = data_order.draw_rows(STREAM, iteration, weights, 0, 12).tolist()
    weights[3] = 0
    assert [r for r in drawn if r != 3] == data_order.draw_rows(STREAM, iteration, weights, 0, 11).tolist()
