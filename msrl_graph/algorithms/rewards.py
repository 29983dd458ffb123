"""Rewards: what one response is worth. A parameter annotated `str` receives decoded text, without the end token."""

from __future__ import annotations

import re
import string
import sys
from collections import Counter
from typing import TYPE_CHECKING

from .registry import Count, NotNegative, Positive, function, tell

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

TOLD = 5  # answers of a batch that were cut off, in the log


def _matched(response: Sequence[str], answer: Sequence[str], prompt: Sequence[str] = ()) -> list[float]:
    """`exact_match` of many rows."""
    return [float(r.strip() == a.strip()) for r, a in zip(response, answer, strict=True)]


@function(many=_matched)
def exact_match(response: str, answer: str, prompt: str = "") -> float:
    """1 if the response is the answer, blanks at the ends aside, else 0."""
    return _matched([response], [answer])[0]


def _verified(
    response: Sequence[str], answer: Sequence[str], prompt: Sequence[str] = (), *, timeout: float, budget: float
) -> list[float]:
    """`math_verify` of many rows."""
    from . import answers, judges

    rows = [(answers.given(r), answers.gold(a)) for r, a in zip(response, answer, strict=True)]
    same = [answers.same(*row) for row in rows]
    asked = [i for i, verdict in enumerate(same) if verdict is None]
    questions = [judges.JudgeRequest(rows[i][0].text, rows[i][1].text, rows[i][0].marked) for i in asked]
    verdicts = judges.equal(questions, timeout=timeout, budget=budget)
    cut_off = [(q, v.cut_off) for q, v in zip(questions, verdicts, strict=True) if v.cut_off]
    tell("verify/cut_off", len(cut_off))
    for q, why in cut_off[:TOLD]:
        print(
            f"math_verify: {why}, which counts 0, on {q.response[-100:]!r} against {q.answer[:100]!r}", file=sys.stderr
        )
    if len(cut_off) > TOLD:
        print(f"math_verify: so for {len(cut_off) - TOLD} other answers of {len(rows)}", file=sys.stderr)
    known = dict(zip(asked, verdicts, strict=True))
    return [float(known[i].equal if verdict is None else verdict) for i, verdict in enumerate(same)]


@function(many=_verified)
def math_verify(
    response: str, answer: str, prompt: str = "", *, timeout: Positive = 5.0, budget: Positive = 60.0
) -> float:
    r"""1 if the response's answer is mathematically equal to `answer`, else 0.

    The response's answer is what stands in its last `\boxed{}` or `<answer>…</answer>` or behind its last `####`, else
    behind its last "answer is", else the last expression of its last 4,000 characters. What stands behind `</think>`
    goes before. `answer` is LaTeX or plain, or a whole solution that marks its answer so, as GSM8K's. Numbers and words
    are compared here, all else by the library math-verify, in processes of a gibibyte at most, one for each processor.
    Units and currencies are not compared; 50% equals 50 and 0.5; decimals are equal to six places, as 1/3 and 0.333333.

    Cut off, and so 0, is an answer on which math-verify takes more than `timeout` seconds of a processor or too much
    memory, or that is too large to be asked about: longer than 1,000 characters, brackets more than 16 deep, whole
    numbers of more than 32,768 bits. Answers that come to no verdict take at most `budget` seconds of a batch together,
    or 0.05 each. The metric `verify/cut_off` counts what was cut off, the run's log has some of it. RuntimeError where
    the library cannot be started.
    """
    return _verified([response], [answer], timeout=timeout, budget=budget)[0]


@function()
def contains(response: str, answer: str, prompt: str = "") -> float:
    """1 if the words of the answer stand in the response, one after another, else 0.

    Words as `f1` takes them. An answer without words stands in no response.
    """
    words = _words(answer)
    return float(bool(words) and f" {' '.join(words)} " in f" {' '.join(_words(response))} ")


