"""Terms of a loss.

A term takes flat float tensors with one value per response token, of all rows of a micro-batch one after another,
and returns such a tensor. How tokens are reduced is the update's `reduce`, not the term's. A term that returns
`Rows` returns one value per row. Its values for a row depend on that row alone, unless its mark says
`scope="mini_batch"`: then it is called once with all rows of the mini-batch, and may draw with `rng`. signatures.py
describes the arguments that the update fills: `logp`, `entropy`, `values`, `LogProbs` and `Scores` are
differentiable, `lengths` are integers. A term may return figures with its loss, (loss, {name: values}); their means
are metrics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from .registry import NotNegative, Positive, Share, loss_term

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    Tokens: TypeAlias = Tensor
    LogProbs: TypeAlias = Tensor
    Scores: TypeAlias = Tensor
    Rows: TypeAlias = Tensor
    Figures: TypeAlias = dict[str, Tensor]
else:  # the compiler reads annotations, and torch may be missing there
    Tokens = LogProbs = Scores = Rows = Figures = object


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

    max(-A r, -A clip(r, 1 - low, 1 + high)), r = exp(logp - old_logp). `high` defaults to `low`. Without `old_logp`
    the detached `logp` replaces it, which is exact for one optimizer step per batch. `dual` bounds the loss where A
    < 0 by -A dual (arXiv:1912.09729; there 3). `ratio = sequence` takes r = exp(mean of logp - old_logp over the
    row) for each token of the row. Its gradient is r times that of the token's `logp`, so one advantage per row
    gives GSPO (arXiv:2507.18071, eq. 7 and 10) and several give GSPO-token (eq. 14). Raises ValueError if it has no
    `lengths`.

    Reports the `ratio` of each token, whether it is `clipped`, so that it has no gradient, and `kl`, r - 1 - log r
    of the token's own r, in nats. `kl` is an estimate of KL(old, new), the distance of the policy from the one that
    drew the tokens (k3, http://joschu.net/blog/kl-approx.html).
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

    -clip(r, 1 - low, 1 + high) A logp, where the ratio r = exp(logp - old_logp) has no gradient. Every token keeps
    its gradient, which is bounded if the token's ratio is large. Without `low` there is no lower bound, as in the
    paper; ratios up to 5 are those of arXiv:2510.13786. Reports the same figures as `clip`.
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

    The penalty is coef |logp - old_logp| (arXiv:2505.22617, section 4.2). It applies to the `share` of the
    mini-batch's tokens, one at least, with the largest covariance (logp - mean)(A - mean), the means over the
    mini-batch; of equal ones the first. r = exp(logp - old_logp). Within `rounding` of equality the penalty has no
    slope, as at equality: there its sign is noise, as for every token in the first step of an iteration. Reports
    the `ratio` of each token, whether it is `chosen`, and `kl` as `clip` does.
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

    Source: arXiv:2505.22617, section 4.2. The tokens are drawn at random: the `share` of the mini-batch's tokens,
    one at least, from those that are not clipped and whose covariance (logp - mean)(A - mean), the means over the
    mini-batch, is between `least` and `most`. Their loss is 0. Reports the `ratio` of each token, whether it is
    `clipped` for either reason or `chosen` in this way, and `kl`, as `clip` does.
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

    The estimate is k1 = logp - ref; abs, which has no slope within `rounding` of equality; mse = (logp - ref)^2 /
    2; or low_var (k3) = exp(d) - d - 1 with d = ref - logp clamped to +-20 and the result to +-10
    (arXiv:2402.03300, eq. 4).
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

    A bonus for it has a minus: `loss = clip() - 0.001 * entropy()`.
    """
    return entropy


