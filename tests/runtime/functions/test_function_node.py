"""Function nodes: what they see, and what is said when they return what their columns cannot hold."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from function_calls import call, results

from msrl_graph.ir.graph import Expr, Graph, State
from msrl_graph.ir.plan import Deployment, Plan
from msrl_graph.runtime.data import columns
from msrl_graph.runtime.driver import run_folder
from msrl_graph.runtime.functions.units import options_of
from msrl_graph.runtime.functions.user_traceback import shorten_value
from msrl_graph.runtime.process.task_report import NextValues, RunError


def test_a_row_function_sees_its_row_and_text_where_it_asks(tmp_path):
    source = "def f(response: str, answer: str, score):\n    return len(response) + score * 10, answer + response\n"
    out = call(tmp_path, source, ("reward", "kind"))
    assert list(out["reward"].values) == [12, 21, 30, 43]
    assert [out["kind"].text(i) for i in range(4)] == ["xab", "xc", "y", "ydef"]


@pytest.mark.parametrize(
    ("fails", "reason", "told"),
    [
        ("raise OSError('no judge')", "raised", "OSError: no judge, at "),
        ("raise SystemExit(2)", "raised", "SystemExit: 2, at "),
        ("bytearray(10**15)", "memory", "MemoryError: , at "),
        ("return 1.0, 2", "rubbish", "BadResult: it returned int 2 for `kind`, where text belongs"),
        ("return 1.0", "rubbish", "BadResult: it returned float 1.0, where a tuple of 2 belongs: reward, kind"),
    ],
)
def test_a_row_whose_function_fails_leaves_and_nothing_of_it_stays(fails, reason, told, tmp_path):
    source = f"def f(response: str, score):\n    if not response: {fails}\n    return score, response\n"
    made = results(tmp_path, source, ("reward", "kind"), on_failure="leave")
    assert made.columns["host.mine.times"].rows.tolist() == [0, 1, 2, 3]
    assert made.columns["host.mine.times"].column.values.tolist() == [1, 1, 0, 1]
    assert made.columns["reward"].rows.tolist() == made.columns["kind"].rows.tolist() == [0, 1, 3]
    assert made.columns["reward"].column.values.tolist() == [1, 2, 4]
    ((where, (failure, rows)),) = made.failed.items()
    assert (where, rows, failure.reason) == ("row 2", 1, reason) and failure.summary.reason.startswith(told)


def test_a_group_whose_function_fails_leaves_as_one(tmp_path):
    source = "def f(score, answer):\n    assert answer[0] != 'y', 'no'\n    return score\n"
    made = results(tmp_path, source, ("reward",), "prompt", on_failure="leave")
    assert made.columns["host.mine.times"].column.values.tolist() == [1, 1, 0, 0]
    assert made.columns["reward"].rows.tolist() == [0, 1]
    assert [(where, rows) for where, (_, rows) in made.failed.items()] == [("prompt 1", 2)]


def test_a_group_function_sees_its_group(tmp_path):
    source = "def f(response, score):\n    assert len(response) == len(score) == 2\n    return score - score.mean()\n"
    assert list(call(tmp_path, source, ("reward",), "prompt")["reward"].values) == [-0.5, 0.5, -0.5, 0.5]
    source = "def f(score):\n    return score / score.sum()\n"
    assert list(call(tmp_path, source, ("reward",), "batch")["reward"].values) == pytest.approx([0.1, 0.2, 0.3, 0.4])


@pytest.mark.parametrize("kind", ["str", "list[str]", '"Sequence[str]"', "typing.Iterable[str] | None"])
def test_a_group_function_sees_texts_however_it_asks(tmp_path, kind):
    source = f"import typing\nfrom collections.abc import Sequence\n\ndef f(response: {kind}, answer: {kind}):\n"
    source += "    return [len(a + r) for a, r in zip(answer, response)], ['/'.join(response)] * 2\n"
    out = call(tmp_path, source, ("reward", "kind"), "prompt")
    assert list(out["reward"].values) == [3, 2, 1, 4]
    assert [out["kind"].text(i) for i in range(4)] == ["ab/c", "ab/c", "/def", "/def"]


def test_ids_where_no_text_is_asked_for_and_values_a_token(tmp_path):
    out = call(tmp_path, "def f(response):\n    return response * 2.0\n", ("advantage",))
    assert list(out["advantage"].values) == [2.0 * ord(c) for c in "abcdef"]
    assert list(out["advantage"].lengths) == [2, 1, 0, 3]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_function_may_fill_one_array_for_all_rows(tmp_path, dtype):
    source = f"import numpy as np\n\nBUFFER = np.zeros(3, np.{dtype})\n\ndef f(response):\n"
    source += "    BUFFER[: len(response)] = response\n    return BUFFER[: len(response)]\n"
    out = call(tmp_path, source, ("advantage",))
    assert list(out["advantage"].values) == [ord(c) for c in "abcdef"]


def test_whole_numbers_and_truths_of_any_type_are_taken(tmp_path):
    out = call(tmp_path, "def f(score):\n    return score * 2, score == 2\n", ("level", "right"))
    assert out["level"].values.tolist() == [2, 4, 6, 8] and out["level"].values.dtype == np.int32
    assert out["right"].values.tolist() == [False, True, False, False]
    out = call(tmp_path, "def f(score):\n    return int(score) == 2, int(score) % 2\n", ("level", "right"))
    assert out["level"].values.tolist() == [0, 1, 0, 0] and out["right"].values.tolist() == [True, False, True, False]


def test_options_renamed_columns_and_a_generator_keyed_by_unit(tmp_path):
    source = "def f(value, rng, *, scale=1.0):\n    return float(value) * scale + rng.random() * 1e-3\n"
    arguments = (("value", Expr("column", "score")), ("scale", Expr("number", 3.0)))
    one, two = (call(tmp_path, source, ("reward",), arguments=arguments)["reward"].values for _ in range(2))
    assert np.array_equal(one, two) and len({round(float(v % 1), 9) for v in one}) == 4
    assert [int(v) for v in one] == [3, 6, 9, 12]


def test_all_columns_that_are_left_in_their_order(tmp_path):
    texts = call(tmp_path, "def f(*rest: str):\n    return rest[1] + rest[0]\n", ("kind",))["kind"]
    assert [texts.text(i) for i in range(4)] == ["abx", "cx", "y", "defy"]
    source = "def f(score, *rest, rng, scale=2):\n    return score * scale + len(rest[0]) * 10 + len(rest[1]) * 100\n"
    source += "def g(*rest, rng):\n    return float(len(rest)) + float(rest[2]) * 10\n"
    assert list(call(tmp_path, source, ("reward",))["reward"].values) == [212, 114, 16, 318]
    source = source.replace("def f", "def h").replace("def g", "def f")
    assert list(call(tmp_path, source, ("reward",))["reward"].values) == [13, 23, 33, 43]
    source = "def f(*rest):\n    return rest[2] / len(rest)\n"
    assert list(call(tmp_path, source, ("reward",), "batch")["reward"].values) == pytest.approx(
        [1 / 3, 2 / 3, 1, 4 / 3]
    )


def test_an_option_that_is_a_call_is_what_that_gives():
    given = options_of(
        Expr(
            "call",
            "resample",
            (Expr("call", "pow", (Expr("number", 3.0),), ("k",)), Expr("column", "reward")),
            ("weights", "score"),
        )
    )
    assert list(given) == ["weights"] and list(given["weights"](np.array([1.0, 2.0]))) == [0.125, 1.0]


@pytest.mark.parametrize(
    ("body", "writes", "per", "message"),
    [
        ("return None", ("level",), "row", "on row 0 of iteration 7: BadResult: it returned None for `level`"),
        ("return float('nan')", ("reward",), "row", "it returned nan for `reward`"),
        ("return 'good'", ("reward",), "row", "it returned str 'good' for `reward`, where f32 belongs"),
        ("return '3.5'", ("reward",), "row", "it returned str '3.5' for `reward`, where f32 belongs"),
        ("return float(score) / 4", ("level",), "row", "it returned float 0.25 for `level`, where i32 belongs"),
        ("return '12'", ("level",), "row", "it returned str '12' for `level`, where i32 belongs"),
        ("return 2**31", ("level",), "row", "it returned int 2147483648 for `level`, where i32 belongs"),
        ("return (score * 0 + 1).astype('f8') * 2**31", ("level",), "row", "for `level`, where i32 belongs"),
        ("return __import__('numpy').array(0.25)", ("level",), "row", ("it returned ndarray array(0.25) for `level`, "
            "where i32 belongs")),
        ("return 0.5", ("right",), "row", "it returned float 0.5 for `right`, where bool belongs"),
        ("return [1.0, 2.0]", ("reward",), "row", "it returned list of 2 for `reward`, where one number belongs"),
        ("return 1.0", ("advantage",), "row", "it returned float 1.0 for `advantage`, where one value a token belongs"),
        ("return [1.0]", ("advantage",), "row", "it returned 1 values for `advantage`, where `response` has 2 tokens"),
        ("return 3", ("kind",), "row", "it returned int 3 for `kind`, where text belongs"),
        ("return 1.0", ("reward",), "prompt", ("on prompt 0 of iteration 7: BadResult: it returned float 1.0 for "
            "`reward`")),
        ("return score[:1]", ("reward",), "prompt", ("it returned ndarray of 1 for `reward`, where one value for "
            "each of 2")),
        ("return 1.0", ("reward", "kind"), "row", "it returned float 1.0, where a tuple of 2 belongs: reward, kind"),
        ("return 1 / 0", ("reward",), "row", "ZeroDivisionError: division by zero, at {path}:2"),
        ("return answer['x']", ("reward",), "row", "TypeError"),
        ("raise SystemExit(2)", ("reward",), "row", "SystemExit: 2, at {path}:2"),
    ],
)  # fmt: skip
def test_what_cannot_be_held_is_told_with_node_line_and_row(tmp_path, body, writes, per, message):
    with pytest.raises(RunError) as error:
        call(tmp_path, f"def f(response, score, answer):\n    {body}\n", writes, per)
    assert str(error.value).startswith("`host.mine` (line 0) failed on ")
    assert message.format(path=tmp_path / "mine.py") in str(error.value)


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    "reward", ["weighted_sum(score, float(bad), weights=[1, 0])", "overlong([], float(bad), max=4, buffer=2)"]
)
def test_a_reward_that_is_no_number_ends_the_run_at_its_row(tmp_path, bad, reward):
    source = "from msrl_graph.algorithms.rewards import overlong, weighted_sum\n"
    source += f"def f(score):\n    bad = '{bad}' if score == 3 else '0'\n    return {reward}\n"
    message = "`host.mine` (line 0) failed on row 2 of iteration 7: BadResult: it returned "
    with pytest.raises(RunError) as error:
        call(tmp_path, source, ("reward",))
    got = "nan" if reward.startswith("weighted") else bad  # 0 times an infinite number
    assert str(error.value) == f"{message}{got} for `reward`\n  score: 3.0"


def test_the_row_of_a_group_that_holds_no_number_is_named(tmp_path):
    source = "def f(score):\n    return [1.0, 2.0] if score[0] == 1 else [0.0, float('inf')]\n"
    message = "`host.mine` (line 0) failed on prompt 1, row 3 of iteration 7: BadResult: it returned inf for `reward`"
    with pytest.raises(RunError) as error:
        call(tmp_path, source, ("reward",), "prompt")
    assert str(error.value) == f"{message}\n  score: float32 of 2: [3., 4.]"


NESTED = """import json

