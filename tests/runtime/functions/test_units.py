"""What functions get by the names of their parameters: the tokenizer, the iteration's number; and what a source draws
rows by."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from function_calls import call, results
from stage import EXAMPLE
from weighers import weigher

from msrl_graph import Fault, compile
from msrl_graph.ir.signatures import read_signatures
from msrl_graph.runtime.functions.draw_weights import remark_scarce_weights
from msrl_graph.runtime.functions.values import InjectedArguments
from msrl_graph.runtime.process.task import Task
from msrl_graph.runtime.process.task_report import RunError


def test_rows_are_drawn_by_columns_of_the_data(tmp_path: Path) -> None:
    """Of the rows that can be used: numbers as an array, tokens and texts as a list, decoded where they are to be
    text."""
    source = """
def hard(difficulty, answer, prompt: str, *, iteration):
    assert list(answer) == ["85", "4", "10"] and list(prompt) == ["37+48=", "2+2=", "5+5="]
    return difficulty + iteration
def ids(prompt, difficulty): return [len(p) * d for p, d in zip(prompt, difficulty)]
"""
    drawn = weigher(tmp_path, '"mine.py:hard"', source)
    assert list(drawn({}, Task("train", 4, 2))) == [7, 5, 6]
    assert list(weigher(tmp_path, '"mine.py:ids"', source)({}, Task("train", 0, 2))) == [18, 4, 8]


def test_columns_and_states_draw_together(tmp_path: Path) -> None:
    state = "state success : f32 per prompt = 0.5"
    source = "def both(difficulty, success): return difficulty * success\n"
    found = weigher(tmp_path, '"mine.py:both"', source, state)
    assert list(found({"success": np.array([0.5, 1, 0])}, Task("train", 0, 2))) == [1.5, 1, 0]
    # A function of the package has the column that is named for its parameter.
    assert (
        list(weigher(tmp_path, "around(difficulty, target = 0.5, floor = 0.1)")({}, Task("train", 0, 2))) == [0.1] * 3
    )


def test_wrong_weights_are_told_with_what_they_were_made_of(tmp_path: Path) -> None:
    with pytest.raises(
        RunError,
        match=(
            r"`weights` of the source \(line 6 of .*p.rlg\) returned list of 1 instead of a number of at least 0 "
            r"for each of the 3 rows"
        ),
    ):
        weigher(tmp_path, '"mine.py:f"', "def f(difficulty): return [1.0]\n")({}, Task("train", 0, 2))
    with pytest.raises(RunError, match=r"ZeroDivisionError(.|\n)*\n  difficulty: float32 of 3"):
        weigher(tmp_path, '"mine.py:f"', "def f(difficulty): return 1 / 0\n")({}, Task("train", 0, 2))
    with pytest.raises(Fault, match="`f` needs `hardness`, and the source has no column or state of this name"):
        weigher(tmp_path, '"mine.py:f"', "def f(hardness): return hardness\n")


@pytest.mark.parametrize(("value", "shown"), [("-1", "-1"), ("np.nan", "nan"), ("np.inf", "inf")])
def test_a_weight_that_is_none_is_told_with_its_row(tmp_path: Path, value: str, shown: str) -> None:
    """By its line of the file: line 2 is too long to be used."""
    told = rf"returned {shown} for line 3 of .*rows.jsonl, where a finite number of 0 or more belongs"
    with pytest.raises(RunError, match=told):
        weigher(tmp_path, '"mine.py:f"', f"import numpy as np\ndef f(difficulty): return [1.0, {value}, 1.0]\n")(
            {}, Task("train", 0, 2)
        )
    with pytest.raises(RunError, match=rf"returned {shown} for line 1 of .*rows.jsonl \(and for 1 more of 3 rows\), "):
        weigher(tmp_path, '"mine.py:f"', f"import numpy as np\ndef f(difficulty): return [{value}, 0, {value}]\n")(
            {}, Task("train", 0, 2)
        )


def test_rows_of_weight_0_are_told_where_they_are_taken_and_end_the_run_where_there_are_no_others(
    tmp_path: Path,
) -> None:
    """Once an iteration: in its first round that takes some, not where a pass over all rows begins anew."""
    with pytest.raises(RunError, match="returned 0 for each of 3 rows of the data in iteration 4: no row can be drawn"):
        weigher(tmp_path, '"mine.py:f"', "def f(difficulty): return difficulty * 0\n")({}, Task("train", 4, 2))
    weigh = weigher(tmp_path, '"mine.py:f"', "def f(difficulty, *, iteration): return [0, 1, iteration]\n")
    told = [
        [len(remark_scarce_weights(weigh.source, task, weigh({}, task), first)) for first in (0, 2, 4)]
        for task in (Task("train", 0, 2), Task("train", 1, 2))
    ]
    assert told == [[1, 0, 0], [0, 1, 0]]
    task = Task("train", 0, 2)
    (remark,) = remark_scarce_weights(weigh.source, task, weigh({}, task), 0)
    assert remark.endswith(
        ": only 1 of 3 rows of the data have a weight above 0, so iteration 0 also draws rows of weight 0"
    )
    assert not remark_scarce_weights(weigh.source, task, np.ones(3), 2)


def test_a_function_is_told_the_iteration(tmp_path: Path) -> None:
    for parameters in ("score, iteration", "score, *, iteration"):
        assert list(
            call(tmp_path, f"def f({parameters}): return score + 10 * iteration\n", ("reward",))["reward"].values
        ) == [
            71,
            72,
            73,
            74,
        ]
    made = results(tmp_path, "def f(*rest, iteration): return iteration\n", ("level",))
    assert list(made.columns["level"].column.values) == [7] * 4


def test_the_tokenizer_is_that_of_the_tokens_which_the_node_reads() -> None:
    plan = compile(EXAMPLE / "grpo.rlg")
    signature = read_signatures("def f(response, tokenizer, iteration): ...")["f"]
    assert (signature.columns, signature.fills) == (("response",), ("tokenizer", "iteration"))
    given = InjectedArguments(signature, plan.graph.node("host.reward"), plan)("train", 3, 0)
    assert given["iteration"] == 3 and given.keys() == {"tokenizer", "iteration"}
    tokenizer = given["tokenizer"]
    assert (
        tokenizer.decode([*tokenizer.encode("37+48=", add_special_tokens=False), 1], skip_special_tokens=True)
        == "37+48="
    )