@function()
def f1(response: str, answer: str, prompt: str = "") -> float:
    """How far the words of response and answer are the same, from 0 to 1: the F1 score of SQuAD (arXiv:1606.05250,
    section 6.1).

    2 c / (n + m) for n and m words of which c are common, each as often as it stands in both. Words are in lower case,
    without punctuation and the articles a, an and the. 1 where neither has a word.
    """
    given = Counter(_words(response))
    right = Counter(_words(answer))
    total = given.total() + right.total()
    return 2 * (given & right).total() / total if total else 1.0


@function()
def matches(response: str, prompt: str = "", *, pattern: str) -> float:
    r"""1 if the whole response matches a regular expression of Python, in which `.` stands for a line's end too, else
    0.

    A program writes a backslash as two: `matches(pattern = "-?\\d+")`. ValueError where the pattern is none.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"the pattern {pattern!r} is no regular expression: {error}") from error
    return float(compiled.fullmatch(response) is not None)


@function()
def tagged(response: str, prompt: str = "", *, tags: str = "think answer") -> float:
    """1 if the response is `<think>…</think> <answer>…</answer>`, blanks between them aside, else 0 (arXiv:2501.12948,
    section 2.2.2).

    `tags` are the names, in their order; each tag is opened once and closed once. ValueError where there is no name.
    Where the prompt ends with an opening tag, as that of some chat templates does, the response lacks it: `matches`
    takes a pattern of such responses.
    """
    names = tags.split()
    if not names:
        raise ValueError("`tags` holds no name")
    once = all(response.count(f"<{name}>") == response.count(f"</{name}>") == 1 for name in names)
    whole = r"\s*".join(rf"<{re.escape(name)}>.*</{re.escape(name)}>" for name in names)
    return float(once and re.fullmatch(rf"\s*{whole}\s*", response, re.DOTALL) is not None)


@function(scope="group")
def length_reward(
    response: Sequence[NDArray[np.int32]], score: NDArray[np.float32], *, weight: NotNegative = 1.0
) -> NDArray[np.float64]:
    """Kimi k1.5's length reward: among a prompt's responses, short ones gain and long ones lose (arXiv:2501.12599,
    section 2.3.3).

    score + weight * l, l = 0.5 - (length - shortest) / (longest - shortest) of a correct response, min(l, 0) of
    another; 0 where all are as long. Lengths in tokens. Correct is a `score` over 0. (The paper starts with a weight of
    0 and raises it during training.)
    """
    import numpy as np

    lengths = np.array([len(tokens) for tokens in response], np.float64)
    spread = np.ptp(lengths)
    gain = 0.5 - (lengths - lengths.min()) / spread if spread else np.zeros(len(lengths))
    return np.asarray(score, np.float64) + weight * np.where(score > 0, gain, np.minimum(gain, 0))


@function(scope="group")
def shuffle(score: NDArray[np.float32], rng: np.random.Generator) -> NDArray[np.float32]:
    """The scores of the group, dealt anew at random: a control, from which nothing can be learnt."""
    return rng.permutation(score)


@function()
def overlong(
    response: NDArray[np.int32], score: float, *, max: Count, buffer: Count, factor: NotNegative = 1.0
) -> float:
    """DAPO's soft punishment of long responses: score - factor * clip((length - (max - buffer)) / buffer, 0, 1)
    (arXiv:2503.14476, eq. 13).

    Lengths in tokens: up to max - buffer costs nothing, `max` and more costs `factor`. ValueError where `buffer` is
    over `max`.
    """
    if buffer > max:
        raise ValueError(f"the buffer of {buffer} tokens is over max = {max}")
    over = (len(response) - (max - buffer)) / buffer
    return float(score) - factor * (1.0 if over > 1 else over if over > 0 else 0.0)


@function()
def weighted_sum(*scores: float, weights: Sequence[float]) -> float:
    """The sum of all columns that the node reads, in its order, each times its weight: `weighted_sum(0.7, 0.3)`.

    ValueError unless there is a weight for each.
    """
    return float(sum(w * float(s) for w, s in zip(weights, scores, strict=True)))


def _words(text: str) -> list[str]:
    """The words of a text as SQuAD's script compares them."""
    plain = text.lower().translate(str.maketrans("", "", string.punctuation))
    return [word for word in plain.split() if word not in ("a", "an", "the")]