def parse(text):
    return json.loads(text)["score"]

def f(response: str, answer, score):
    return parse(response + "{" + answer * 100)
"""


def test_an_error_is_told_with_how_the_users_code_got_there_and_the_row(tmp_path):
    with pytest.raises(RunError) as error:
        call(tmp_path, NESTED, ("reward",))
    path = tmp_path / "mine.py"
    assert str(error.value).splitlines() == [
        (
            "`host.mine` (line 0) failed on row 0 of iteration 7: JSONDecodeError: Expecting value: line 1 column 1 "
            f"(char 0), at {path}:4"
        ),
        f'  {path}:7 in f: return parse(response + "{{" + answer * 100)',
        f'  {path}:4 in parse: return json.loads(text)["score"]',
        "  response: 'ab'",
        "  answer: 'x'",
        "  score: 1.0",
    ]


def test_a_message_stays_short_and_the_log_has_all_of_it(tmp_path):
    source = (
        "def f(response, answer):\n    return f([answer[0] * 900], answer) if len(response) > 1 else "
        "deep(response, 50)\n"
    )
    source += (
        "def deep(texts, more):\n    if more:\n        return deep(texts, more - 1)\n    raise "
        "ValueError('first\\nsecond')\n"
    )
    log = tmp_path / "logs" / "functions-of-host-0.log"
    script = f"""
