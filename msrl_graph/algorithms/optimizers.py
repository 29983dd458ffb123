"""Optimizers, and schedules of their learning rate.

An optimizer's options go to a class of torch.optim, which is named here and never loaded: what is told is by which rule
which weights step, and the bytes that are kept of each (optimizer_spec.py). Each has `lr` and `warmup`, which the
update applies. A schedule gives the learning rate of an optimizer step: what the update fills is described in
ir/signatures.py.
"""

from __future__ import annotations

import math
from typing import Literal

from ..ir.optimizer_spec import OptimizerSpec, Rule
from .registry import Below, Betas, Count, NotNegative, Positive, Rate, optimizer, schedule


@optimizer
def adamw(
    *,
    lr: Rate,
    betas: Betas = (0.9, 0.999),
    eps: Positive = 1e-8,
    weight_decay: NotNegative = 0.01,
    warmup: Count = 1,
) -> OptimizerSpec:
    """AdamW, as torch.optim.AdamW (arXiv:1711.05101).

    `betas` are how fast the two moments forget, `eps` is what the divisor is at least, `weight_decay` how much of a
    weight goes in a step, times the rate. Keeps two float32 moments of each weight.
    """
    options = {"betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "fused": True}
    return OptimizerSpec(Rule("AdamW", options, {"exp_avg": 4, "exp_avg_sq": 4}))


@optimizer
def sgd(
    *,
    lr: Rate,
    momentum: Below = 0.0,
    nesterov: bool = False,
    weight_decay: NotNegative = 0.0,
    warmup: Count = 1,
) -> OptimizerSpec:
    """Stochastic gradient descent, as torch.optim.SGD.

    Keeps one float32 buffer of each weight where there is `momentum`, b = momentum b + g, and nothing without. The step
    is lr b, with `nesterov`, which needs momentum, lr (g + momentum b). `weight_decay` times the weight is added to the
    gradient g.
    """
    if nesterov and not momentum:
        raise ValueError("`nesterov` needs `momentum` above 0")
    options = {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay, "fused": True}
    return OptimizerSpec(Rule("SGD", options, {"momentum_buffer": 4} if momentum else {}))


@optimizer
def muon(
    *,
    lr: Rate,
    momentum: Below = 0.95,
    nesterov: bool = True,
    weight_decay: NotNegative = 0.1,
    adjust: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
    betas: Betas = (0.9, 0.999),
    eps: Positive = 1e-8,
    warmup: Count = 1,
) -> OptimizerSpec:
    """Muon, as torch.optim.Muon, for the matrices of the layers, and AdamW for all else: embedding, head, norms, biases
    (arXiv:2502.16982).

    A matrix steps by its momentum made orthogonal: five Newton-Schulz iterations, for which each rank gathers the whole
    matrix. They are in float32, where torch has bf16: so the result is the same on every layout. `adjust` scales this
    step by the matrix's shape, A x B: `match_rms_adamw` by 0.2 sqrt(max(A, B)), so that rate and decay are those of
    AdamW; `original` by sqrt(max(1, A / B)). `betas` and `eps` are AdamW's, the other options are for both. Keeps one
    float32 buffer of each matrix, two moments of the rest.
    """
    matrices = {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay, "adjust": adjust}
    others = adamw(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
    return OptimizerSpec(others.rule, Rule("Muon", matrices, {"momentum_buffer": 4}, whole=True))


@optimizer
def adamw_8bit(
    *,
    lr: Rate,
    betas: Betas = (0.9, 0.999),
    eps: Positive = 1e-8,
    weight_decay: NotNegative = 0.01,
    warmup: Count = 1,
) -> OptimizerSpec:
    """AdamW whose moments are kept in 8 bits, by blocks of 256 with a float32 scale each (arXiv:2110.02861).

    Its memory is planned. It does not run in this version: blocks are cut from what a rank holds, so that another
    layout would round otherwise and give other weights.
    """
    each = 1 + 4 / 256
    why = "its blocks are cut from what a rank holds, so that a result would depend on the layout"
    return OptimizerSpec(Rule("AdamW8bit", {}, {"exp_avg": each, "exp_avg_sq": each}), runs=False, why=why)


@schedule
def constant(step: int, *, peak: NotNegative, warmup: Count = 1) -> float:
    """`peak`, after it has risen in equal parts over `warmup` steps."""
    return peak * min(1.0, step / warmup)


@schedule
def linear(
    step: int, last: int, *, peak: NotNegative, warmup: Count = 1, min: NotNegative = 0.0, steps: Count | None = None
) -> float:
    """Rises to `peak` in equal parts over `warmup` steps, then falls to `min` in a straight line.

    It gets there at step `steps`, and stays; if not stated, that is the last step of the run, counted without filters,
    which may leave fewer.
    """
    return _falling(1 - _after(step, warmup, last, steps), step, peak, warmup, min)


@schedule
def cosine(
    step: int, last: int, *, peak: NotNegative, warmup: Count = 1, min: NotNegative = 0.0, steps: Count | None = None
) -> float:
    """Rises to `peak` in equal parts over `warmup` steps, then falls to `min` along half a wave of a cosine
    (arXiv:1608.03983, eq. 5).

    It gets there at step `steps`, and stays; if not stated, that is the last step of the run, counted without filters,
    which may leave fewer.
    """
    return _falling((1 + math.cos(math.pi * _after(step, warmup, last, steps))) / 2, step, peak, warmup, min)


def _after(step: int, warmup: int, last: int, steps: int | None) -> float:
    """Which part of the way from the end of the warm-up to step `steps`, or to the last one, is behind."""
    if steps is not None and 1 < warmup >= steps:  # a warm-up of one step is none
        raise ValueError(f"`warmup` ends before `steps`, and {warmup} is not below {steps}")
    return max(0.0, min(1.0, (step - warmup) / max(1, (steps or last) - warmup)))


def _falling(part: float, step: int, peak: float, warmup: int, least: float) -> float:
    return peak * step / warmup if step < warmup else least + (peak - least) * part


__all__ = ["adamw", "adamw_8bit", "constant", "cosine", "linear", "muon", "sgd"]
