"""Metrics that are computed from sums of all processes equal those of all values at once."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sample import examples
from stage import Stage, one_rank

from msrl_graph.algorithms.losses import value_clip
from msrl_graph.runtime.metrics.derived import means
from msrl_graph.runtime.metrics.run_status import figures

NUMBERS = st.floats(-100, 100, allow_nan=False, width=32)


def added(parts):
    """The sums of some (name, values) pairs, over all parts."""
    sums = {}
    for part in parts:
        for name, values in part.items():
            total, weight = sums.get(name, (0.0, 0.0))
            sums[name] = (total + float(np.asarray(values, np.float64).sum()), weight + len(values))
    return sums


@examples(60)
@given(st.lists(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=8), min_size=1, max_size=5))
def test_the_explained_variance_is_that_of_all_tokens_together(parts):
    shares = []
    for part in parts:
        values, returns = (torch.tensor(column, dtype=torch.float64) for column in zip(*part, strict=True))
        _, told = value_clip(values, values, returns)
        shares.append({f"value_clip/{name}": figure.numpy() for name, figure in told.items()})
    values, returns = np.array([pair for part in parts for pair in part], np.float64).T
    found = means(added(shares))
    assert not any("/_" in name for name in found)
    if np.var(returns) > 1e-6:
        expected = 1 - np.var(returns - values) / np.var(returns)
        assert found["value_clip/explained_variance"] == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_returns_that_are_all_equal_have_no_explained_variance():
    figure = {"value_clip/error": [0.5], "value_clip/_error_square": [0.25]}
    assert means(added([figure | {"value_clip/_returns": [2.0], "value_clip/_returns_square": [4.0]}])) == {
        "value_clip/error": 0.5
    }


@examples(60)
@given(st.lists(st.lists(st.floats(2**-6, 64, width=32), min_size=1, max_size=8), min_size=1, max_size=5))
def test_the_effective_sample_size_is_that_of_all_tokens_together(parts):
    shares = [{"clip/ratio": part, "clip/_ratio_square": np.square(part)} for part in parts]
    ratios = np.concatenate(parts)
    expected = ratios.sum() ** 2 / np.square(ratios).sum() / len(ratios)
    assert means(added(shares))["clip/effective_sample_size"] == pytest.approx(expected)


def test_an_update_sends_the_squares_of_its_ratios(alone):
    stage = Stage(one_rank())
    columns = stage.sampled()
    columns |= stage.act("actor.infer", columns)
    columns |= {"ref_logp": columns["old_logp"]}
    stage.act("actor.update", columns)
    assert means(stage.told.sums)["clip/effective_sample_size"] == pytest.approx(1, abs=1e-6)  # the first step


def test_the_progress_shows_losses_and_gradients_of_each_update():
    line = {"loss": 3.0, "grad_norm": 9.0, "tokens_per_second": 1.0, "seconds": 1.0}
    assert dict(figures(line, ()))["loss"] == "3"
    line |= {"actor.update/loss": 1.0, "critic.update/loss": 5.0, "critic.update/grad_norm": 8.0}
    shown = dict(figures(line, ()))
    assert (shown["loss actor"], shown["loss critic"], shown["grad_norm critic"]) == ("1", "5", "8")
    assert "loss" not in shown and "grad_norm" not in shown
    own = figures(line | {"kl": 0.2, "clip/kl": 0.002}, ("kl",))
    assert [figure for figure in own if "kl" in figure[0]] == [("kl", "0.200"), ("clip/kl", "0.002")]
