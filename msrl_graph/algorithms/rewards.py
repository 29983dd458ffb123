"""Rewards: what one response is worth. A parameter annotated `str` receives decoded text, without the end token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .registry import function

if TYPE_CHECKING:
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
