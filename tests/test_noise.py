"""Sampling noise is a function of its key alone, and looks random."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from msrl_graph import noise

small = st.integers(0, 2**40)


@given(small, small, st.lists(small, min_size=1, max_size=50), small, st.randoms(use_true_random=False))
def test_neither_the_batch_nor_the_place_in_it_matters(seed, iteration, rows, step, random):
    whole = noise.uniform(seed, iteration, np.array(rows), step)
    order = list(range(len(rows)))
    random.shuffle(order)
    mixed = noise.uniform(seed, iteration, np.array(rows)[order], step)
    assert np.array_equal(whole[order], mixed)
    assert noise.uniform(seed, iteration, rows[0], step) == whole[0]


def test_each_part_of_the_key_and_its_place_matter():
    base = noise.keys(1, 2, 3, 4)
    for other in ((2, 1, 3, 4), (1, 2, 4, 3), (1, 2, 3, 5), (0, 2, 3, 4), (1, 2, 3)):
        assert noise.keys(*other) != base


def test_it_is_uniform_and_uncorrelated():
    u = noise.uniform(0, 7, np.arange(200_000), 3)
    counts = np.histogram(u, bins=100, range=(0, 1))[0]
    chi2 = ((counts - 2000) ** 2 / 2000).sum()
    assert 50 < chi2 < 160  # 99 degrees of freedom: a thousandth lies outside either side
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.01
    assert abs(np.corrcoef(u, noise.uniform(0, 8, np.arange(200_000), 3))[0, 1]) < 0.01


def test_a_generator_is_keyed():
    assert noise.generator(1, 2).integers(1 << 60) == noise.generator(1, 2).integers(1 << 60)
    assert noise.generator(1, 2).integers(1 << 60) != noise.generator(1, 3).integers(1 << 60)
