"""Terms of a policy loss.

Each takes flat float tensors with one value a response token, of all rows of a micro-batch one after another, and gives such a tensor
back; how tokens are reduced is the update's `reduce`, not the term's. `logp` is differentiable: the log-probability of each token
under the weights being updated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from .registry import loss_term

if TYPE_CHECKING:
    from torch import Tensor

    Tokens: TypeAlias = Tensor
else:
    Tokens = object  # the annotation is read by the compiler, where torch is not installed


@loss_term
def clip(logp: Tokens, advantage: Tokens, old_logp: Tokens | None = None, *, low: float = 0.2, high: float | None = None) -> Tokens:
    """PPO's clipped surrogate, as a loss: max(-A r, -A clip(r, 1 - low, 1 + high)), r = exp(logp - old_logp) (arXiv:1707.06347, eq. 7).

    `high` defaults to `low`. Without `old_logp` the detached `logp` stands in, which is exact for one optimizer step a batch.
    """
    old = logp.detach() if old_logp is None else old_logp
    ratio = (logp - old).exp()
    clipped = ratio.clamp(1 - low, 1 + (low if high is None else high))
    return (-advantage * ratio).maximum(-advantage * clipped)


@loss_term
def kl(logp: Tokens, ref_logp: Tokens, *, form: Literal["k1", "abs", "mse", "low_var"] = "low_var") -> Tokens:
    """An estimate of the KL divergence of the policy from the reference, in nats a token.

    k1 = logp - ref; abs; mse = (logp - ref)^2 / 2; low_var (k3) = exp(d) - d - 1 with d = ref - logp clamped to +-20 and the result
    to +-10 (arXiv:2402.03300, eq. 4).
    """
    d = ref_logp - logp
    if form == "k1":
        return -d
    if form == "abs":
        return d.abs()
    if form == "mse":
        return d.square() / 2
    d = d.clamp(-20, 20)
    return (d.exp() - d - 1).clamp(-10, 10)
