"""Inputs that peers and this project are both given (tests/algorithms/test_peers.py), drawn from a seed with nothing
but Python's own library.

Columns are ragged: a list a row. `groups` numbers the prompt of each row.
"""

from __future__ import annotations

import random
from typing import Any

Ragged = list[list[float]]
Batch = dict[str, Any]
LENGTHS = [1, 11, 12, 13, 15, 16, 17, 20]  # responses that may be too long
TEXTS = [  # a response and an answer
    ("The cat sat.", "a cat"), ("cat cat", "cat"), ("cat", "cat cat"), ("sat the cat", "cat sat"),
    ("concatenate", "cat"),
    ("in 1998, in Paris", "in Paris!"), ("", ""), ("the", "!"), ("", "cat"), ("cat", ""),
    ("It's 3.14 or 2.71", "3.14, 2.72"),
    ("A man a plan", "the man of plan"), ("one two three four five six seven", "seven six nine one ten"),
]  # fmt: skip


def batches() -> dict[str, Batch]:
    """By what is unusual in each: nothing but lengths and a group of one; empty responses; scores all the same; numbers
    that reach every clamp; rewards and log-probabilities without any spread."""
    return {
        "ragged": _batch(1, [3, 1, 7, 2, 5, 4, 1, 6], [0, 0, 0, 1, 2, 2, 3, 3]),
        "empty responses": _batch(2, [0, 4, 2, 0, 3, 5, 1, 3, 6], [0, 0, 0, 0, 1, 1, 1, 2, 2]),
        "equal scores": _batch(3, [2, 3, 1, 4, 2, 2, 5], [0, 0, 0, 0, 1, 1, 1], score=0.25),
        "extreme": _batch(4, [4, 6, 3, 5, 6, 2], [0, 0, 0, 1, 1, 1], wide=12.0, scale=1e4),
        "flat": _batch(5, [2, 0, 3], [0, 0, 0], score=0.5, wide=0.0, scale=0.0),
    }


def pairs() -> dict[str, Batch]:
    """Chosen and rejected responses: log-probabilities of their tokens, and those of a reference."""
    return {
        "ragged": _pairs(6, [3, 1, 6, 2, 5], [1, 4, 6, 2, 3], 0.5),
        "empty responses": _pairs(7, [0, 3, 2], [2, 0, 4], 0.5),
        "extreme": _pairs(8, [4, 2, 5, 3], [3, 2, 6, 5], 60.0),
    }


def distributions() -> Batch:
    """Logits of 9 tokens over 5 words, of two models; the last rows nearly certain."""
    rng = random.Random(9)
    spread = [1.0] * 6 + [30.0] * 3
    return {name: [[rng.gauss(0, s) for _ in range(5)] for s in spread] for name in ("policy", "teacher")}


def _batch(
    seed: int, lengths: list[int], groups: list[int], score: float | None = None, wide: float = 0.3, scale: float = 1.0
) -> Batch:
    """Log-probabilities that differ by about `wide`, rewards, advantages and values of about `scale`."""
    rng = random.Random(seed)

    def draw(spread: float, around: Ragged | None = None) -> Ragged:
        return [[rng.gauss(around[i][t] if around else 0.0, spread) for t in range(n)] for i, n in enumerate(lengths)]

    old = [[-rng.expovariate(1.0) if wide else -1.0 for _ in range(n)] for n in lengths]
    value = draw(scale)
    return {
        "lengths": lengths,
        "groups": groups,
        "score": [rng.gauss(0, scale) if score is None else score for _ in lengths],
        "old_logp": old,
        "logp": draw(wide, old),
        "ref_logp": draw(wide, old),
        "gen_logp": draw(wide, old),
        "advantage": draw(scale),
        "entropy": [[abs(x) for x in row] for row in draw(1.0)],
        "value": value,
        "values": draw(0.6 * scale, value),
        "returns": draw(scale, value),
    }


def _pairs(seed: int, chosen: list[int], rejected: list[int], wide: float) -> Batch:
    rng = random.Random(seed)
    found: Batch = {"chosen_lengths": chosen, "rejected_lengths": rejected}
    for name, lengths in (("chosen", chosen), ("rejected", rejected)):
        reference = [[-rng.expovariate(1.0) for _ in range(n)] for n in lengths]
        found[f"ref_{name}"] = reference
        found[name] = [[rng.gauss(x, wide) for x in row] for row in reference]
    return found


def everything() -> dict[str, Any]:
    return {"batches": batches(), "pairs": pairs(), "distributions": distributions(), "texts": TEXTS}
