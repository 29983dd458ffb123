"""Rewards: the value of one response.

A parameter annotated `str` receives decoded text, without the end token.
"""

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

TOLD = 5  # answers of a batch that were cut off and are shown in the log


def _match_rows(response: Sequence[str], answer: Sequence[str], prompt: Sequence[str] = ()) -> list[float]:
    """`exact_match` of many rows."""
    return [float(text.strip() == expected.strip()) for text, expected in zip(response, answer, strict=True)]


@function(many=_match_rows)
def exact_match(response: str, answer: str, prompt: str = "") -> float:
    """1 if the response is the answer, ignoring blanks at the ends, else 0."""
    return _match_rows([response], [answer])[0]


def _verify_rows(
    response: Sequence[str], answer: Sequence[str], prompt: Sequence[str] = (), *, timeout: float, budget: float
) -> list[float]:
    """`math_verify` of many rows."""
    from . import answers, judges

    rows = [
        (answers.parse_response(text), answers.parse_gold(expected))
        for text, expected in zip(response, answer, strict=True)
    ]
    decisions = [answers.same(*row) for row in rows]
    undecided = [i for i, verdict in enumerate(decisions) if verdict is None]
    questions = [judges.JudgeRequest(rows[i][0].text, rows[i][1].text, rows[i][0].marked) for i in undecided]
    verdicts = judges.equal(questions, timeout=timeout, budget=budget)
    cut_off = [
        (question, outcome.cut_off) for question, outcome in zip(questions, verdicts, strict=True) if outcome.cut_off
    ]
    tell("verify/cut_off", len(cut_off))
    for question, reason in cut_off[:TOLD]:
        print(
            f"math_verify: {reason}, so it counts 0: {question.response[-100:]!r} against {question.answer[:100]!r}",
            file=sys.stderr,
        )
    if len(cut_off) > TOLD:
        print(f"math_verify: the same for {len(cut_off) - TOLD} more answers of {len(rows)}", file=sys.stderr)
    verdict_by_row = dict(zip(undecided, verdicts, strict=True))
    return [float(verdict_by_row[i].equal if verdict is None else verdict) for i, verdict in enumerate(decisions)]


@function(many=_verify_rows)
def math_verify(
    response: str, answer: str, prompt: str = "", *, timeout: Positive = 5.0, budget: Positive = 60.0
) -> float:
    r"""1 if the response's answer is mathematically equal to `answer`, else 0.

    The response's answer is in its last `\boxed{}` or `<answer>…</answer>` or after its last `####`, else after its
    last "answer is", else it is the last expression of its last 4,000 characters. Text after `</think>` has
    priority. `answer` is LaTeX or plain, or a whole solution that marks its answer in the same way, as in GSM8K.
    Numbers and words are compared here, everything else by the library math-verify, in processes of a gibibyte at
    most, one per processor. Units and currencies are not compared; 50% equals 50 and 0.5; decimals are equal to six
    places, as 1/3 and 0.333333.

    An answer is cut off, and so counts 0, if math-verify takes more than `timeout` seconds of CPU time or too much
    memory on it, or if it is too large to ask about: longer than 1,000 characters, brackets more than 16 deep,
    integers of more than 32,768 bits. Answers without a verdict take at most `budget` seconds per batch together,
    or 0.05 each. The metric `verify/cut_off` counts the cut-off answers, and the run's log shows some of them.
    Raises RuntimeError if the library cannot be started.
    """
    return _verify_rows([response], [answer], timeout=timeout, budget=budget)[0]


@function()
def contains(response: str, answer: str, prompt: str = "") -> float:
    """1 if the words of the answer occur in the response, one after another, else 0.

    Words are defined as in `f1`. An answer without words occurs in no response.
    """
    words = _split_words(answer)
    return float(bool(words) and f" {' '.join(words)} " in f" {' '.join(_split_words(response))} ")


@function()
def f1(response: str, answer: str, prompt: str = "") -> float:
    """The F1 score of SQuAD, from 0 to 1: how far response and answer share words.

    2 c / (n + m) for n and m words of which c are common, each as often as it occurs in both (arXiv:1606.05250,
    section 6.1). Words are in lower case, without punctuation and the articles a, an and the. 1 if neither has a
    word.
    """
    response_words = Counter(_split_words(response))
    answer_words = Counter(_split_words(answer))
    total = response_words.total() + answer_words.total()
    return 2 * (response_words & answer_words).total() / total if total else 1.0