@loss_term
def sft(logp: Tokens) -> Tokens:
    """The negative log-likelihood of each response token, in nats.

    It is the loss of supervised fine-tuning on selected rows.
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

    min(r, most), r = exp(old_logp - gen_logp), as in V-trace (arXiv:1802.01561). A factor for another term: it
    corrects for tokens that were drawn with `gen_logp`, by older weights or another engine. `ratio = sequence`
    takes for each token of a row the product of the row's r, which is exact and varies with the row's length;
    `mean` takes their geometric mean. Raises ValueError if these have no `lengths`. Reports the `ratio` of each
    token, and whether it is `clipped`.
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

    It multiplies another term, as `truncated` does, and `ratio` has the same meaning. The weight of a token is r if
    low <= r <= high, else 0: a token whose two probabilities differ too much is left out, where `truncated` clips its
    weight. With `ratio = token` it is IcePop (arXiv:2510.18855). Tokens that are left out still count in the mean.
    Reports the `ratio` of each token, and whether it is `left_out`.
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
    """1 where low <= r <= high, else 0: rejection of what was drawn too differently.

    Whole rows are rejected, as by trust region masking (arXiv:2512.23075), here by the geometric mean of the row's
    r. A factor for another term, if need be together with `truncated`, with the same `ratio`. Tokens that are left
    out still count in the mean. Reports the `ratio` of each token, and whether it is `left_out`.
    """
    r, outside = _mask_outside(old_logp, gen_logp, lengths, low, high, ratio)
    return (~outside).to(r.dtype), {"ratio": r, "left_out": outside.float()}


@loss_term
def value_clip(values: Tokens, value: Tokens, returns: Tokens, *, range: Positive = 0.5) -> tuple[Tokens, Figures]:
    """PPO's value loss, the larger of a plain and a clipped squared error.

    max((v - R)^2, (clip(v, V - range, V + range) - R)^2) / 2. v are the predictions of the weights being updated
    (`values`), V those that the advantages were computed from (`value`), R the returns. (It comes from the first
    implementations of arXiv:1707.06347, not from the paper.) Reports the `error` v - R of each token, and whether
    it is `clipped`, so that it has no gradient. The explained variance follows from the moments of errors and
    returns.
    """
    clipped = values.clamp(value - range, value + range)  # inside the range it is `values` to the last bit
    error = values - returns
    worst = error.square().maximum((clipped - returns).square())
    figures = {"error": error, "clipped": (error.square() < worst).float()}
    moments = {"_error_square": error.square(), "_returns": returns, "_returns_square": returns.square()}
    return worst / 2, figures | moments


@loss_term
def dpo(
    chosen: LogProbs,
    rejected: LogProbs,
    ref_chosen: Tokens,
    ref_rejected: Tokens,
    chosen_lengths: Rows,
    rejected_lengths: Rows,
    *,
    beta: Positive = 0.1,
    form: Literal["sigmoid", "hinge", "ipo"] = "sigmoid",
    smoothing: Share = 0.0,
) -> tuple[Rows, Figures]:
    """Direct preference optimization, one value per pair (arXiv:2305.18290, eq. 7).

    (1 - s) f(z) + s f(-z), s = `smoothing`. z = (chosen - rejected) - (ref_chosen - ref_rejected), the sums of the
    log-probabilities of a response's tokens, of the weights being updated and of the reference. f(z) is -log
    sigmoid(beta z); with `hinge` max(0, 1 - beta z) (arXiv:2305.10425); with `ipo` (z - 1 / (2 beta))^2 on the
    means over a response's tokens (arXiv:2310.12036, eq. 17). An empty response counts as 0. Reports the `margin` z
    of each pair, and whether it is above 0 (`accuracy`).
    """
    from torch.nn.functional import softplus

    better = _sum_rows(chosen - ref_chosen, chosen_lengths)
    worse = _sum_rows(rejected - ref_rejected, rejected_lengths)
    if form == "ipo":
        better = better / chosen_lengths.clamp(min=1)
        worse = worse / rejected_lengths.clamp(min=1)
    z = better - worse

    def f(z: Tensor) -> Tensor:
        if form == "sigmoid":
            return softplus(-beta * z)
        return (1 - beta * z).clamp(min=0) if form == "hinge" else (z - 1 / (2 * beta)).square()

    loss = (1 - smoothing) * f(z) + smoothing * f(-z) if smoothing else f(z)
    return loss, {"margin": z, "accuracy": (z > 0).float()}


@loss_term
def bradley_terry(chosen: Scores, rejected: Scores, *, margin: NotNegative = 0.0) -> tuple[Rows, Figures]:
    """The loss of a reward model that learns from pairs, one value per pair.

    -log sigmoid(chosen - rejected - margin) (arXiv:2203.02155, eq. 1; with a margin arXiv:2307.09288, eq. 2).
    `chosen` and `rejected` are the scores, by the weights being updated, of the prompt followed by either response.
    `margin` is by how much the first is to exceed the second. Reports the `margin` of each pair, chosen - rejected,
    and whether it is above 0 (`accuracy`).
    """
    from torch.nn.functional import softplus

    difference = chosen - rejected
    return softplus(margin - difference), {"margin": difference, "accuracy": (difference > 0).float()}


@loss_term
def distil(top_logp: Tokens, top_ids: LogProbs, *, form: Literal["forward", "reverse"] = "forward") -> Tokens:
    """The KL divergence between a teacher and the policy, in nats per token.

    It is over the teacher's k best tokens. `top_logp` are the teacher's log-probabilities of its k best, one row of
    k per response token, and `top_ids`, which binds the column of their ids, receives the policy's for the same
    tokens. Both are normalized over the k, so the divergence is 0 where they agree and never below. `forward` is
    KL(teacher, policy), which covers everything that the teacher may say; `reverse` is KL(policy, teacher), which
    seeks what it says most (arXiv:2306.13649).
    """
    teacher = top_logp.log_softmax(-1)
    policy = top_ids.log_softmax(-1)
    p, q = (teacher, policy) if form == "forward" else (policy, teacher)
    return (p.exp() * (p - q)).sum(-1)


def _flat_abs(difference: Tokens, rounding: float) -> Tokens:
    """Return |difference| without slope near equality.

    The slope is 0 as far as two passes of the same weights may differ.
    """
    size = difference.abs()
    return size.where(size > rounding, size.detach())


def _sum_rows(tokens: Tokens, lengths: Rows) -> Rows:
    """Return the sum of each row; the rows are one after another in `tokens`."""
    import torch

    rows = [row.sum() for row in tokens.split(lengths.tolist())]  # type: ignore[no-untyped-call]
    return torch.stack(rows) if rows else tokens[:0]


def _over_rows(log_ratio: Tokens, lengths: Rows | None, mean: bool) -> Tokens:
    """Return for each token the sum or the mean over its row."""
    if lengths is None:
        raise ValueError("the ratio of a sequence needs the rows' lengths")
    sums = _sum_rows(log_ratio, lengths)
    return (sums / lengths.clamp(min=1) if mean else sums).repeat_interleave(lengths)


def _ratio(old_logp: Tokens, gen_logp: Tokens, lengths: Rows | None, level: str) -> Tokens:
    """Return exp(old_logp - gen_logp) of each token or row.

    It has no gradient and is always finite.
    """
    log_ratio = (old_logp - gen_logp).detach()
    if level != "token":
        log_ratio = _over_rows(log_ratio, lengths, mean=level == "mean")
    return log_ratio.clamp(-60, 60).exp()


def _mask_outside(
    old_logp: Tokens, gen_logp: Tokens, lengths: Rows | None, low: float, high: float, level: str
) -> tuple[Tokens, Tokens]:
    """Return the ratios, and a mask of those outside the bounds."""
    r = _ratio(old_logp, gen_logp, lengths, level)
    return r, (r < low) | (r > high)


def _kl(log_ratio: Tokens) -> Tokens:
    """Return r - 1 - log r of each ratio, always finite."""
    clamped = log_ratio.detach().clamp(max=60)
    return clamped.expm1() - clamped


def _covariance(logp: Tokens, advantage: Tokens) -> Tokens:
    """Return each token's part of the covariance of log-probability and advantage."""
    logp = logp.detach()
    return (logp - logp.mean()) * (advantage - advantage.mean())


def _count(tokens: Tokens, share: float) -> int:
    """Return how many tokens a share of them is, one at least."""
    return max(1, int(share * len(tokens)))
