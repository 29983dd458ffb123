"""Terms of a loss; those over pairs are in pair_losses.py.

The arguments of a term are flat float tensors with one value per response token. In a tensor, the rows of a micro-batch
follow one another. A term returns a tensor of the same shape, or one value per row if its return type is `Rows`. The
attribute `reduce` of the update node decides how the values are reduced to one number.

A term may also return figures for the metrics, as (loss, {name: values}). The mean of each figure is a metric of the
run. ir/signatures.py describes arguments such as `logp`, which the run fills in. `lengths` has one integer per row.
Gradients flow through `logp`, `entropy`, `values`, `LogProbs` and `Scores`.

Invariant: the values of a row depend on that row alone, unless the term is marked `scope="mini_batch"`. A term with
this mark is called once with all rows of the mini-batch, and may draw random numbers from `rng`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from .registry import Figures, LogProbs, NotNegative, Positive, Rows, Share, Tokens, loss_term

if TYPE_CHECKING:
    import numpy as np


@loss_term
def clip(
    logp: Tokens,
    advantage: Tokens,
    old_logp: Tokens | None = None,
    lengths: Rows | None = None,
    *,
    low: Share = 0.2,
    high: NotNegative | None = None,
    dual: Positive | None = None,
    ratio: Literal["token", "sequence"] = "token",
) -> tuple[Tokens, Figures]:
    """PPO's clipped surrogate, as a loss (arXiv:1707.06347, eq. 7).

    The loss of a token is max(-A r, -A clip(r, 1 - low, 1 + high)), with the advantage A and the ratio r = exp(logp -
    old_logp). `high` defaults to `low`. If the update does not read `old_logp`, the detached `logp` replaces it, which
    is exact for one optimizer step per batch. `dual` limits the loss of tokens with A < 0 to at most -A dual
    (arXiv:1912.09729, where dual is 3).

    With `ratio = sequence`, r = exp(mean of logp - old_logp over the row) for each token of the row. The gradient of a
    token's r is r times the gradient of the token's `logp`. So one advantage per row gives GSPO (arXiv:2507.18071, eq.
    7 and 10), and one advantage per token gives GSPO-token (eq. 14). Raises ValueError if `ratio = sequence` and there
    are no `lengths`.

    Reports three figures per token: `ratio` is r; `clipped` is whether the loss is clipped, so that the token has no
    gradient; `kl` is r - 1 - log r in nats, where r is always the ratio of the token alone. The mean of `kl` estimates
    KL(old, new), the divergence of the policy from the policy that drew the tokens (k3,
    http://joschu.net/blog/kl-approx.html).
    """
    log_ratio = logp - (logp.detach() if old_logp is None else old_logp)
    kl = _kl(log_ratio)
    if ratio == "sequence":
        log_ratio = _over_rows(log_ratio.detach(), lengths, mean=True) + (logp - logp.detach())
    # Where the loss is bounded, the gradient of a large ratio is 0, but an overflow would make it nan.
    bounded = log_ratio.clamp(max=60)
    r = (bounded.where(advantage >= 0, log_ratio) if dual is None else bounded).exp()
    clipped = r.clamp(1 - low, 1 + (low if high is None else high))
    loss = (-advantage * r).maximum(-advantage * clipped)
    loss = loss if dual is None else loss.where(advantage >= 0, loss.minimum(-advantage * dual))
    return loss, {"ratio": r, "clipped": (loss != -advantage * r).float(), "kl": kl}


@loss_term
def cispo(
    logp: Tokens, old_logp: Tokens, advantage: Tokens, *, low: Share | None = None, high: NotNegative = 4.0
) -> tuple[Tokens, Figures]:
    """CISPO, a bounded ratio without gradient (arXiv:2506.13585, eq. 4 and 5).

    The loss of a token is -clip(r, 1 - low, 1 + high) A logp. The ratio r = exp(logp - old_logp) is detached: only the
    factor `logp` has a gradient. So clipping never removes a token's gradient, it only limits the gradient's size.
    Without `low` there is no lower bound, as in the paper. The default upper bound of the ratio, 1 + high = 5, is from
    arXiv:2510.13786. Reports the same figures as `clip`.
    """
    log_ratio = logp.detach() - old_logp
    r = log_ratio.clamp(max=60).exp()  # finite: otherwise a large ratio times an advantage of 0 is nan
    weight = r.clamp(0.0 if low is None else 1 - low, 1 + high)
    return -weight * advantage * logp, {"ratio": r, "clipped": (weight != r).float(), "kl": _kl(log_ratio)}


@loss_term(scope="mini_batch")
def kl_cov(
    logp: Tokens,
    old_logp: Tokens,
    advantage: Tokens,
    rounding: float = 0.0,
    *,
    share: Share = 0.002,
    coef: NotNegative = 1.0,
) -> tuple[Tokens, Figures]:
    """KL-Cov: -A r, and a penalty on the tokens that lower the entropy most.

    The ratio is r = exp(logp - old_logp). The penalty is coef |logp - old_logp| (arXiv:2505.22617, section 4.2).

    The penalty applies to the fraction `share` of the mini-batch's tokens, but to one token at least. These are the
    tokens with the largest covariance (logp - mean)(A - mean), where both means are over the mini-batch. Of tokens with
    equal covariance, the first are chosen.

    Where |logp - old_logp| is at most `rounding`, the penalty has no gradient, because the sign of the difference is
    noise. In the first optimizer step of an iteration, this is true of every token. Reports the `ratio` of each token,
    whether the token is `chosen` for the penalty, and `kl` as defined in `clip`.
    """
    import torch

    log_ratio = logp - old_logp
    chosen = _covariance(logp, advantage).argsort(descending=True, stable=True)[: _count(logp, share)]
    picked = torch.zeros_like(logp, dtype=torch.bool).index_fill(0, chosen, True)
    r = log_ratio.exp()
    loss = -advantage * r + coef * _flat_abs(log_ratio, rounding) * picked
    return loss, {"ratio": r, "chosen": picked.float(), "kl": _kl(log_ratio)}


@loss_term(scope="mini_batch")
def clip_cov(
    logp: Tokens,
    old_logp: Tokens,
    advantage: Tokens,
    rng: np.random.Generator,
    *,
    low: Share = 0.2,
    high: NotNegative | None = None,
    share: Share = 0.0002,
    least: float = 1.0,
    most: float = 5.0,
) -> tuple[Tokens, Figures]:
    """Clip-Cov: `clip`, without gradient for some tokens that lower the entropy.

    Source: arXiv:2505.22617, section 4.2. The tokens without gradient are drawn at random, and their loss is 0. The
    number of these tokens is the fraction `share` of the mini-batch's tokens, but at least one. The draw is among the
    tokens that `clip` does not clip and whose covariance (logp - mean)(A - mean) is between `least` and `most`; both
    means are over the mini-batch. If fewer tokens meet these two conditions, all of them are drawn.

    Reports the `ratio` of each token, whether the token is `chosen` by this draw, whether the token is `clipped` (by
    `clip` or by this draw), and `kl` as defined in `clip`.
    """
    import torch

    loss, figures = clip(logp, advantage, old_logp, low=low, high=high)
    cov = _covariance(logp, advantage)
    candidates = ((cov > least) & (cov < most) & (figures["clipped"] == 0)).nonzero().flatten()
    chosen = candidates[torch.from_numpy(rng.permutation(len(candidates))[: _count(logp, share)])]
    picked = torch.zeros_like(logp, dtype=torch.bool).index_fill(0, chosen, True)
    clipped = figures["clipped"].masked_fill(picked, 1.0)
    return loss.masked_fill(picked, 0.0), figures | {"clipped": clipped, "chosen": picked.float()}


@loss_term
def kl(
    logp: Tokens, ref_logp: Tokens, rounding: float = 0.0, *, form: Literal["k1", "abs", "mse", "low_var"] = "low_var"
) -> Tokens:
    """The KL divergence of the policy from the reference, in nats per token.

    `form` selects the estimate. `k1` is logp - ref_logp. `abs` is |logp - ref_logp|, without gradient where the
    estimate is at most `rounding`, the rounding error of `logp`. `mse` is (logp - ref_logp)^2 / 2. `low_var` (k3) is
    exp(d) - d - 1 with d = ref_logp - logp (arXiv:2402.03300, eq. 4); d is clamped to +-20 and the estimate to +-10.
    """
    d = ref_logp - logp
    if form == "k1":
        return -d
    if form == "abs":
        return _flat_abs(d, rounding)
    if form == "mse":
        return d.square() / 2
    d = d.clamp(-20, 20)
    return (d.exp() - d - 1).clamp(-10, 10)


@loss_term
def entropy(entropy: Tokens) -> Tokens:
    """The entropy of the policy at each response token, in nats.

    To reward entropy, subtract the term: `loss = clip() - 0.001 * entropy()`.
    """
    return entropy


@loss_term
def sft(logp: Tokens) -> Tokens:
    """The negative log-likelihood of each response token, in nats.

    This is the loss of supervised fine-tuning, applied to the rows that the update reads.
    """
    return -logp


@loss_term
def truncated(
    old_logp: Tokens,
    gen_logp: Tokens,
    lengths: Rows | None = None,
    *,
    most: Positive = 2.0,
    ratio: Literal["token", "sequence", "mean"] = "token",
) -> tuple[Tokens, Figures]:
    """A truncated importance weight, without gradient.

    The weight is min(r, most) with r = exp(old_logp - gen_logp), as in V-trace (arXiv:1802.01561). Multiply another
    term by this weight to correct for the fact that older weights or another engine drew the tokens. `gen_logp` has the
    log-probabilities with which the tokens were drawn.

    `ratio` sets r. `token` is the ratio of each token. `sequence` is the product of the ratios of a row's tokens: the
    exact weight of the row, but its size depends on the row's length. `mean` is the geometric mean of the ratios of a
    row's tokens. Raises ValueError if `sequence` or `mean` has no `lengths`. Reports the `ratio` r of each token, and
    whether r was over `most` (`clipped`).
    """
    r = _ratio(old_logp, gen_logp, lengths, ratio)
    return r.clamp(max=most), {"ratio": r, "clipped": (r > most).float()}


@loss_term
def masked(
    old_logp: Tokens,
    gen_logp: Tokens,
    lengths: Rows | None = None,
    *,
    low: NotNegative = 0.5,
    high: Positive = 2.0,
    ratio: Literal["token", "sequence", "mean"] = "token",
) -> tuple[Tokens, Figures]:
    """A masked importance weight, without gradient.

    Multiply another term by this weight, as with `truncated`. The weight of a token is r if low <= r <= high, and 0
    otherwise; `truncated` defines r and `ratio`. So a token is left out if its probabilities under `old_logp` and
    `gen_logp` differ too much; `truncated` would only limit the weight of this token. With `ratio = token` the weight
    is IcePop (arXiv:2510.18855). Tokens that are left out still count in the mean of the loss. Reports the `ratio` of
    each token, and whether the token is `left_out`.
    """
    r, outside = _mask_outside(old_logp, gen_logp, lengths, low, high, ratio)
    return r.masked_fill(outside, 0.0), {"ratio": r, "left_out": outside.float()}


@loss_term
def trusted(
    old_logp: Tokens,
    gen_logp: Tokens,
    lengths: Rows | None = None,
    *,
    low: NotNegative = 0.5,
    high: Positive = 2.0,
    ratio: Literal["token", "sequence", "mean"] = "mean",
) -> tuple[Tokens, Figures]:
    """1 where low <= r <= high, else 0: rejects tokens that are too far off-policy.

    `truncated` defines r and `ratio`. With the default `ratio = mean`, r is the same for all tokens of a row, so whole
    rows are rejected; trust region masking also rejects whole rows (arXiv:2512.23075). Multiply another term by this
    weight. You can multiply by `truncated` too, with the same `ratio`. Rejected tokens still count in the mean of the
    loss. Reports the `ratio` of each token, and whether the token is rejected (`left_out`).
    """
    r, outside = _mask_outside(old_logp, gen_logp, lengths, low, high, ratio)
    return (~outside).to(r.dtype), {"ratio": r, "left_out": outside.float()}


@loss_term
def value_clip(values: Tokens, value: Tokens, returns: Tokens, *, range: Positive = 0.5) -> tuple[Tokens, Figures]:
    """PPO's value loss, the larger of a plain and a clipped squared error.

    The loss of a token is max((v - R)^2, (clip(v, V - range, V + range) - R)^2) / 2. v is the prediction of the
    weights being updated (`values`), V is the prediction that the advantages were computed from (`value`), and R is
    the return (`returns`). The formula is from the first implementations of arXiv:1707.06347, not from the paper.

    Reports the `error` v - R of each token, and whether the token is `clipped`, so that it has no gradient. The squared
    error, the return and the squared return are also reported; the run computes the explained variance from their
    means.
    """
    clipped = values.clamp(value - range, value + range)  # inside the range it is `values` to the last bit
    error = values - returns
    worst = error.square().maximum((clipped - returns).square())
    figures = {"error": error, "clipped": (error.square() < worst).float()}
    moments = {"_error_square": error.square(), "_returns": returns, "_returns_square": returns.square()}
    return worst / 2, figures | moments


@loss_term
def distil(top_logp: Tokens, top_ids: LogProbs, *, form: Literal["forward", "reverse"] = "forward") -> Tokens:
    """The KL divergence between a teacher and the policy, in nats per token.

    The divergence is over the teacher's k most probable tokens. `top_logp` has the teacher's log-probabilities of these
    k tokens, for each response token. Bind `top_ids` to the column of the k token ids: the term gets the policy's
    log-probabilities of these tokens. Both distributions are normalized over the k tokens, so the divergence is 0 where
    they agree and never negative. `forward` is KL(teacher, policy), which covers all tokens that the teacher may write.
    `reverse` is KL(policy, teacher), which concentrates on the teacher's most probable tokens (arXiv:2306.13649).
    """
    teacher = top_logp.log_softmax(-1)
    policy = top_ids.log_softmax(-1)
    p, q = (teacher, policy) if form == "forward" else (policy, teacher)
    return (p.exp() * (p - q)).sum(-1)


def _flat_abs(difference: Tokens, rounding: float) -> Tokens:
    """Return |difference|; the gradient is 0 where |difference| is at most `rounding`.

    Two forward passes with the same weights may differ by `rounding`.
    """
    size = difference.abs()
    return size.where(size > rounding, size.detach())


def sum_rows(tokens: Tokens, lengths: Rows) -> Rows:
    """Return the sum of each row of `tokens`, in which the rows follow one another."""
    import torch

    rows = [row.sum() for row in tokens.split(lengths.tolist())]  # type: ignore[no-untyped-call]
    return torch.stack(rows) if rows else tokens[:0]


def _over_rows(log_ratio: Tokens, lengths: Rows | None, mean: bool) -> Tokens:
    """Return, for each token, the sum or mean of `log_ratio` over the token's row."""
    if lengths is None:
        raise ValueError("the ratio of a sequence needs the rows' lengths")
    sums = sum_rows(log_ratio, lengths)
    return (sums / lengths.clamp(min=1) if mean else sums).repeat_interleave(lengths)


def _ratio(old_logp: Tokens, gen_logp: Tokens, lengths: Rows | None, level: str) -> Tokens:
    """Return exp(old_logp - gen_logp) for each token.

    `level` is `token` for the ratio of each token, `sequence` for the product over the token's row, or `mean` for the
    geometric mean over the row. The ratio has no gradient and is always finite.
    """
    log_ratio = (old_logp - gen_logp).detach()
    if level != "token":
        log_ratio = _over_rows(log_ratio, lengths, mean=level == "mean")
    return log_ratio.clamp(-60, 60).exp()


def _mask_outside(
    old_logp: Tokens, gen_logp: Tokens, lengths: Rows | None, low: float, high: float, level: str
) -> tuple[Tokens, Tokens]:
    """Return each token's ratio, and whether the ratio is below `low` or above `high`."""
    r = _ratio(old_logp, gen_logp, lengths, level)
    return r, (r < low) | (r > high)


def _kl(log_ratio: Tokens) -> Tokens:
    """Return r - 1 - log r for each ratio r, from log r. The result is always finite."""
    clamped = log_ratio.detach().clamp(max=60)
    return clamped.expm1() - clamped


def _covariance(logp: Tokens, advantage: Tokens) -> Tokens:
    """Return each token's contribution to the covariance of logp and advantage."""
    logp = logp.detach()
    return (logp - logp.mean()) * (advantage - advantage.mean())


def _count(tokens: Tokens, share: float) -> int:
    """Return the number of tokens in a fraction `share` of `tokens`, at least 1."""
    return max(1, int(share * len(tokens)))
