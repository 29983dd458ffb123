"""The reward `math_verify`: what it takes for an answer, what it judges equal, and that no answer holds it up or leaves
a process."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from fractions import Fraction
from pathlib import Path

import psutil
import pytest
from folders import TESTS
from hypothesis import given
from hypothesis import strategies as st

from msrl_graph import algorithms
from msrl_graph.algorithms import answers, judge, judges, registry

math_verify = algorithms.load("function", "math_verify")
DATA = TESTS / "data" / "gsm8k_test_solutions.jsonl"
SOLUTIONS = [json.loads(line)["answer"] for line in DATA.read_text(encoding="utf-8").splitlines()]
GOLDS = [solution.rpartition("#### ")[2] for solution in SOLUTIONS]
HARD = r"\boxed{(x+1)^{5000}}"  # sympy would compute it

EQUAL = (
    (r"\boxed{2^{5000}}", r"4^{2500}"),
    (r"\boxed{2^{300}}", r"4^{150}"),
    ("Answer: 2, 3 and 4", "4,3,2"),
    ("The answer is 15 - 3 = 12.", "12"),
    ("\\boxed{15 - 3 = 12}", "12"),
    ("\\boxed{1,234}", "1234"),
    ("\\boxed{1} then \\boxed{2}", "2"),
    ("#### 1,234", "1234"),
    ("#### 3 #### 18\n", "blah #### 18"),
    ("The answer is 42.", "42"),
    ("**Answer:** 42", "42"),
    ("Answer: $18", "18"),
    ("She makes $18 a day, so 18.", "18"),
    ("\\boxed{\\$18}", "18"),
    ("\\boxed{18 dollars}", "18"),
    ("\\boxed{18\\text{ dollars}}", "$18"),
    ("\\boxed{5 km}", "5"),
    ("\\boxed{5\\ \\mathrm{km}}", "5 km"),
    ("\\boxed{5\\text{ m}}", "5"),
    ("\\boxed{50\\%}", "50"),
    ("\\boxed{50\\%}", "0.5"),
    ("50 percent", "50%"),
    ("\\boxed{-3}", "-3"),
    ("The answer is \u22123.", "-3"),
    ("\\boxed{\\frac12}", "0.5"),
    ("\\boxed{\\dfrac{1}{2}}", "1/2"),
    ("\\boxed{1/3}", "0.333333"),
    ("0.333333", "\\frac{1}{3}"),
    ("\\boxed{1\\frac{1}{2}}", "3/2"),
    ("1 1/2 hours", "1.5"),
    ("\\boxed{(1,2)}", "(1,2)"),
    ("\\boxed{(1, 2)}", "(1,2)"),
    ("\\boxed{\\{1,2\\}}", "\\{2,1\\}"),
    ("\\boxed{[1,2)}", "[1,2)"),
    ("\\boxed{[0.5,2)}", "[\\frac12,2)"),
    ("\\boxed{(-\\infty,3]\\cup[5,\\infty)}", "(-\\infty, 3] \\cup [5, \\infty)"),
    ("\\boxed{1\\,234}", "1234"),
    ("\\boxed{1{,}234}", "1234"),
    ("\\boxed{1,\\!234}", "1234"),
    ("\\boxed{42.}", "42"),
    ("\\boxed{042}", "42"),
    ("\\boxed{€18}", "18"),
    ("\\boxed{x=5}", "5"),
    ("x = 5", "5"),
    (r"\boxed{1.414214}", r"\sqrt{2}"),
    ("\\boxed{\\sqrt{8}}", "2\\sqrt2"),
    ("\\boxed{2x+2}", "2(x+1)"),
    ("\\boxed{\\pi/2}", "\\frac{\\pi}{2}"),
    ("\\boxed{2.5 million}", "2500000"),
    ("\\boxed{1e-7}", "10^{-7}"),
    ("\\boxed{1.5\\times10^{3}}", "1500"),
    ("\\boxed{\\text{Evelyn}}", "Evelyn"),
    ("The answer is Tuesday.", "Tuesday"),
    ("\\boxed{90^\\circ}", "90"),
    ("\\boxed{B}", "B"),
    ("\\boxed{\\text{(B)}}", "B"),
    ("The answer is (B).", "B"),
    ("\\boxed{\\begin{pmatrix}1\\\\2\\end{pmatrix}}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
    ("\\boxed{1, 2}", "2,1"),
    ("\\boxed{5\\text{ m}^2}", "5"),
    ("3 times", "3"),
    ("\\boxed{3\\text{ times}}", "3"),
    ("#### 5 dozen", "5"),
    ("$x^2+1$", "x^2+1"),
    ("so $\\frac{1}{2}$", "0.5"),
    ("so it is $x^2$.", "x^2"),
    ("\\boxed{\\frac{-1}{2}}", "-0.5"),
    ("\\boxed{6!}", "720"),
    ("\\boxed{2^{10}}", "1024"),
    ("\\boxed{y=2x+3}", "y=2x+3"),
    ("\\boxed{2x+3}", "y=2x+3"),
    ("\\boxed{10\\text{ miles per hour}}", "10"),
    ("\\boxed{3:2}", "3:2"),
    ("\\boxed{3/2}", "3:2"),
    ("-18", "-$18"),
    ("\\boxed{-\\$18}", "-18"),
    ("\\boxed{12:30}", "12:30"),
    ("The final answer is 1/2.", "0.5"),
    ("\\boxed{\\text{No solution}}", "no solution"),
    ("\\boxed{100\\text{ cm}^2}", "100"),
    ("\\(\\boxed{7}\\)", "7"),
    ("\\boxed{x \\in [1,2]}", "[1,2]"),
    ("\\boxed{1 \\le x \\le 2}", "[1,2]"),
    ("\\boxed{.5}", "1/2"),
    ("\\boxed{4 eggs}", "4"),
    ("\\boxed{2+3i}", "3i+2"),
    ("\\boxed{\\sqrt{2}\\cdot 10^{-5}}", "\\frac{10^{-5}\\cdot 2}{\\sqrt2}"),
    ("\\boxed{\\emptyset}", "\\emptyset"),
    ("\\boxed{\\infty}", "\\infty"),
    ("<think>six times seven</think> <answer>42</answer>", "42"),
    ("<answer>1/2</answer>", "0.5"),
    ("<answer>1/2</answer>", "<answer>0.5</answer>"),
    ("<Answer>\n x = 5 \n</Answer>", "5"),
    ("<answer>$x^2+1$</answer>", "1+x^2"),
    ("<answer>\\[x^2+1\\]</answer>", "1+x^2"),
    ("<answer>\\boxed{42}</answer>", "42"),
    ("<answer>#### 42</answer>", "42"),
    ("#### <answer>42</answer>", "42"),
    ("\\boxed{\\boxed{5}}", "5"),
    ("<answer>The answer is 42.</answer>", "42"),
    ("<answer>She has 42 eggs.</answer>", "42"),
    ("<answer>No solution.</answer>", "no solution"),
    ("<answer>(B)</answer>", "B"),
    ("<answer>41</answer> no: <answer>42</answer>", "42"),
    ("<answer>41</answer> no: \\boxed{42}", "42"),
    ("\\boxed{41} no: <answer>42</answer>", "42"),
    ("The answer is 7. Wait, the answer is 8.", "8"),
    ("**Answer: 7** or rather **Answer: 8**", "8"),
    ("The answer is $2x$. Wait, the answer is $3x$.", "3x"),
    ("#### 1/2 #### x/2", "x/2"),
    ("The answer is 8. I hope this answer is correct.", "8"),
    ("The answer is correct.", "correct"),
    ("<think>The answer is 7?</think> 8", "8"),
    ("<think>The answer is 7.</think>", "7"),
    ("<think>\\boxed{7}</think> That is all.", "7"),
)
UNEQUAL = (
    (r"\boxed{2^{5000}}", r"4^{2501}"),
    (r"\boxed{2^{300}}", r"4^{151}"),
    (r"\boxed{\sqrt{2}}", "1.41422"),
    ("The answer is 2 or 3.", "2"),
    ("The answer is either $2 or $3.", "2"),
    ("Answer: 2, 3, 4", "2"),
    ("The answer is between 2 and 5", "2"),
    ("The answer is $2$ or $3$", "3"),
    ("\\boxed{41}", "42"),
    ("\\boxed{42} no, \\boxed{41}", "42"),
    ("\\boxed{}", "42"),
    ("", "42"),
    ("I do not know", "42"),
    ("\\boxed{3xy}", "3"),
    ("\\boxed{2\\pi}", "2"),
    ("\\boxed{5 million}", "5"),
    ("\\boxed{dog}", "god"),
    ("1e-7", "1"),
    ("\\boxed{10^{-7}}", "2\\cdot10^{-7}"),
    ("\\boxed{0.0000001}", "0.0000002"),
    ("\\boxed{\\sqrt{2}\\cdot 10^{-7}}", "\\sqrt{3}\\cdot 10^{-7}"),
    ("\\boxed{1\\,234}", "235"),
    ("\\boxed{-5}", "5"),
    ("\\boxed{(1,2)}", "[1,2]"),
    ("\\boxed{(1,2)}", "(2,1)"),
    ("\\boxed{\\{1,2\\}}", "{1,3}"),
    ("\\boxed{1/3}", "0.3"),
    ("\\boxed{0.33}", "1/3"),
    ("\\boxed{5\\%}", "50"),
    ("\\boxed{1000001}", "1000000"),
    ("\\boxed{1,2}", "12"),
    ("\\boxed{(1,200)}", "1200"),
    ("\\boxed{18 or 20}", "18"),
    ("\\boxed{x}", "y"),
    ("\\boxed{x+1}", "x"),
    ("\\boxed{A}", "B"),
    ("The answer is Monday", "Tuesday"),
    ("\\boxed{3 apples and 4 pears}", "3"),
    ("\\boxed{2\\sqrt{2}}", "2"),
    ("\\boxed{1234567.1}", "1234567.2"),
    ("#### ", "18"),
    ("\\boxed{\\frac{1}{0}}", "0"),
    ("\\boxed{3 + 4i}", "3"),
    ("\\boxed{12", "12"),
    ("between 17 and 18", "17"),
    ("\\boxed{18x}", "18"),
    ("\\boxed{18^2}", "18"),
    ("\\boxed{18!}", "18"),
    ("\\boxed{\\sin 18}", "18"),
    ("\\boxed{18^\\circ C\\text{ or }20}", "18"),
    ("\\boxed{x>5}", "5"),
    ("\\boxed{x \\neq 5}", "x=5"),
    ("\\boxed{1}", "1,2"),
    ("\\boxed{5\\frac12}", "5"),
    ("The answer is 7. Wait, the answer is 8.", "7"),
    ("#### 41 #### 42", "41"),
    ("<think>\\boxed{41}</think><answer>42</answer>", "41"),
    ("<answer>41</answer> no: <answer>42</answer>", "41"),
    ("<answer>2 or 3</answer>", "2"),
    ("<answer></answer>", "42"),
    ("<answer>4", "4"),  # cut off
    ("<think>The answer is 7?</think> 8", "7"),
    ("<think>\\boxed{7}</think> The answer is $x^2$.", "7"),
)


@pytest.mark.parametrize(("response", "answer"), EQUAL)
def test_equal(response, answer):
    assert math_verify(response, answer) == 1


@pytest.mark.parametrize(("response", "answer"), UNEQUAL)
def test_unequal(response, answer):
    assert math_verify(response, answer) == 0


def spellings(gold):
    """A whole number as models write it."""
    n = int(gold.replace(",", ""))
    thousands = f"{n:,}"
    return (
        rf"So it is \boxed{{{n}}}.",
        rf"First \boxed{{{n + 1}}}, no: $\boxed{{{thousands}}}$",
        rf"\[\boxed{{{thousands.replace(',', '{,}')}}}\]",
        f"6 * 7 = 42\n#### {n}",
        f"#### {thousands}",
        f"The answer is {n}.",
        f"The final answer is: **{thousands}**. I hope it is correct.",
        f"Answer: ${thousands}",
        rf"\boxed{{{'-' * (n < 0)}\${abs(n)}}}",
        rf"\boxed{{{n} dollars}}",
        rf"\boxed{{{thousands}\text{{ km}}}}",
        f"#### {n} eggs per day",
        rf"\boxed{{{n}.00}}",
        f"The answer is ${thousands}.0.",
        rf"\boxed{{\frac{{{3 * n}}}{{3}}}}" if n >= 0 else rf"\boxed{{-\frac{{{-3 * n}}}{{3}}}}",
        f"#### {7 * n}/7",
        rf"\boxed{{{n}\%}}",
    )


def test_every_answer_of_gsm8k_is_equal_to_itself_in_usual_spellings():
    assert len(GOLDS) == 1319
    missed = [
        (r, g)
        for solution, g in zip(SOLUTIONS, GOLDS, strict=True)
        for r in spellings(g)
        if not math_verify(r, solution)
    ]
    missed += [(s, g) for s, g in zip(SOLUTIONS, GOLDS, strict=True) if not (math_verify(s, g) and math_verify(s, s))]
    assert missed == []


def test_no_answer_of_gsm8k_is_equal_to_another():
    rng = random.Random(0)
    taken = []
    for gold in GOLDS:
        for response in spellings(gold):
            other = rng.choice(GOLDS)
            hundredth = "%" in response and int(gold.replace(",", "")) == 100 * int(other.replace(",", ""))
            if other.replace(",", "") != gold.replace(",", "") and not hundredth and math_verify(response, other):
                taken.append((response, other))
    assert taken == []


def test_the_library_says_the_same_of_numbers():
    # What is said of numbers here, and by math-verify of the same LaTeX.
    rng = random.Random(1)
    texts = [
        "0",
        "7",
        "-7",
        "1/2",
        r"\frac{1}{2}",
        "0.5",
        "0.333333",
        r"-\frac{1}{3}",
        "1234",
        "1,234",
        "50",
        r"50\%",
        "2.50",
        "5/2",
    ]
    pairs = [(a, b) for a in texts for b in texts] + [(rng.choice(GOLDS), rng.choice(GOLDS)) for _ in range(100)]
    for a, b in pairs:
        assert answers.number(a) and answers.number(b)
        assert (math_verify(rf"\boxed{{{a}}}", b) == 1) == judges.equal(
            [judges.JudgeRequest(a, b, True)], timeout=9, budget=9
        )[0].equal, (a, b)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 234 567", 1234567),
        ("1,23", None),
        (r"-2\frac{1}{2}", Fraction(-5, 2)),
        (r"2 \frac 1 2 \text{ hours}", Fraction(5, 2)),
        ("3.5e-2", Fraction(35, 1000)),
        ("2 \u00d7 10^3 kg", 2000),
        ("1.5 million people", 1500000),
        ("18 or 20", None),
        ("5 km/h", 5),
        ("5 x", None),
        ("5x", None),
        ("5kg", 5),
        ("-40 °C", -40),
        ("1/0", None),
        ("12:30", None),
        ("3 cm²", 3),
        ("3^2", None),
        ("9" * 5000, None),
        ("1e9999", None),
    ],
)
def test_what_is_a_number(text, value):
    found = answers.number(text)
    assert (found and found.value) == value


@given(st.fractions(), st.booleans())
def test_a_number_is_read_back_as_it_is_written(value, percent):
    found = answers.ParsedNumber(value, percent)
    assert answers.number(str(found)) == found
    assert math_verify(rf"\boxed{{{found}}}", str(found)) == 1 != math_verify(rf"\boxed{{{found}}}", str(value + 1000))


@given(
    st.decimals(-(10**9), 10**9, places=3),
    st.sampled_from(["{}", "${}", "{} dollars", r"{}\text{{ m}}", r"\${}", "**{}**", "{}."]),
)
def test_a_decimal_is_its_value_in_any_spelling(value, spelling):
    for written in (f"{value:f}", f"{value:,f}"):
        found = answers.number(spelling.format(written))
        assert found and found.value == Fraction(value) and found.rounded


def test_patterns_are_linear_in_a_hostile_response():
    pieces = (
        "$",
        "x ",
        "the answer ",
        "1 ",
        r"\boxed{",
        "}",
        "{",
        "#",
        "#### \n",
        "answer" + " " * 50,
        "1,",
        r"\frac",
        "answer is ",
    )
    pieces += ("<answer>", "</answer>", "the answer is correct. ", "<answer>aa ", "a" * 99, "####", "</think>")
    texts = [piece * (200_000 // len(piece)) for piece in pieces]
    texts += [
        o * (200_000 // len(o + c)) + c * (200_000 // len(o + c))
        for o, c in ((r"\boxed{", "}"), ("<answer>", "</answer>"))
    ]
    for text in texts:
        since = time.process_time()
        found = answers.parse_response(text)
        answers.same(found, answers.parse_gold(text))
        assert time.process_time() - since < 2, text[:20]


def processes():
    living = [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
    return [p for p in living if any(a.endswith("judge.py") for a in p.cmdline())]


def gone(pid):
    until = time.monotonic() + 40
    while time.monotonic() < until:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def test_past_its_time_an_answer_counts_0_and_the_log_says_so(capsys):
    since = time.monotonic()
    assert math_verify("x" * 500 + HARD, "3", timeout=0.3) == 0
    assert time.monotonic() - since < 10
    assert capsys.readouterr().err == (
        "math_verify: math-verify took more than 0.3 s, so it counts 0: '(x+1)^{5000}' against '3'\n"
    )
    assert math_verify(r"\boxed{2x}", "x + x") == 1 and capsys.readouterr().err == ""


def test_any_thread_may_ask_and_callers_at_once_have_a_judge_each():
    got = {}

    def ask(i):
        got[i] = [math_verify(rf"\boxed{{\sqrt{{{i}}} + {n}}}", rf"{n + i % 2} + \sqrt{{{i}}}") for n in range(5)]

    threads = [threading.Thread(target=ask, args=(i,)) for i in (2, 3, 5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert got == {2: [1] * 5, 3: [0] * 5, 5: [0] * 5} and 1 <= len(processes()) <= 3


def test_a_judge_is_bounded_and_holds_nothing_heavy():
    math_verify(r"\boxed{2x}", "x + x")
    process = processes()[0]
    assert process.rlimit(psutil.RLIMIT_AS) == (2**30, 2**30)
    assert not re.search("/(torch|ray|transformers|numpy)/", Path(f"/proc/{process.pid}/maps").read_text())
    assert process.memory_info().rss < 300 * 2**20


def nest(opens, closes, times, core="1"):
    return opens * times + core + closes * times


BOMBS = (
    "9^{9^{9^9}}", "1.5^{10^{3000}}", "(1/2)^{99999999}", "2^{-99999999}", r"\left(10^{9}\right)^{10^{9}}", "99999999!",
    r"\binom{99999999}{49999999}", r"\prod_{i=1}^{99999999} (i+1)", r"[-10^{99999}, 10^{99999}]", "x^{2^{99999}}",
    r"\sin(10^{99999})",
    nest("(", ")", 1000), nest(r"\frac{1}{", "}", 500, "2"), nest(r"\sqrt{", "}", 400, "2"),
    nest(r"\left[", r"\right]", 30),
    ",".join(map(str, range(10_000))),
    nest(r"\begin{pmatrix}", r"\end{pmatrix}", 1, r"\\".join(["&".join("1" * 100)] * 100)),
    "x + " + "7" * 5000, "+".join(["x"] * 5000),
)  # fmt: skip


def counted():
    return registry.take_amounts().get("verify/cut_off")


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda b: b[:16])
def test_a_bomb_is_told_before_it_is_computed(bomb, capsys):
    counted()
    assert math_verify(rf"\boxed{{{bomb}}}", "3x") == math_verify("3x", bomb) == 0
    assert counted() == 2
    assert capsys.readouterr().err.count(judge.REFUSED[b"size"]) == 2
    assert math_verify(f"So it is ${bomb}$.", "3x") == 0
    assert math_verify(rf"\boxed{{{bomb}}}", bomb) == 1
    assert "more than 5 s" not in capsys.readouterr().err


def test_honest_answers_keep_their_scores_among_bombs():
    bombs = [*BOMBS, "10**10**10", "5!!!!!!", "{" * 500]
    rows = [(rf"\boxed{{{bombs[i % len(bombs)]} + {i}x}}", "3x", 0) for i in range(400)]
    rows[::10] = [(rf"\boxed{{x + {i} + x}}", f"{i + i % 2} + 2x", 1 - i % 2) for i in range(40)]
    assert math_verify.many([r for r, *_ in rows], [a for _, a, _ in rows], timeout=5, budget=60) == [
        worth for *_, worth in rows
    ]
    assert counted() > 300


def test_what_takes_its_time_shares_the_budget(monkeypatch):
    # Twenty that end never and one that ends late, each with what is left in even shares, and no more than its limit.
    asked = []

    def ask(questions, limit, timeout):
        asked.append((len(questions), round(limit, 3)))
        return [
            judges.Verdict(q.response == "late" and limit > 0.5, "", q.response != "late" or limit <= 0.5)
            for q in questions
        ]

    monkeypatch.setattr(judges, "_asked", ask)
    questions = [judges.JudgeRequest(str(i), "1", True) for i in range(20)] * 2 + [
        judges.JudgeRequest("late", "1", True)
    ]
    assert [v.equal for v in judges.equal(questions, timeout=5, budget=60)] == [False] * 40 + [True]
    assert asked == [(21, round(60 / 21, 3))]
    for budget, rounds in ((1, [(21, 0.05)]), (8.4, [(21, 0.4)]), (1000, [(21, 5)])):
        asked.clear()
        judges.equal(questions, timeout=5, budget=budget)
        assert asked == rounds, budget
    asked.clear()
    monkeypatch.setattr(
        judges,
        "_asked",
        lambda questions, limit, _: asked.append((len(questions), round(limit, 3))) or late(questions, limit),
    )

    def late(questions, limit):
        return [judges.Verdict(False, "", float(q.response) > limit) for q in questions]

    judges.equal(
        [judges.JudgeRequest(str(cost), "1", True) for cost in [0.01] * 50 + [0.2, 0.7, 9]], timeout=5, budget=6
    )
    assert asked == [(4, 1.5), (1, 4.5)]


@pytest.mark.slow
def test_an_answer_that_takes_too_much_memory_is_cut_off():
    one = judges.Judge(memory=200 * 2**20)
    verdict = one.ask(judges.JudgeRequest("]" * 2**24, "3", False), 30, 30)
    assert not verdict.equal and verdict.cut_off == "math-verify took too much memory"
    assert one.ask(judges.JudgeRequest("2x", "x + x", True), 30, 30) == judges.Verdict(True)  # of a fresh one
    one.end()


def test_a_judge_that_someone_kills_has_not_judged(capsys):
    math_verify(r"\boxed{2x}", "x + x")
    for process in processes():
        process.kill()
    assert math_verify(r"\boxed{2x}", "x + x") == 1
    killed = threading.Timer(0.5, lambda: [p.kill() for p in processes()])
    killed.start()
    assert math_verify(HARD, "3", timeout=1.5) == 0  # asked anew, of another
    killed.join()
    assert "took more than 1.5 s" in capsys.readouterr().err


def test_a_judge_that_someone_kills_while_it_starts_is_replaced(monkeypatch):
    monkeypatch.setattr(judges, "_idle", [])
    there = {p.pid for p in processes()}

    def kill():
        while not (new := [p for p in processes() if p.pid not in there]):
            time.sleep(0.002)
        new[0].kill()

    killer = threading.Thread(target=kill)
    killer.start()
    assert math_verify(r"\boxed{2x}", "x + x") == 1
    killer.join()


def test_a_library_that_does_not_start_is_no_score(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text("raise SystemExit(7)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(judges, "_idle", [])
    with pytest.raises(RuntimeError, match="the process that runs math-verify did not start: it ended with status 7"):
        math_verify(r"\boxed{2x}", "x + x")


CALLER = """
import os, sys, time
from msrl_graph import algorithms
verify = algorithms.load("function", "math_verify")
assert verify("\\\\boxed{2x}", "x + x") == 1
child = os.fork() if "fork" in sys.argv else 1
if not child:
    assert verify("\\\\boxed{3x}", "x + 2x") == 1
    os._exit(0)
if child > 1:
    assert os.waitpid(child, 0)[1] == 0
assert verify("\\\\boxed{3x}", "x + 2x") == 1
import psutil
print(*(p.pid for p in psutil.Process().children()), flush=True)
if "busy" in sys.argv:
    verify("\\\\boxed{(x+1)^{5000}}", "3", timeout=2)
if "stay" in sys.argv:
    time.sleep(60)
"""


@pytest.mark.parametrize("how", [["stay"], ["busy"], ["fork", "stay"], [], ["fork"]], ids=str)
def test_no_judge_outlives_its_caller(how):
    caller = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", CALLER, *how], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with caller:
        pids = [int(p) for p in caller.stdout.readline().split()]
        assert len(pids) == 1
        if how and how[-1] in ("stay", "busy"):
            time.sleep(0.3)
            os.kill(caller.pid, signal.SIGKILL)
        assert caller.stderr.read() == ""
    assert gone(pids[0])
