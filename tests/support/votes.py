"""Majority votes, counted one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np


def voted(some: Sequence[tuple[float, bytes]]) -> float:
    """The figure of one vote: of the answers that most give, the mean; without a vote, of those without an answer."""
    votes = Counter(answer for _, answer in some if answer)
    most = max(votes.values(), default=0)
    ahead = [answer for answer, count in votes.items() if count == most] or [b""]
    figures = [np.mean([value for value, own in some if own == answer]) for answer in ahead]
    return float(np.mean(figures))
