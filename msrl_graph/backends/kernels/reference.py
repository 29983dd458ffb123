"""Plain formulas in basic torch operators, to test each device's kernels.

Invariant: no formula is optimized for speed or memory, and no engine calls these formulas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from . import ScoreRule


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rule: ScoreRule,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute softmax(q kᵀ · scaling) v over the keys that each query sees.

    A query sees the key at its own position and the keys at earlier positions. With a window, a query sees only the
    last of these keys. A cap bounds the scores. A sink is the score of a further key without a value.
    """
    import torch

    repeats = q.shape[1] // k.shape[1]
    positions = torch.arange(q.shape[2])
    k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    distance = positions[:, None] - positions  # distance of a key before a query
    visible = (distance >= 0) & (distance < (rule.window or len(positions)))
    scores = q @ k.transpose(2, 3) * rule.scaling
    if rule.cap:
        scores = rule.cap * (scores / rule.cap).tanh()
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is None:
        return scores.softmax(-1) @ v
    further = sinks[:, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, further], -1).softmax(-1)[..., :-1] @ v


def grouped(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply the rows of each group by the group's weights."""
    import torch

    begins = [0, *ends.tolist()]
    parts = [rows[start:stop] @ weight for start, stop, weight in zip(begins, begins[1:], weights, strict=False)]
    return torch.cat(parts)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Compute x / √(mean(x²) + ε) · weight."""
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight


def swiglu(joined: torch.Tensor) -> torch.Tensor:
    """Compute gate · sigmoid(gate) · up."""
    gate, up = joined.chunk(2, dim=-1)
    return gate * gate.sigmoid() * up


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Compute (a cos - b sin, b cos + a sin) of the halves a and b of `x`."""
    import torch

    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin
