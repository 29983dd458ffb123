"""Rewards, against values worked out by hand or from their definitions."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrl_graph import algorithms

contains, f1, matches, tagged, length_reward, group_norm, leave_one_out = (
    algorithms.load("function", name)
    for name in ("contains", "f1", "matches", "tagged", "length_reward", "group_norm", "leave_one_out")
)
words = st.lists(st.sampled_from(["red", "Green", "blue", "the"]), max_size=6)


@pytest.mark.parametrize(
    ("response", "answer", "f", "inside"),
    [
        ("The cat sat.", "a cat", 2 / 3, 1),  # cat, sat against cat: one common of 2 + 1 words
        ("cat cat", "cat", 2 / 3, 1),
        ("cat", "cat cat", 2 / 3, 0),
        ("sat the cat", "cat sat", 1, 0),
        ("concatenate", "cat", 0, 0),
        ("in 1998, in Paris", "in Paris!", 4 / 6, 1),
        ("", "", 1, 0),
        ("the", "!", 1, 0),
        ("", "cat", 0, 0),
        ("cat", "", 0, 0),
    ],
)
def test_words_in_common_by_hand(response, answer, f, inside):
    assert f1(response, answer) == pytest.approx(f) and contains(response, answer) == inside


def test_one_of_several_accepted_answers_is_enough():
    exact, verify = (algorithms.load("function", name) for name in ("exact_match", "math_verify"))
    assert exact("7", ["8", 7]) == exact("7", [7.0]) == exact("7", 7) == exact("7", "7") == 1
    assert exact("7", []) == exact("7", ["8"]) == exact("[7]", ["7"]) == 0 and exact("[7]", "[7]") == 1
    assert verify.many(["1/2", "3", "x"], [["2", "0.5"], ["4", "5"], []], timeout=5.0, budget=60.0) == [1, 0, 0]
    assert contains("the cat sat", ["dog", "cat"]) == 1 and contains("cat", ["dog"]) == contains("cat", []) == 0
    assert f1("the cat sat", ["dog", "a cat", "sat"]) == pytest.approx(2 / 3) and f1("cat", []) == 0
    for wrong, kind in (([None], "NoneType"), ({"a": 1}, "dict"), ([True], "bool")):
        with pytest.raises(TypeError, match=f"an accepted answer is text or a number, not {kind}"):
            exact("7", wrong)


@given(words, words)
def test_f1_is_the_harmonic_mean_of_precision_and_recall(given, right):
    n, m = ([w.lower() for w in side if w != "the"] for side in (given, right))
    common = sum(min(n.count(w), m.count(w)) for w in {*n})
    precision = common / len(n) if n else 0
    recall = common / len(m) if m else 0
    expected = 2 * precision * recall / (precision + recall) if common else float(not n and not m)
    assert f1(" ".join(given), " ".join(right)) == pytest.approx(expected)
    assert (f1(" ".join(given), " ".join(right)) == 1) == (Counter(n) == Counter(m))


@pytest.mark.parametrize(
    ("pattern", "response", "score"),
    [
        (r"-?\d+", "42", 1),
        (r"-?\d+", "42.", 0),
        (r"-?\d+", "so 42", 0),
        (r"-?\d+", "42\n", 0),
        (r"first.*last", "first\n\nlast", 1),
        (r"(?i)yes|no", "NO", 1),
        ("", "", 1),
    ],
)
def test_matches_is_of_the_whole_response(pattern, response, score):
    assert matches(response, pattern=pattern) == score


def test_a_pattern_that_is_none_is_told():
    with pytest.raises(
        ValueError,
        match=r"the pattern '\(4' is not a regular expression: missing \), unterminated subpattern at position 0",
    ):
        matches("4", pattern="(4")


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>1 + 1\n= 2</think>\n<answer>2</answer>\n", 1),
        ("<think></think><answer></answer>", 1),
        ("<think>a < b</think><answer>2</answer>", 1),
        ("so <think>x</think><answer>2</answer>", 0),
        ("<think>x</think> so <answer>2</answer>", 0),
        ("<think>x</think><answer>2</answer>.", 0),
        ("<think>x</think><answer>2", 0),
        ("<answer>2</answer><think>x</think>", 0),
        ("<think>x<think>y</think></think><answer>2</answer>", 0),
        ("<think>x</think><answer>1</answer><answer>2</answer>", 0),
        ("<think>x<answer>2</think></answer>", 0),
        ("2", 0),
    ],
)
def test_tags_are_opened_and_closed_once_in_their_order(response, score):
    assert tagged(response) == score


def test_other_tags():
    assert tagged("<plan>x</plan>", tags="plan") == 1 == tagged("<a>x</a><b.>y</b.> <c>z</c>", tags="a b. c")
    with pytest.raises(ValueError, match="`tags` holds no name"):
        tagged("x", tags=" ")


def tokens(*sizes):
    return [np.zeros(n, np.int32) for n in sizes]


def test_length_reward_by_hand():
    # Lengths 2, 4, 6, 6: l = 0.5, 0, -0.5, -0.5; only what is correct gains.
    got = length_reward(tokens(2, 4, 6, 6, 2), np.array([1, 1, 1, 0, 0], np.float32), weight=0.5)
    assert list(got) == [1.25, 1, 0.75, -0.25, 0] and got.dtype == np.float64
    assert list(length_reward(tokens(3, 3), np.array([1, 0], np.float32))) == [1, 0]
    assert list(length_reward(tokens(3), np.array([-1], np.float32))) == [-1]
    assert list(length_reward(tokens(0, 9), np.array([1, 1], np.float32), weight=0)) == [1, 1]
    got = length_reward(tokens(1, 2), np.array([math.nan, 1], np.float32))
    assert math.isnan(got[0]) and got[1] == 0.5


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), min_size=1, max_size=8))
def test_of_two_correct_responses_the_longer_never_has_more(rows):
    scores = np.array([r for _, r in rows], np.float32)
    got = length_reward(tokens(*(n for n, _ in rows)), scores)
    assert (np.abs(got - scores) <= 0.5).all() and (got[scores == 0] <= 0).all()
    right = sorted((n, -float(v)) for (n, r), v in zip(rows, got, strict=True) if r)
    assert [v for _, v in right] == sorted(v for _, v in right)


@pytest.mark.parametrize("estimator", [group_norm, leave_one_out])
@given(reward=st.floats(-1e6, 1e6, width=32), size=st.integers(1, 9))
def test_equal_rewards_have_no_advantage_whatever_they_are(estimator, reward, size):
    got = estimator(tokens(*[2] * size), np.full(size, reward, np.float32))
    assert all((g == 0).all() and len(g) == 2 for g in got)


@pytest.mark.parametrize("name", ["exact_match", "math_verify"])
def test_many_rows_at_once_are_worth_what_each_is(name):
    score = algorithms.load("function", name)
    rows = [("42 ", "42"), ("41", "42"), (r"\boxed{2x}", "x + x"), (" \n", "")] * 3
    options = {"timeout": 5, "budget": 60} if name == "math_verify" else {}
    assert score.many([r for r, _ in rows], [a for _, a in rows], **options) == [score(r, a) for r, a in rows]
