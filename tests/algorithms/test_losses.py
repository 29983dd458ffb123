"""Terms of a loss, against values worked out by hand; relative 1e-9, in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from msrl_graph import algorithms

clip, cispo, kl_cov, clip_cov, entropy, sft = (
    algorithms.load("loss", name) for name in ("clip", "cispo", "kl_cov", "clip_cov", "entropy", "sft")
)
truncated, masked, trusted, value_clip, dpo, distil, bradley_terry = (
    algorithms.load("loss", name)
    for name in ("truncated", "masked", "trusted", "value_clip", "dpo", "distil", "bradley_terry")
)


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def same(got, *expected):
    got = got[0] if isinstance(got, tuple) else got  # without the figures beside
    return torch.allclose(got, f64(*expected), rtol=1e-9, atol=1e-12)


def test_dual_clip_by_hand():
    # A = -2 and r = 6: -A r = 12 unbounded, 2 * 3 = 6 with dual = 3; where A > 0 it changes nothing.
    logp = f64(math.log(6), math.log(6), math.log(1.1))
    advantage = f64(-2, 2, -2)
    old = f64(0, 0, 0)
    assert same(clip(logp, advantage, old), 12, -2.4, 2.2)
    assert same(clip(logp, advantage, old, dual=3.0), 6, -2.4, 2.2)


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_a_ratio_that_overflows_counts_as_clipped_where_the_loss_is_bounded(ratio):
    logp = torch.tensor([0.0, 0.0, -1.0], requires_grad=True)  # in float32 the exponential of 200 is infinite
    old = torch.tensor([-200.0, -200.0, -1.0])
    advantage = torch.tensor([2.0, 0.0, 1.0])
    lengths = torch.tensor([1, 1, 1])
    loss, figures = clip(logp, advantage, old, lengths, ratio=ratio)
    loss.sum().backward()
    assert loss.tolist() == [pytest.approx(-2.4), 0, -1] and logp.grad.tolist() == [0, 0, -1]
    assert figures["clipped"].tolist() == [1, 0, 0]
    logp.grad = None
    loss = clip(logp, -advantage, old, lengths, dual=3.0, ratio=ratio)[0]
    loss.sum().backward()
    assert loss.tolist() == [6, 0, 1] and logp.grad.tolist() == [0, 0, 1]
    assert (
        clip(logp, -advantage, old, lengths, ratio=ratio)[0][0].item() == math.inf
    )  # unbounded: the run is to hear of it


def test_how_far_the_policy_has_gone_by_hand():
    # r = 2, 1 and 0.5: r - 1 - log r, of each token's own r also where the row has one ratio.
    logp = f64(math.log(2), 0, -math.log(2))
    advantage = f64(1, 1, -1)
    old = f64(0, 0, 0)
    expected = 1 - math.log(2), 0, math.log(2) - 0.5
    assert same(clip(logp, advantage, old)[1]["kl"], *expected)
    assert same(clip(logp, advantage, old, torch.tensor([2, 1]), ratio="sequence")[1]["kl"], *expected)
    assert same(
        clip(f64(1e-9), f64(1), f64(0))[1]["kl"], 0
    )  # no rounding of 1 + x: a float32 of 1e-4 would be off by itself


def test_the_ratio_of_a_sequence_by_hand():
    # Two rows of 2 and 1 tokens and an empty one: mean log-ratios (0.3 - 0.1) / 2 = 0.1 and -0.5.
    logp = f64(-0.7, -1.1, -1.5).requires_grad_()
    old = f64(-1, -1, -1)
    advantage = f64(2, 2, 1)
    lengths = torch.tensor([2, 0, 1])
    loss = clip(logp, advantage, old, lengths, low=0.9, high=0.9, ratio="sequence")[0]
    one = math.exp(0.1)
    two = math.exp(-0.5)
    assert same(loss.detach(), -2 * one, -2 * one, -two)
    # The mean of each row's mean has the gradient -A r / length for each of its tokens (arXiv:2507.18071, eq. 10),
    # halved for two rows.
    (loss[:2].mean() / 2 + loss[2] / 2).backward()
    assert same(logp.grad, -2 * one / 4, -2 * one / 4, -two / 2)
    # Clipped as a whole: both tokens of the first row, though one of their own ratios is below 1.
    assert same(clip(logp.detach(), advantage, old, lengths, low=0.05, ratio="sequence"), -2.1, -2.1, -two)
    with pytest.raises(ValueError, match="lengths"):
        clip(logp, advantage, old, ratio="sequence")


def test_the_tokens_that_a_covariance_chooses_by_hand():
    # logp - mean and A - mean: (2, 0, -2) and (1, 0, -1), so covariances 2, 0 and 2: of equals the first.
    logp = f64(-1, -3, -5)
    advantage = f64(2, 1, 0)
    old = f64(-1.5, -3, -5)
    r = math.exp(0.5)
    loss, told = kl_cov(logp, old, advantage, share=0.5, coef=0.1)
    assert same(loss, -2 * r + 0.05, -1, 0) and told["chosen"].tolist() == [1, 0, 0]
    # Of the first and the last one is drawn; the first is clipped by itself.
    loss, told = clip_cov(logp, old, advantage, np.random.default_rng(0))
    assert same(loss, -2.4, -1, 0) and told["chosen"].tolist() == [0, 0, 1] and told["clipped"].tolist() == [1, 0, 1]
    drawn = {
        tuple(clip_cov(logp, logp, advantage, np.random.default_rng(i), share=0.4)[1]["chosen"].tolist())
        for i in range(20)
    }
    assert drawn == {(1, 0, 0), (0, 0, 1)}
    assert not clip_cov(logp, logp, advantage, np.random.default_rng(0), share=1.0, least=2.5)[1]["chosen"].any()
    for none in (
        kl_cov(logp[:0], old[:0], advantage[:0]),
        clip_cov(logp[:0], old[:0], advantage[:0], np.random.default_rng(0)),
    ):
        assert len(none[0]) == 0


def test_a_ratio_without_gradient_by_hand():
    logp = f64(math.log(6), math.log(0.5)).requires_grad_()
    loss, told = cispo(logp, f64(0, 0), f64(2, -1))
    assert same(loss.detach(), -5 * 2 * math.log(6), 0.5 * math.log(0.5)) and told["clipped"].tolist() == [1, 0]
    loss.sum().backward()
    assert same(logp.grad, -10, 0.5)  # the clipped token has a gradient too


def test_plain_terms():
    logp = f64(-1, -2.5)
    assert same(sft(logp), 1, 2.5) and same(entropy(f64(0.7)), 0.7)


def test_weights_of_what_was_drawn_otherwise_by_hand():
    """Two rows, of two tokens and of one, and one without: ratios e^0.5, e^2 and e^-1."""
    drawn = (f64(-1, -1, -1).requires_grad_(), f64(-1.5, -3, 0), torch.tensor([2, 0, 1]))
    e = math.exp
    weight, told = truncated(*drawn, most=2.0)
    assert same(weight, e(0.5), 2, e(-1)) and not weight.requires_grad
    assert same(told["ratio"], e(0.5), e(2), e(-1)) and told["clipped"].tolist() == [0, 1, 0]
    assert same(truncated(*drawn, most=20.0, ratio="sequence")[0], e(2.5), e(2.5), e(-1))
    assert same(truncated(*drawn, most=20.0, ratio="mean")[0], e(1.25), e(1.25), e(-1))
    weight, told = masked(*drawn)
    assert same(weight, e(0.5), 0, 0) and told["left_out"].tolist() == [0, 1, 1]
    assert same(trusted(*drawn)[0], 0, 0, 0) and same(trusted(*drawn, high=4.0)[0], 1, 1, 0)
    assert same(masked(*drawn, low=0.1, ratio="sequence")[0], 0, 0, e(-1))
    far = truncated(f64(0.0), f64(-1e4))[0]
    assert same(far, 2) and same(masked(f64(0.0), f64(-1e4))[0], 0)
    with pytest.raises(ValueError, match="lengths"):
        truncated(*drawn[:2], ratio="sequence")


def test_value_clip_by_hand():
    # v, V, R: inside the range; clipped to 0.5, which is worse for R = 0 below; clipped, where the unclipped is the
    # worse one.
    got = value_clip(f64(0.2, 2, 2), f64(0, 0, 0), f64(1, 3, 0), range=0.5)
    assert same(got, 0.8**2 / 2, 2.5**2 / 2, 2)


def test_the_gradient_of_a_clipped_value():
    values = f64(0.2, 2, 2).requires_grad_()
    value_clip(values, f64(0, 0, 0), f64(1, 3, 0))[0].sum().backward()
    assert same(values.grad, -0.8, 0, 2)  # none where the clipped one counts


PAIRS = {
    "chosen": f64(-1, -1, -2),
    "rejected": f64(-3, -2),
    "ref_chosen": f64(-1.5, -1, -1),
    "ref_rejected": f64(-2, -2.5),
    "chosen_lengths": torch.tensor([2, 1]),
    "rejected_lengths": torch.tensor([1, 1]),
}
# Pair 1: chosen 0.5 over its reference, rejected -1, so z = 1.5. Pair 2: -1 and 0.5, so z = -1.5.


def test_dpo_by_hand():
    def f(z):
        return math.log(1 + math.exp(-0.1 * z))

    assert same(dpo(**PAIRS, beta=0.1), f(1.5), f(-1.5))
    assert same(dpo(**PAIRS, beta=0.1, smoothing=0.2), 0.8 * f(1.5) + 0.2 * f(-1.5), 0.8 * f(-1.5) + 0.2 * f(1.5))
    assert same(dpo(**PAIRS, beta=0.1, form="hinge"), 0.85, 1.15)
    # IPO takes the means over tokens: 0.25 + 1, -1.5; 1 / (2 beta) is 5.
    assert same(dpo(**PAIRS, beta=0.1, form="ipo"), 3.75**2, 6.5**2)
    assert same(dpo(**PAIRS, beta=1.0, form="hinge"), 0, 2.5)


def test_dpo_of_large_margins_and_of_no_rows():
    one = torch.tensor([1])
    ends = {"ref_chosen": f64(0), "ref_rejected": f64(0), "chosen_lengths": one, "rejected_lengths": one}
    assert same(dpo(f64(0), f64(-1e5), **ends), 0) and same(dpo(f64(-1e5), f64(0), **ends), 1e4)
    none = {k: v[:0] for k, v in PAIRS.items()}
    assert len(dpo(**none)[0]) == 0
    empty = {**PAIRS, "rejected": f64(-3), "ref_rejected": f64(-2), "rejected_lengths": torch.tensor([1, 0])}
    assert same(dpo(**empty, form="ipo"), 3.75**2, 36)  # an empty response counts as 0: z = -1


def test_bradley_terry_by_hand():
    """Margins of 2 and of -0.5; chosen is favoured by sigmoid(margin)."""
    chosen = f64(1.5, -1, 1e5).requires_grad_()
    rejected = f64(-0.5, -0.5, -1e5)
    loss, figures = bradley_terry(chosen, rejected)
    assert same(loss.detach(), math.log(1 + math.exp(-2)), math.log(1 + math.exp(0.5)), 0)
    loss.sum().backward()
    assert same(chosen.grad, -1 / (1 + math.exp(2)), -1 / (1 + math.exp(-0.5)), 0)
    assert same(figures["margin"].detach(), 2, -0.5, 2e5) and figures["accuracy"].tolist() == [1, 0, 1]
    loss, figures = bradley_terry(f64(1.5, -1e5), f64(-0.5, 0), margin=1.5)
    assert same(loss, math.log(1 + math.exp(-0.5)), 1e5 + 1.5) and same(figures["margin"], 2, -1e5)


def test_figures_by_hand():
    # Ratios 1.5, 1.5, 0.5, 0.5 of advantages 1, -1, 1, -1: the bound of 0.2 counts where it makes the loss worse.
    logp = torch.log(f64(1.5, 1.5, 0.5, 0.5)).requires_grad_()
    loss, figures = clip(logp, f64(1, -1, 1, -1), f64(0, 0, 0, 0))
    assert same(figures["ratio"].detach(), 1.5, 1.5, 0.5, 0.5) and figures["clipped"].tolist() == [1, 0, 0, 1]
    loss.sum().backward()
    assert (logp.grad == 0).tolist() == [True, False, False, True]
    _, figures = value_clip(f64(0.2, 2, 2), f64(0, 0, 0), f64(1, 3, 0))
    assert same(figures["error"], -0.8, -1, 2) and figures["clipped"].tolist() == [0, 1, 0]
    _, figures = dpo(**PAIRS)
    assert same(figures["margin"], 1.5, -1.5) and figures["accuracy"].tolist() == [1, 0]


def test_a_value_inside_its_range_is_not_clipped():
    torch.manual_seed(0)
    values, value = torch.rand(2, 1000) / 2.01
    loss, figures = value_clip(values, value, torch.randn(1000))
    assert not figures["clipped"].any() and torch.equal(loss, figures["error"].square() / 2)


@given(st.integers(1, 5), st.floats(0.05, 1), st.sampled_from(["sigmoid", "hinge", "ipo"]), st.integers(0, 99))
def test_a_policy_that_is_its_reference_has_no_margin(rows, beta, form, seed):
    torch.manual_seed(seed)
    sizes = torch.randint(1, 4, (2, rows))
    chosen, rejected = (torch.randn(int(n.sum()), dtype=torch.float64) for n in sizes)
    got = dpo(chosen, rejected, chosen, rejected, sizes[0], sizes[1], beta=beta, form=form)
    expected = {"sigmoid": math.log(2), "hinge": 1.0, "ipo": (1 / (2 * beta)) ** 2}[form]
    assert same(got, *[expected] * rows)


def test_distil_by_hand():
    # Two best of probabilities 0.6 and 0.2, the policy's 0.3 and 0.3: over the two, (3/4, 1/4) and (1/2, 1/2).
    teacher = torch.log(f64(0.6, 0.2)).reshape(1, 2)
    policy = torch.log(f64(0.3, 0.3)).reshape(1, 2)
    assert same(distil(teacher, policy), 0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert same(distil(teacher, policy, form="reverse"), 0.5 * math.log(1 / 1.5) + 0.5 * math.log(2))


@given(st.integers(1, 5), st.integers(1, 6), st.sampled_from(["forward", "reverse"]), st.integers(0, 99))
def test_distil_is_zero_where_both_agree_and_never_below(n, k, form, seed):
    torch.manual_seed(seed)
    teacher, policy = torch.randn(2, n, k, dtype=torch.float64).log_softmax(-1)
    assert same(distil(teacher, teacher, form=form), *[0.0] * n)
    assert (distil(teacher, policy, form=form) >= -1e-12).all()
