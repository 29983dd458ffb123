"""Rewards: functions that compute the value of a response.

A parameter with the annotation `str` receives decoded text, without the end token.

Invariant: the reward is 0 for an answer that cannot be checked within the limits of time, memory and size. The metric
`verify/cut_off` counts these answers.
"""

from __future__ import annotations

import re
import string
import sys
from collections import Counter
from typing import TYPE_CHECKING

from .registry import Answers, Count, NotNegative, Positive, function, tell

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

TOLD = 5  # answers of a batch that were cut off and are shown in the log


def _accepted(answer: Answers) -> list[str]:
    """Return the accepted answers of a row as texts.

    `answer` is one answer or a list of them; an answer is text or a number.
    """
    answers = answer if isinstance(answer, list) else [answer]
    for item in answers:
        if isinstance(item, bool) or not isinstance(item, str | int | float):
            raise TypeError(f"an accepted answer is text or a number, not {type(item).__name__}")
    return [item if isinstance(item, str) else str(item).removesuffix(".0") for item in answers]


def _match_rows(response: Sequence[str], answer: Sequence[Answers], prompt: Sequence[str] = ()) -> list[float]:
    """Return the result of `exact_match` for each row."""
    return [
        float(any(text.strip() == expected.strip() for expected in _accepted(answers)))
        for text, answers in zip(response, answer, strict=True)
    ]


@function(many=_match_rows)
def exact_match(response: str, answer: Answers, prompt: str = "") -> float:
    """1 if the response equals the answer, ignoring blanks at both ends, else 0.

    Of a list of accepted answers, one must be equal.
    """
    return _match_rows([response], [answer])[0]


def _verify_rows(
    response: Sequence[str], answer: Sequence[Answers], prompt: Sequence[str] = (), *, timeout: float, budget: float
) -> list[float]:
    """Return the result of `math_verify` for each row."""
    from . import answers, judges

    accepted = [_accepted(value) for value in answer]
    owners = [i for i, values in enumerate(accepted) for _ in values]  # the row of each comparison
    parsed = [answers.parse_response(text) for text in response]
    rows = [(parsed[i], answers.parse_gold(expected)) for i, values in enumerate(accepted) for expected in values]
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
    results = [0.0] * len(accepted)
    for i, verdict in enumerate(decisions):
        results[owners[i]] = max(results[owners[i]], float(verdict_by_row[i].equal if verdict is None else verdict))
    return results


@function(many=_verify_rows)
def math_verify(
    response: str, answer: Answers, prompt: str = "", *, timeout: Positive = 5.0, budget: Positive = 60.0
) -> float:
    r"""1 if the response's answer is mathematically equal to `answer`, else 0.

    The answer of a response is in its last `\boxed{}` or `<answer>…</answer>`, or after its last `####`. If the
    response has none of these marks, its answer is after its last "answer is". If "answer is" does not occur, its
    answer is the last expression of its last 4,000 characters. Text after `</think>` has priority. `answer` is LaTeX or
    plain text, or a whole solution that marks its answer in one of these ways, as in GSM8K. Of a list of accepted
    answers, one must be equal.

    Numbers and words are compared directly. Everything else is compared by the library math-verify, in at most one
    process per processor, with at most one gibibyte of memory each. Units and currencies are ignored. 50% equals 50 and
    0.5. Decimals are equal if they agree to six places, such as 1/3 and 0.333333.

    The result is 0 if math-verify needs too much memory for the comparison, or more than `timeout` seconds of CPU time.
    The result is also 0 if the answer is too large for math-verify: more than 1,000 characters, brackets nested more
    than 16 deep, or integers of more than 32,768 bits. The metric `verify/cut_off` counts these answers, and the run's
    log shows some of them. In a batch, all unfinished comparisons together take at most `budget` seconds, or 0.05
    seconds each if that is more. Raises RuntimeError if math-verify cannot be started.
    """
    return _verify_rows([response], [answer], timeout=timeout, budget=budget)[0]


@function()
def contains(response: str, answer: Answers, prompt: str = "") -> float:
    """1 if the words of the answer occur in the response, one after another, else 0.

    `f1` defines what counts as a word. The result is 0 if the answer has no words. Of a list of accepted answers, one
    must occur.
    """
    text = f" {' '.join(_split_words(response))} "
    return float(any((words := _split_words(one)) and f" {' '.join(words)} " in text for one in _accepted(answer)))


