"""pass@k, best@k and maj@k against all subsets, counted out one by one."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from votes import voted

from msrl_graph.runtime.metrics.pass_at_k import best_at, majority_at, pass_at

ATTEMPTS = st.lists(
    st.tuples(st.sampled_from((-1.0, 0.0, 0.25, 1.0)), st.sampled_from((b"", b"7", b"12", b"x"))),
    min_size=1,
    max_size=8,
)


@given(ATTEMPTS, st.data())
def test_each_is_the_mean_over_all_subsets(attempts: list[tuple[float, bytes]], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(attempts)))
    subsets = list(combinations(attempts, k))
    values = np.array([value for value, _ in attempts])
    passed = int((values >= 0.25).sum())
    wanted = np.mean([any(value >= 0.25 for value, _ in some) for some in subsets])
    assert pass_at(len(attempts), passed, k) == pytest.approx(wanted)
    assert best_at(values, k) == pytest.approx(np.mean([max(value for value, _ in some) for some in subsets]))
    wanted = np.mean([voted(some) for some in subsets])
    assert majority_at(values, [answer for _, answer in attempts], k) == pytest.approx(wanted)


def test_pass_at_k_is_that_of_the_papers_own_code() -> None:
    """Figure 3 of arXiv:2107.03374, a product for the sake of floating point numbers."""

    def estimator(n: int, c: int, k: int) -> float:
        if n - c < k:
            return 1.0
        return float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))

    for n, c, k in ((200, 3, 100), (200, 0, 10), (1000, 1, 500), (10, 10, 10), (64, 20, 1), (8, 7, 2)):
        assert pass_at(n, c, k) == pytest.approx(estimator(n, c, k), abs=1e-12)


def test_many_attempts_are_voted_on_in_no_time() -> None:
    """64 attempts with answers of all sizes, which have 1.8e18 subsets; of all of them there is one vote."""
    answers = [str(i).encode() for i in range(10) for _ in range(i + 1)] + [b""] * 9
    values = np.array([float(a == b"9") for a in answers])
    assert majority_at(values, answers, len(answers)) == 1.0
    shares = [majority_at(values, answers, k) for k in (1, 8, 32)]
    assert shares[0] == pytest.approx(10 / 64) and shares[0] < shares[1] < shares[2] < 1
    assert not math.isnan(shares[1])
