"""The mathematics of GRPO, against values worked out by hand or in float64 by formulas written out anew."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from msrl_graph import algorithms
from msrl_graph.ir.graph import Expr, Node
from msrl_graph.runtime.rank import loss

clip = algorithms.load("loss", "clip")
kl = algorithms.load("loss", "kl")
group_norm = algorithms.load("function", "group_norm")


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_clip_by_hand():
    logp = f64(math.log(1.5), math.log(1.5), math.log(0.5), math.log(0.5), 0.1)
    old = f64(0, 0, 0, 0, 0)
    advantage = f64(2, -2, 2, -2, 0)
    # r = 1.5 and 0.5, clipped at 1.2 and 0.8; the worse of the two counts.
    assert torch.allclose(clip(logp, advantage, old)[0], f64(-2.4, 3.0, -1.0, 1.6, 0.0), rtol=1e-12)
    assert torch.allclose(
        clip(logp, advantage, old, low=0.2, high=0.28)[0], f64(-2.56, 3.0, -1.0, 1.6, 0.0), rtol=1e-12
    )


def test_clip_without_old_logp_is_the_policy_gradient():
    logp = f64(-1.0, -2.0).requires_grad_()
    clip(logp, f64(3.0, -0.5))[0].sum().backward()
    assert torch.equal(logp.grad, f64(-3.0, 0.5))


@given(st.floats(-30, 0), st.floats(-30, 0))
def test_kl_forms(p, q):
    got = {form: float(kl(f64(p), f64(q), form=form)) for form in ("k1", "abs", "mse", "low_var")}
    d = max(-20.0, min(20.0, q - p))
    expected = {"k1": p - q, "abs": abs(p - q), "mse": (p - q) ** 2 / 2, "low_var": min(math.expm1(d) - d, 10.0)}
    for form, value in expected.items():
        assert got[form] == pytest.approx(value, rel=1e-9, abs=1e-12)


def test_group_norm_hands_a_nan_on():
    got = group_norm([np.zeros(2, np.int32)] * 3, np.array([1, np.nan, 0], np.float32))
    assert np.isnan(np.concatenate(got)).all()


def test_group_norm_by_hand():
    rows = [np.zeros(3, np.int32), np.zeros(1, np.int32), np.zeros(2, np.int32), np.zeros(2, np.int32)]
    got = group_norm(rows, np.array([1, 0, 0, 1], np.float32))
    a = 0.5 / (math.sqrt(1 / 3) + 1e-6)  # unbiased: squares add up to 1, over 3
    assert [len(g) for g in got] == [3, 1, 2, 2]
    assert [g[0] for g in got] == pytest.approx([a, -a, -a, a], rel=1e-7)
    plain = group_norm(rows, np.array([1, 0, 0, 1], np.float32), std=False)
    assert [g[0] for g in plain] == [0.5, -0.5, -0.5, 0.5]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rewards", [[0.7], [1, 1, 1], [0.1] * 8, [1234567.1] * 7, [-3.3e38] * 11, [1e-30] * 3])
def test_no_spread_gives_zero_never_nan(rewards, dtype):
    got = group_norm([np.zeros(2, np.int32)] * len(rewards), np.array(rewards, dtype))
    assert all((g == 0).all() for g in got)


@pytest.mark.parametrize("size", [1e-30, 1e-9, 0.7, 1234567.1, 1e30])
def test_the_smallest_spread_is_one(size):
    one = np.float32(size)
    scores = np.array([one, np.nextafter(one, np.float32(np.inf)), one], np.float32)
    centred = [float(g[0]) for g in group_norm([np.zeros(1, np.int32)] * 3, scores, std=False)]
    step = float(scores[1]) - float(one)
    assert centred == pytest.approx([-step / 3, 2 * step / 3, -step / 3], rel=1e-6)


def test_rewards():
    exact = algorithms.load("function", "exact_match")
    assert exact(" 85", "85") == 1.0 and exact("85.", "85") == 0.0
    shuffle = algorithms.load("function", "shuffle")
    scores = np.arange(100, dtype=np.float32)
    dealt = shuffle(scores, np.random.default_rng(0))
    assert sorted(dealt) == list(scores) and not np.array_equal(dealt, scores)


def call(name, **options):
    return Expr("call", name, tuple(options.values()), tuple(options))


def update(ratio="token", **attributes):
    clipped = call("clip", low=Expr("number", 0.2), ratio=Expr("word", ratio))
    terms = Expr("+", None, (clipped, Expr("*", None, (Expr("number", 0.5), call("kl")))))
    reads = ("prompt", "response", "old_logp", "ref_logp", "advantage")
    return Node("actor.update", "actor", "update", reads, attributes={"loss": terms, **attributes})


def inputs(logp, lengths, columns):
    return loss.LossInputs({"logp": logp, "lengths": lengths, "rounding": loss.ROUNDS["f32"]}, columns)


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=9),
    cut=st.integers(1, 9),
    reduce=st.sampled_from(["tokens", "sequences", "constant"]),
    ratio=st.sampled_from(["token", "sequence"]),
    seed=st.integers(0, 99),
)
def test_micro_batches_change_neither_loss_nor_gradient(lengths, cut, reduce, ratio, seed):
    how = call("constant") if reduce == "constant" else Expr("word", reduce)
    how = Expr("call", "constant", (Expr("number", 7),), ("",)) if reduce == "constant" else how
    node = update(ratio, reduce=how)
    torch.manual_seed(seed)
    n = sum(lengths)
    values = {c: torch.randn(n, dtype=torch.float64) * 0.1 for c in ("old_logp", "ref_logp", "advantage")}
    whole = loss.LossNormalizer(n, len(lengths))
    starts = np.concatenate([[0], np.cumsum(lengths)])

    def total(parts):
        logp = torch.linspace(-1, 0, n, dtype=torch.float64).requires_grad_()
        value = torch.zeros((), dtype=torch.float64)
        for rows in parts:
            a, b = (starts[rows[0]], starts[rows[-1] + 1]) if len(rows) else (0, 0)
            sizes = torch.tensor([lengths[r] for r in rows], dtype=torch.long)
            per_token = loss.evaluate(node, inputs(logp[a:b], sizes, {c: v[a:b] for c, v in values.items()})).loss
            value = value + loss.reduce(node, per_token, sizes, whole)
        value.backward()
        return float(value.detach()), logp.grad

    rows = np.arange(len(lengths))
    one, many = total([rows]), total(np.array_split(rows, cut))  # more parts than rows: some are empty
    assert many[0] == pytest.approx(one[0], rel=1e-10, abs=1e-12)
    assert torch.allclose(many[1], one[1], rtol=1e-10, atol=1e-14)
    # The reduction written out anew.
    per_token = loss.evaluate(
        node, inputs(torch.linspace(-1, 0, n, dtype=torch.float64), torch.tensor(lengths), values)
    ).loss
    pieces = [per_token[a:b] for a, b in itertools.pairwise(starts)]
    expected = {
        "tokens": per_token.mean(),
        "sequences": torch.stack([p.mean() for p in pieces]).mean(),
        "constant": torch.stack([p.sum() / 7 for p in pieces]).mean(),
    }[reduce]
    assert one[0] == pytest.approx(float(expected), rel=1e-10)
