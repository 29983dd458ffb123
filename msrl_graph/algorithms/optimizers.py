"""Optimizers, and schedules of their learning rate.

An optimizer function returns an OptimizerSpec: the update rule for each kind of weight, and the bytes of optimizer
state per weight (optimizer_spec.py). An update rule is the name of a class of torch.optim, with options for that class.
This file does not import torch. Each optimizer function has the options `lr` and `warmup`, which the update node
applies.

A schedule returns the learning rate of an optimizer step. ir/signatures.py describes the arguments that the update node
fills, such as `step`.

Invariant: an optimizer or a schedule raises ValueError if its options contradict each other.
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

    - `betas`: the decay rates of the two moments.
    - `eps`: the number that is added to the divisor.
    - `weight_decay`: each step reduces a weight by the fraction `weight_decay` times the learning rate.

    The optimizer state is two float32 moments per weight.
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

    Without `momentum`, a step subtracts lr g, where g is the gradient, and there is no optimizer state. With
    `momentum`, the optimizer state is one float32 buffer per weight, b = momentum b + g, and a step subtracts lr b.
    With `nesterov`, which needs `momentum`, a step subtracts lr (g + momentum b). `weight_decay` times the weight is
    added to the gradient g.
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
    """Muon, as torch.optim.Muon, for matrices of layers, and AdamW for other weights.

    The other weights are the embedding, the head, norms and biases (arXiv:2502.16982). The step of a matrix is its
    momentum, made orthogonal with five Newton-Schulz iterations. For these iterations, each rank gathers the whole
    matrix and computes in float32, where torch uses bf16. So the result is the same on every layout.

    `adjust` scales the step of a matrix with the shape A x B. `match_rms_adamw` scales by 0.2 sqrt(max(A, B)), so that
    a learning rate and a weight decay that suit AdamW also suit Muon. `original` scales by sqrt(max(1, A / B)). `betas`
    and `eps` are options of AdamW only. `lr`, `weight_decay` and `warmup` apply to all weights. The optimizer state is
    one float32 buffer per weight of a matrix, and two float32 moments per other weight.
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
    """AdamW with 8-bit moments; each block of 256 moments has one float32 scale.

    Source: arXiv:2110.02861. This version can plan the memory of this optimizer, but cannot run it. Each rank would
    divide its own shard into blocks, so another layout would round differently and give other weights.
    """
    moment_bytes = 1 + 4 / 256
    reason = "its blocks are cut from the part that a rank holds, so results would depend on the layout"
    return OptimizerSpec(
        Rule("AdamW8bit", {}, {"exp_avg": moment_bytes, "exp_avg_sq": moment_bytes}), runs=False, why=reason
    )


@schedule
def constant(step: int, *, peak: NotNegative, warmup: Count = 1) -> float:
    """A constant learning rate of `peak`, after a linear rise over `warmup` steps."""
    return peak * min(1.0, step / warmup)


@schedule
def linear(
    step: int, last: int, *, peak: NotNegative, warmup: Count = 1, min: NotNegative = 0.0, steps: Count | None = None
) -> float:
    """A linear rise to `peak` over `warmup` steps, then a linear fall to `min`.

    The rate reaches `min` at step `steps` and is `min` after that step. `steps` defaults to the last step of the run.
    The last step is computed as if filters dropped no rows; with filters, a run may have fewer steps.
    """
    return _schedule_rate(1 - _progress(step, warmup, last, steps), step, peak, warmup, min)


@schedule
def cosine(
    step: int, last: int, *, peak: NotNegative, warmup: Count = 1, min: NotNegative = 0.0, steps: Count | None = None
) -> float:
    """A linear rise to `peak` over `warmup` steps, then a cosine fall to `min`.

    The fall is half a wave of a cosine (arXiv:1608.03983, eq. 5). The rate reaches `min` at step `steps` and is `min`
    after that step. `steps` defaults to the last step of the run. The last step is computed as if filters dropped no
    rows; with filters, a run may have fewer steps.
    """
    return _schedule_rate((1 + math.cos(math.pi * _progress(step, warmup, last, steps))) / 2, step, peak, warmup, min)


def _progress(step: int, warmup: int, last: int, steps: int | None) -> float:
    """Return the progress of `step`: 0 at the end of warm-up, 1 at the last step.

    The last step is `steps` if `steps` is given, and `last` otherwise. Raises ValueError if the warm-up does not end
    before `steps`.
    """
    if steps is not None and 1 < warmup >= steps:  # a warm-up of one step is no warm-up
        raise ValueError(f"`warmup` must end before `steps`, but {warmup} is not below {steps}")
    return max(0.0, min(1.0, (step - warmup) / max(1, (steps or last) - warmup)))


def _schedule_rate(part: float, step: int, peak: float, warmup: int, least: float) -> float:
    return peak * step / warmup if step < warmup else least + (peak - least) * part


__all__ = ["adamw", "adamw_8bit", "constant", "cosine", "linear", "muon", "sgd"]