@function()
def matches(response: str, prompt: str = "", *, pattern: str) -> float:
    r"""1 if the whole response matches a regular expression of Python, else 0.

    In it `.` also matches a line's end. A program writes a backslash as two: `matches(pattern = "-?\\d+")`. Raises
    ValueError if the pattern is not valid.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"the pattern {pattern!r} is not a regular expression: {error}") from error
    return float(compiled.fullmatch(response) is not None)


@function()
def tagged(response: str, prompt: str = "", *, tags: str = "think answer") -> float:
    """1 if the response is `<think>…</think> <answer>…</answer>`, else 0.

    Blanks between the tags are ignored (arXiv:2501.12948, section 2.2.2). `tags` are the names, in their order;
    each tag is opened once and closed once. Raises ValueError if there is no name. If the prompt ends with an
    opening tag, as that of some chat templates does, the response lacks it: use `matches` with a pattern of such
    responses.
    """
    names = tags.split()
    if not names:
        raise ValueError("`tags` holds no name")
    once = all(response.count(f"<{name}>") == response.count(f"</{name}>") == 1 for name in names)
    body = r"\s*".join(rf"<{re.escape(name)}>.*</{re.escape(name)}>" for name in names)
    return float(once and re.fullmatch(rf"\s*{body}\s*", response, re.DOTALL) is not None)


@function(scope="group")
def length_reward(
    response: Sequence[NDArray[np.int32]], score: NDArray[np.float32], *, weight: NotNegative = 1.0
) -> NDArray[np.float64]:
    """Kimi k1.5's length reward: short responses gain and long ones lose.

    They are compared among a prompt's responses (arXiv:2501.12599, section 2.3.3): score + weight * l, l = 0.5 -
    (length - shortest) / (longest - shortest) of a correct response, min(l, 0) of another; 0 if all have the same
    length. Lengths are in tokens. Correct is a `score` over 0. (The paper starts with a weight of 0 and raises it
    during training.)
    """
    import numpy as np

    lengths = np.array([len(tokens) for tokens in response], np.float64)
    spread = np.ptp(lengths)
    gain = 0.5 - (lengths - lengths.min()) / spread if spread else np.zeros(len(lengths))
    return np.asarray(score, np.float64) + weight * np.where(score > 0, gain, np.minimum(gain, 0))


@function(scope="group")
def shuffle(score: NDArray[np.float32], rng: np.random.Generator) -> NDArray[np.float32]:
    """The group's scores in random order: a control that nothing can be learnt from."""
    return rng.permutation(score)


@function()
def overlong(
    response: NDArray[np.int32], score: float, *, max: Count, buffer: Count, factor: NotNegative = 1.0
) -> float:
    """DAPO's soft punishment of long responses.

    score - factor * clip((length - (max - buffer)) / buffer, 0, 1) (arXiv:2503.14476, eq. 13). Lengths are in
    tokens: up to max - buffer costs nothing, `max` and more costs `factor`. Raises ValueError if `buffer` is over
    `max`.
    """
    if buffer > max:
        raise ValueError(f"the buffer of {buffer} tokens is over max = {max}")
    excess = (len(response) - (max - buffer)) / buffer
    return float(score) - factor * (1.0 if excess > 1 else excess if excess > 0 else 0.0)


@function()
def weighted_sum(*scores: float, weights: Sequence[float]) -> float:
    """The sum of all columns that the node reads, each times its weight.

    The weights are in the order of the columns: `weighted_sum(0.7, 0.3)`. Raises ValueError unless there is one for
    each column.
    """
    return float(sum(weight * float(score) for weight, score in zip(weights, scores, strict=True)))


def _split_words(text: str) -> list[str]:
    """Split a text into words as SQuAD's script does."""
    plain = text.lower().translate(str.maketrans("", "", string.punctuation))
    return [word for word in plain.split() if word not in ("a", "an", "the")]