from pathlib import Path
from function_calls import call
from msrl_graph.runtime.process import log
log.redirect_output({str(log)!r}, "functions of host 0")
try:
    call(Path({str(tmp_path)!r}), {source!r}, ("reward",), "prompt")
except Exception as error:
    Path({str(tmp_path / "told")!r}).write_text(str(error))
"""
    subprocess.run(
        [sys.executable, "-c", script], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    told = (tmp_path / "told").read_text().splitlines()
    assert told[0].endswith(f"ValueError: first …, at {tmp_path / 'mine.py'}:6")
    assert told[5] == "  … 45 more" and len(told) == 1 + 9 + 3
    assert told[-2:] == ["  answer: list of 2, the first is 'x'", "  all of it is in logs/functions-of-host-0.log"]
    logged = log.read_text()
    assert "second" in logged and "answer: ['x', 'x']" in logged and "test_functions.py" not in told


def test_a_long_text_is_cut(tmp_path):
    assert shorten_value("é\x1b" + "a" * 300) == "'é\\x1b" + "a" * 198 + "'… (302 characters)"
    assert shorten_value(np.zeros((2, 3), np.int32)) == "int32 of 2x3: [[0, 0, 0], [0, 0, 0]]"


def test_a_file_that_cannot_be_imported_is_named(tmp_path):
    with pytest.raises(
        RunError, match=r"mine\.py \(line 0\) cannot be imported: ModuleNotFoundError: .* at .*mine\.py:1"
    ):
        call(tmp_path, "import no_such_module\ndef f(score):\n    return 0.0\n", ("reward",))


def test_a_folder_that_another_run_took_meanwhile_is_left_to_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = Plan(Graph("g", {}, (), (), (), (), (1,)), None, Deployment("d", {}, {}, {}, {}))
    one = run_folder.choose_folder(plan, None)
    (one).mkdir(parents=True)
    assert run_folder.make_folder(plan, one, stated=False) == Path("runs/d-2") and (tmp_path / "runs" / "d-2").is_dir()


@pytest.mark.parametrize(
    ("body", "per", "times"),
    [
        ("keep: score > 2", "row", [0, 0, 1, 1]),
        ("keep: [s > 1 for s in score]", "prompt", [0, 1, 1, 1]),
        ("keep: np.array([False, True, False, True])", "batch", [0, 1, 0, 1]),
        ("select: [1, 1]", "prompt", [0, 2, 0, 2]),
        ("select: []", "prompt", [0, 0, 0, 0]),
        ("select: np.array([3, 0, 3])", "batch", [1, 0, 0, 2]),
        ("select: [0] * int(score)", "row", [1, 2, 3, 4]),
    ],
)
def test_a_filter_says_how_often_each_row_goes_on(tmp_path, body, per, times):
    key, _, value = body.partition(": ")
    made = results(tmp_path, f"import numpy as np\ndef f(score):\n    return {value}\n", (), per, key=key)
    ((name, verdicts),) = made.columns.items()
    assert isinstance(verdicts, columns.Verdicts) and name == "host.mine.times"
    assert (list(verdicts.rows), list(verdicts.reported_values)) == ([0, 1, 2, 3], times)


@pytest.mark.parametrize(
    ("body", "per", "message"),
    [
        ("keep: 1.0", "row", "it returned float 1.0, where one truth value belongs"),
        ("keep: [True]", "prompt", "it returned list of 1, where 2 truth values belong"),
        ("keep: True", "batch", "it returned bool True, where 4 truth values belong"),
        ("select: [2]", "prompt", "it returned list of 1: [2], where places from 0 to 1 belong"),
        ("select: [-1]", "prompt", "it returned list of 1: [-1], where places from 0 to 1 belong"),
        ("select: [0.5]", "prompt", "it returned list of 1: [0.5], where places from 0 to 1 belong"),
        ("select: [True, False]", "prompt", "where places from 0 to 1 belong"),
        ("select: None", "prompt", "it returned None, where places from 0 to 1 belong"),
        ("select: [1] * 1025", "prompt", "it returned place 1 1,025 times, but a row may continue at most 1,024 times"),
        ("select: 1", "prompt", "it returned int 1, where places from 0 to 1 belong"),
        ("select: score.argmax()", "prompt", "it returned int64 "),
        ("select: [[0], [0, 1]]", "prompt", "it returned list of 2, where places from 0 to 1 belong"),
        ("keep: [[0], [0, 1]]", "prompt", "it returned list of 2, where 2 truth values belong"),
    ],
)
def test_a_verdict_that_is_none_is_told(tmp_path, body, per, message):
    key, _, value = body.partition(": ")
    with pytest.raises(RunError, match=re.escape(message)):
        results(tmp_path, f"def f(score):\n    return {value}\n", (), per, key=key)


STATES = (State("coef", "f32", Expr("number", 1.0)), State("rate", "f32", Expr("number", 1.0), "prompt"))


def test_states_are_read_as_they_were_and_given_their_next_values(tmp_path):
    source = "def f(score, coef, rate):\n    return coef + sum(score), score * rate\n"
    made = results(tmp_path, source, ("reward",), "batch", states=STATES, gives=("coef", "reward"))
    assert made.states == {"coef": NextValues([0], [12.0])}
    assert list(made.columns["reward"].column.values) == [0.25, 0.5, 1.5, 2.0]
    source = "def f(score, coef, rate):\n    return rate / 2 + score.sum() * coef\n"
    assert results(tmp_path, source, (), "prompt", states=STATES, gives=("rate",)).states == {
        "rate": NextValues([0, 1], [6.125, 14.25])
    }
    assert list(
        call(tmp_path, "def f(score, rate):\n    return score * rate\n", ("reward",), states=STATES)["reward"].values
    ) == [
        0.25,
        0.5,
        1.5,
        2.0,
    ]


@pytest.mark.parametrize("value", ["None", "[1.0]", "float('nan')", "'x'"])
def test_a_next_value_that_is_no_number_is_told(tmp_path, value):
    with pytest.raises(RunError, match=r"for the state `coef`, where one finite number belongs"):
        results(tmp_path, f"def f(score, coef):\n    return {value}\n", (), "batch", states=STATES, gives=("coef",))


def test_a_state_stays_as_it_is_where_wrong_numbers_are_skipped(tmp_path):
    source = "def f(score, rate):\n    return float('nan') if score[0] == 1 else 0.5\n"
    made = results(tmp_path, source, (), "prompt", states=STATES, gives=("rate",), on_nan="skip")
    assert made.states == {"rate": NextValues([1], [0.5])}


def test_a_value_for_the_rows_above_is_one_a_group(tmp_path):
    """`difficulty : f32 per prompt`."""
    made = results(tmp_path, "def f(score):\n    return score.mean()\n", ("difficulty",), "prompt")
    piece = made.columns["difficulty"]
    assert list(piece.rows) == [0, 1] and list(piece.column.values) == [1.5, 3.5]
    made = results(tmp_path, "def f(score):\n    return [1.0, 2.0]\n", ("difficulty",), "batch")
    assert list(made.columns["difficulty"].rows) == [0, 1]
    with pytest.raises(
        RunError, match="it returned list of 4 for `difficulty`, where one value for each of 2 rows belongs"
    ):
        results(tmp_path, "def f(score):\n    return [1.0] * 4\n", ("difficulty",), "batch")


def test_json_goes_in_and_out_as_values(tmp_path):
    out = call(tmp_path, "def f(score):\n    return {'n': [int(score), None]}\n", ("notes",))
    assert [out["notes"].text(i) for i in range(2)] == ['{"n": [1, null]}', '{"n": [2, null]}']


def test_a_function_of_one_row_gives_a_value_for_the_row_above_where_that_has_one(tmp_path):
    """`per = prompt`, and one response to each: what it gets is the row's, not a list of one."""
    keys = (("pattern", Expr("string", "ab|def")),)
    matches = "matches"
    made = results(tmp_path, "", ("difficulty",), "prompt", keys, named=matches, prompts=4)
    assert list(made.columns["difficulty"].rows) == [0, 1, 2, 3] and list(made.columns["difficulty"].column.values) == [
        1,
        0,
        0,
        1,
    ]
    assert list(
        results(tmp_path, "", ("reward",), "prompt", keys, named=matches, prompts=4).columns["reward"].column.values
    ) == [
        1,
        0,
        0,
        1,
    ]
    with pytest.raises(
        RunError, match=r"failed on prompt 0 of iteration 7: .*`matches` takes one row, and the group has 2"
    ):
        results(tmp_path, "", ("difficulty",), "prompt", keys, named=matches)


def test_a_function_of_many_rows_has_the_defaults_of_the_one_of_a_row(tmp_path):
    assert len(results(tmp_path, "", ("reward",), named="math_verify").columns["reward"].rows) == 4
