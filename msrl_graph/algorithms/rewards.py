"""Rewards: what one response is worth. A parameter annotated `str` receives decoded text, without the end token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .registry import Count, NotNegative, function

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray


@function()
def exact_match(response: str, answer: str, prompt: str = "") -> float:
    """1 if the response is the answer, blanks at the ends aside, else 0."""
    return float(response.strip() == answer.strip())


@function()
def math_verify(response: str, answer: str, prompt: str = "") -> float:
    """1 if the response's last mathematical answer equals `answer` as the library math-verify judges it, else 0.

    `answer` is LaTeX or plain text; it is read as mathematics first as it stands, then between dollar signs.
    """
    import math_verify as library

    gold = library.parse(f"${answer}$")
    return float(library.verify(gold, library.parse(response)))


@function(scope="group")
def shuffle(score: NDArray[np.float32], rng: np.random.Generator) -> NDArray[np.float32]:
    """The scores of the group, dealt anew at random: a control, from which nothing can be learnt."""
    return rng.permutation(score)


@function()
def overlong(response: NDArray[np.int32], score: float, *, max: Count, buffer: Count, factor: NotNegative = 1.0) -> float:
    """DAPO's soft punishment of long responses: score + min(-(length - (max - buffer)) / buffer * factor, 0) (arXiv:2503.14476, eq. 13).

    Lengths in tokens: up to max - buffer costs nothing, `max` costs `factor`. ValueError where `buffer` is over `max`.
    """
    if buffer > max:
        raise ValueError(f"the buffer of {buffer} tokens is over max = {max}")
    over = len(response) - (max - buffer)
    return float(score) - (over / buffer * factor if over > 0 else 0.0)


@function()
def weighted_sum(*scores: float, weights: Sequence[float]) -> float:
    """The sum of all columns that the node reads, in its order, each times its weight: `weighted_sum(0.7, 0.3)`.

    ValueError unless there is a weight for each.
    """
    return float(sum(w * float(s) for w, s in zip(weights, scores, strict=True)))