@function()
def f1(response: str, answer: Answers, prompt: str = "") -> float:
    """The F1 score of SQuAD, from 0 to 1: the overlap of response and answer in words.

    The score is 2 c / (n + m), where n and m are the numbers of words of the response and the answer, and c is the
    number of words that the two texts share (arXiv:1606.05250, section 6.1). A word that occurs i times in the response
    and j times in the answer adds min(i, j) to c. Words are compared in lower case, without punctuation; the articles
    a, an and the are left out. The score is 1 if neither text has a word. Of a list of accepted answers, the best score
    counts, as in SQuAD.
    """
    return max((_f1(response, one) for one in _accepted(answer)), default=0.0)


def _f1(response: str, answer: str) -> float:
    response_words = Counter(_split_words(response))
    answer_words = Counter(_split_words(answer))
    total = response_words.total() + answer_words.total()
    return 2 * (response_words & answer_words).total() / total if total else 1.0


@function()
def matches(response: str, prompt: str = "", *, pattern: str) -> float:
    r"""1 if the whole response matches a regular expression of Python, else 0.

    In the pattern, `.` also matches a line end. In a program, write each backslash of the pattern twice:
    `matches(pattern = "-?\\d+")`. Raises ValueError if the pattern is not valid.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"the pattern {pattern!r} is not a regular expression: {error}") from error
    return float(compiled.fullmatch(response) is not None)


@function()
def tagged(response: str, prompt: str = "", *, tags: str = "think answer") -> float:
    """1 if the response is `<think>…</think> <answer>…</answer>`, else 0.

    Blanks between the tags are ignored (arXiv:2501.12948, section 2.2.2). `tags` are the names of the tags, in their
    order. Each tag must be opened once and closed once. Raises ValueError if `tags` has no name. Some chat templates
    end the prompt with an opening tag, so the response does not contain this tag: use `matches` with a pattern for
    such responses.
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
    """Kimi k1.5's length reward: short responses gain and long responses lose.

    The result is score + weight * l (arXiv:2501.12599, section 2.3.3). For a correct response, l = 0.5 - (length -
    shortest) / (longest - shortest). For an incorrect response, l is this number or 0, whichever is smaller. If all
    responses to the prompt have the same length, l is 0. `shortest` and `longest` are the smallest and the largest
    length of the responses to the same prompt, in tokens. A response is correct if its `score` is over 0. (The paper
    starts with a weight of 0 and raises the weight during training.)
    """
    import numpy as np

    lengths = np.array([len(tokens) for tokens in response], np.float64)
    spread = np.ptp(lengths)
    gain = 0.5 - (lengths - lengths.min()) / spread if spread else np.zeros(len(lengths))
    return np.asarray(score, np.float64) + weight * np.where(score > 0, gain, np.minimum(gain, 0))


@function(scope="group")
def shuffle(score: NDArray[np.float32], rng: np.random.Generator) -> NDArray[np.float32]:
    """The group's scores in random order: a control from which nothing can be learnt."""
    return rng.permutation(score)


@function()
def overlong(
    response: NDArray[np.int32], score: float, *, max: Count, buffer: Count, factor: NotNegative = 1.0
) -> float:
    """DAPO's soft punishment of long responses.

    The result is score - factor * clip((length - (max - buffer)) / buffer, 0, 1) (arXiv:2503.14476, eq. 13). Lengths
    are in tokens. A response of up to max - buffer tokens loses nothing, and a response of `max` tokens or more loses
    `factor`. Raises ValueError if `buffer` is over `max`.
    """
    if buffer > max:
        raise ValueError(f"the buffer of {buffer} tokens is over max = {max}")
    excess = (len(response) - (max - buffer)) / buffer
    return float(score) - factor * (1.0 if excess > 1 else excess if excess > 0 else 0.0)


@function()
def weighted_sum(*scores: float, weights: Sequence[float]) -> float:
    """The sum of all columns that the node reads, each times its weight.

    The weights are in the order in which the node reads the columns: `weighted_sum(0.7, 0.3)`. Raises ValueError if
    the number of weights is not the number of columns.
    """
    return float(sum(weight * float(score) for weight, score in zip(weights, scores, strict=True)))


def _split_words(text: str) -> list[str]:
    """Split a text into words, in the same way as SQuAD's script."""
    plain = text.lower().translate(str.maketrans("", "", string.punctuation))
    return [word for word in plain.split() if word not in ("a", "an", "the")]
