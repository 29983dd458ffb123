"""Evaluations: their names, what they report, and that a run computes it as somebody would by hand."""

from __future__ import annotations

import json
import math
import warnings
from itertools import combinations
from pathlib import Path

import generations
import numpy as np
import pytest
from folders import ROOT
from language import context, diagnose, lowered
from place import ONE_RANK, SMALL, Place, metrics
from pyarrow import compute, parquet
from votes import voted

from msrl_graph import Cluster, Deploy, Imported, compile, to_rlg
from msrl_graph.compiler.loading import load
from msrl_graph.diagnostics import Fault
from msrl_graph.ir.plan import Plan
from msrl_graph.runtime.data import row_files
from msrl_graph.runtime.data.columns import ColumnData, ColumnRows, ragged, texts
from msrl_graph.runtime.data.numerics import NumericsWatch
from msrl_graph.runtime.functions.user_traceback import BadResult
from msrl_graph.runtime.functions.values import ReturnChecker
from msrl_graph.runtime.metrics.display import format_evaluation
from msrl_graph.runtime.metrics.evaluation_figures import evaluation_figures
from msrl_graph.runtime.process.task import Task
from msrl_graph.runtime.process.task_report import Report, RunError

PROGRAM = ROOT / "examples" / "arithmetic" / "grpo.rlg"
TEXT = PROGRAM.read_text()
STATED = next(line for line in TEXT.splitlines() if line.startswith("  evaluate held_out"))
GREEDY = "evaluate held_out { every = 2, report = reward, samples = 1, temperature = 0 }"
VOTED = (
    "evaluate sampled { data = held_out, report = reward, samples = 4, temperature = 1, at = [1, 2, 4], vote = given }"
)
SAMPLED = "evaluate sampled { data = held_out, report = reward, samples = 4, temperature = 1 }"


def program(*evaluations: str, given: bool = False) -> str:
    """The example with these evaluations in the place of its own; `given` is a column of answers."""
    text = TEXT.replace(STATED, "\n".join(f"  {e}" for e in evaluations))
    if given:
        text = text.replace("  columns {", "  columns {\n    given : text", 1)
        text = text.replace(
            "  source -> actor.generate",
            '  node host.given(response) -> given { call = "given.py:given" }\n'
            "  source -> actor.generate -> host.given",
            1,
        )
    return text


PARTED = (
    ("  columns {", "  columns {\n    kind : text\n    even : f32"),
    ("source(prompts) -> prompt, answer", "source(prompts) -> prompt, answer, kind"),
    ('{ prompt = "prompt", answer = "answer" }', '{ prompt = "prompt", answer = "answer", kind = "kind" }'),
    ("  source -> actor.generate ->", "  source -> actor.generate -> host.even\n  source -> actor.generate ->"),
    (
        "  node host.given",
        '  node host.even(response, answer) -> even { call = "given.py:even" }\n  node host.given',
    ),
)


def parted(text: str) -> str:
    """A program with answers whose rows are of two kinds, and a reward that is of even answers only."""
    for old, new in PARTED:
        assert old in text, old
        text = text.replace(old, new)
    return text


def planned(*evaluations: str) -> Plan:
    return compile(PROGRAM, text=program(*evaluations))


def test_two_evaluations_are_on_the_same_data_by_names_of_their_own() -> None:
    plan = planned(GREEDY, SAMPLED)
    greedy, sampled = plan.deploy.evaluations
    assert (greedy.task, greedy.data, greedy.temperature) == ("held_out", "held_out", 0)
    assert (sampled.task, sampled.data, sampled.samples) == ("sampled", "held_out", 4)
    assert sampled.title("reward") == "reward on sampled"
    streams = {s.task: s.instructions for s in plan.schedule if s.pool == "functions"}
    assert streams["held_out"] == streams["sampled"]
    assert plan.deploy.evaluation("sampled") is sampled and plan.deploy.evaluation("train") is None


def test_a_name_that_is_there_gets_a_help_that_holds() -> None:
    text = program(GREEDY, SAMPLED.replace("sampled {", "held_out {"))
    (found,) = diagnose(text, context(PROGRAM.parent))
    assert (found.code, found.message) == ("duplicate-name", "`evaluate held_out` is stated twice")
    named = "evaluate held_out_2 { data = held_out, "
    assert f"`{named}… }}`" in found.help
    lines = text.splitlines()
    assert lines[found.span.line - 1].startswith("  evaluate held_out { data = held_out, ")
    lines[found.span.line - 1] = lines[found.span.line - 1].replace("  evaluate held_out { data = held_out, ", named)
    assert not diagnose("\n".join(lines), context(PROGRAM.parent))


def test_a_name_without_data_gets_a_help_that_holds() -> None:
    text = program("evaluate sampled { report = reward }")
    (found,) = diagnose(text, context(PROGRAM.parent))
    assert (found.code, found.message) == ("unknown-name", "no data named `sampled`")
    assert "; for a separate name write `evaluate sampled { data = held_out, … }`" in found.help
    assert not diagnose(program("evaluate sampled { data = held_out, report = reward }"), context(PROGRAM.parent))


def test_a_plan_file_holds_them_and_none_of_one_name_twice() -> None:
    plan = json.loads(planned(GREEDY, SAMPLED).to_json())
    again = load(json.dumps(plan).encode(), "it", run=True)
    assert [(e.task, e.data) for e in again.deploy.evaluations] == [("held_out", "held_out"), ("sampled", "held_out")]
    plan["deploy"]["evaluations"][1]["name"] = ""
    with pytest.raises(Fault, match="it has the evaluation `held_out` more than once"):
        load(json.dumps(plan).encode(), "it", run=True)


def test_a_deploy_that_extends_another_changes_and_drops_them_by_name() -> None:
    (base, _), more = program(GREEDY, SAMPLED).rsplit("}", 1), "deploy other extends arithmetic {{ {} }}"
    base = f"{base}}}\n"
    changed = lowered(base + more.format("evaluate sampled { samples = 8 }"), context(PROGRAM.parent, "other")).deploy
    dropped = lowered(base + more.format("drop evaluate sampled"), context(PROGRAM.parent, "other")).deploy
    assert changed is not None and dropped is not None
    assert [(e.task, e.data, e.samples) for e in changed.evaluations] == [
        ("held_out", "held_out", 1),
        ("sampled", "held_out", 8),
    ]
    assert [e.task for e in dropped.evaluations] == ["held_out"]


def test_python_says_the_same() -> None:
    deploy = Deploy(Imported("grpo"), on=Cluster("pod", device="cpu"))
    deploy.evaluate("sampled", data="test", report=["reward"], samples=4)
    assert "evaluate sampled { data = test, report = [reward], samples = 4 }" in to_rlg(deploy)


GIVEN = """
def given(response: str) -> str:
    \"\"\"The answer; none where it is no number.\"\"\"
    return response if response.isdecimal() else ""


def even(response: str, answer: str) -> float | None:
    return float(response == answer) if int(answer) % 2 == 0 else None
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with all that the example needs, and what `parted` needs beside it."""
    (tmp_path / "model").symlink_to(PROGRAM.parent / "model")
    furnish(tmp_path)
    return tmp_path


def furnish(folder: Path) -> None:
    """Writes the functions, and the example's data with the kind of each row."""
    (folder / "given.py").write_text(GIVEN)
    for item in ("train.jsonl", "test.jsonl"):
        rows = [json.loads(line) for line in (PROGRAM.parent / item).read_text().splitlines()]
        (folder / item).unlink(missing_ok=True)
        lines = (json.dumps(row | {"kind": "long" if len(row["answer"]) > 2 else "short"}) for row in rows)
        (folder / item).write_text("\n".join(lines) + "\n")


def test_a_column_of_answers_is_computed_in_the_evaluation_alone(folder: Path) -> None:
    """And nobody says of it that it is not read."""
    text = program(GREEDY, VOTED, given=True)
    (folder / "p.rlg").write_text(text)
    with warnings.catch_warnings(record=True) as told_too:
        warnings.simplefilter("always")
        plan = compile(folder / "p.rlg")
    assert not told_too
    run = {s.task: [i.node for i in s.instructions] for s in plan.schedule if s.pool == "functions"}
    assert "host.given" in run["sampled"] and "host.given" not in run["held_out"]
    assert load(plan.to_json().encode(), "it", run=True).deploy.evaluations == plan.deploy.evaluations


WRONG = {
    "at = [1, 8], samples = 4": ("`at` has 8, and a prompt has 4 of `reward`", "`samples = 8`"),
    "at = [16]": ("`at` has 16, and a prompt has 8 of `reward`", "`samples = 16`"),
    "at = [2], vote = giben": ("no node writes a column `giben`", "did you mean `given`?"),
    "at = [2], vote = response": ("`response` is neither text nor a number", "a column of `text`"),
    "at = [2], vote = answer": ("`answer` does not have the same rows as `reward`", "each response has a value of"),
    "by = reward": ("the source writes no column `reward`", "known here: `answer`, `prompt`"),
    "by = prompt": ("`prompt` is neither text nor a number", "a column of `text` that the source writes"),
    "vote = given": ("`vote` needs `at`", "add `at = [8]`"),
}


@pytest.mark.parametrize("stated", WRONG)
def test_what_a_prompt_has_too_few_of_or_no_answer_is_refused(stated: str, folder: Path) -> None:
    text = program(f"evaluate held_out {{ report = reward, {stated} }}", given=True)
    found = [d for d in diagnose(text, context(folder)) if d.severity == "error"]
    ((message, help),) = [(d.message, d.help) for d in found]
    begin, part = WRONG[stated]
    assert message.startswith(begin) and part in help


def test_the_figures_are_those_of_each_prompts_attempts(folder: Path) -> None:
    """The second prompt has a value less, as where a row failed; nobody computes of it what needs four."""
    (folder / "p.rlg").write_text(program(GREEDY, VOTED, given=True))
    plan = compile(folder / "p.rlg")
    evaluation = plan.deploy.evaluation("sampled")
    assert evaluation is not None
    rewards = np.array([1, 0, 0, 1, 0, 0, 1, np.nan], np.float32)
    answers = ["7", "8", "8", "7", "", "", "3", "3"]
    order = np.array([5, 0, 7, 2, 1, 6, 4, 3])  # however they came
    pieces = {
        "reward": ColumnRows(order, ColumnData(rewards[order])),
        "given": ColumnRows(order, texts([answers[i] for i in order])),
    }
    found = evaluation_figures(plan, evaluation, Task("sampled", 0, 2, {"actor.generate": 4}), pieces)
    assert found == pytest.approx(
        {
            "reward/pass@1": (2 / 4 + 1 / 3) / 2,
            "reward/pass@2": (5 / 6 + 2 / 3) / 2,  # of six pairs one has no pass, of three one
            "reward/pass@4": 1.0,
            "reward/best@1": (2 / 4 + 1 / 3) / 2,
            "reward/best@2": (5 / 6 + 2 / 3) / 2,
            "reward/best@4": 1.0,
            "reward/maj@1": (2 / 4 + 1 / 3) / 2,
            "reward/maj@2": (1 / 2 + 2 / 3) / 2,  # 7 and 8 tie; where one says 3 and one nothing, 3 it is
            "reward/maj@4": 0.5,
            "reward/fewer@4": 1,
        }
    )


def test_rows_are_parted_by_a_column_of_the_source(folder: Path) -> None:
    stated = VOTED.replace("report = reward", "report = [reward, even], by = kind")
    (folder / "p.rlg").write_text(parted(program(stated, given=True)))
    plan = compile(folder / "p.rlg")
    (evaluation,) = plan.deploy.evaluations
    rewards = np.float32([1, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1])
    even = np.float32([np.nan] * 4 + [1, 0, 1, 1] + [0] * 4)
    rows = np.arange(12)
    kinds = ["long", "short", "long"]
    pieces = {
        "reward": ColumnRows(rows, ColumnData(rewards)),
        "even": ColumnRows(rows, ColumnData(even)),
        "given": ColumnRows(rows, texts(["1"] * 12)),
        "kind": ColumnRows(np.arange(3), texts(kinds)),
    }
    found = evaluation_figures(plan, evaluation, Task("sampled", 0, 3, {"actor.generate": 4}), pieces)
    assert (found["rows/kind=long"], found["rows/kind=short"]) == (2, 1)
    assert (found["reward/kind=long"], found["reward/kind=short"]) == (2 / 8, 1.0)
    assert (found["reward/pass@4/kind=long"], found["reward/maj@4/kind=long"]) == (1.0, pytest.approx(1 / 4))
    assert (found["even/kind=long"], found["even/kind=short"]) == (0.0, 3 / 4)
    assert found["even/pass@2"] == pytest.approx(1 / 2)  # of the two prompts that it applies to
    assert "reward" not in found  # which is counted where it is computed
    many = ColumnRows(np.arange(101), texts(map(str, range(101))))
    with pytest.raises(
        RunError, match=r"`kind` \(.*\) has 101 values in the data `held_out`: `by` takes a column with"
    ):
        evaluation_figures(plan, evaluation, Task("sampled", 0, 101, {"actor.generate": 4}), {"kind": many})


def test_the_line_of_an_evaluation_holds_what_is_of_all_rows() -> None:
    (evaluation,) = planned(VOTED.replace(", vote = given", "")).deploy.evaluations
    found = {"reward": 0.25, "reward/pass@1": 0.25, "reward/pass@2": 0.5, "reward/best@1": math.nan}
    parts = {"rows/kind=long": 4, "reward/kind=long": 0.5, "reward/pass@1/kind=long": math.nan, "reward/fewer@2": 1}
    shown = "sampled: reward 0.250  reward/pass@1 0.250  reward/pass@2 0.500"
    assert format_evaluation(evaluation, found | parts) == f"{shown}  and 5 more in metrics.jsonl"
    del found["reward/best@1"]
    assert format_evaluation(evaluation, found) == shown
    nothing = {"reward": math.nan, "reward/kind=long": math.nan}
    assert format_evaluation(evaluation, nothing) == "sampled: no figure of all rows; 2 figures in metrics.jsonl"


def test_a_function_returns_none_where_its_figure_does_not_apply_and_nobody_reads_it(folder: Path) -> None:
    (folder / "p.rlg").write_text(parted(program(GREEDY, given=True)))
    plan = compile(folder / "p.rlg")
    assert plan.graph.optional == {"even"}
    returned = ReturnChecker(plan, ("even", "reward"))
    assert np.isnan(returned.check("even", None, {}))
    with pytest.raises(BadResult, match=r"it returned None for `reward`, .* only a column that no node reads may lack"):
        returned.check("reward", None, {})
    with pytest.raises(BadResult, match="it returned nan for `even`"):
        returned.check("even", float("nan"), {})
    report = Report("host")
    watch = NumericsWatch(plan)
    node = plan.graph.node("host.even")
    watch.check_results(node, Task("train", 0, 2), report, "even", np.arange(2), ColumnData(np.float32([np.nan, 1])))
    assert report.sums == {"without/even": (1, 0)} and not report.remarks


def test_where_a_function_returned_none_the_recorded_rows_hold_null(folder: Path) -> None:
    (folder / "p.rlg").write_text(parted(program(GREEDY, given=True)))
    plan = compile(folder / "p.rlg")
    numbers = np.arange(4)
    pieces = {
        "prompt": ColumnRows(np.arange(1), ragged([np.arange(3, 6)], np.int32)),
        "response": ColumnRows(numbers, ragged([np.arange(3, 5)] * 4, np.int32)),
        "response.logp": ColumnRows(numbers, ragged([np.zeros(2)] * 4, np.float32)),
        "reward": ColumnRows(
            numbers, ColumnData(np.float32([0, 1, np.nan, 0]))
        ),  # wrong, as `on_nan = skip` lets it be
        "even": ColumnRows(numbers, ColumnData(np.float32([np.nan, 1, 0.5, np.nan]))),
    }
    for task, place in ((Task("train", 0, 1), "rows"), (Task("held_out", 0, 1), "evaluation_rows/held_out")):
        row_files.write(folder, plan, pieces, task)
        table = parquet.read_table(folder / place / "000000.parquet")
        assert table["even"].to_pylist() == [None, 1, 0.5, None]
        assert table["even"].null_count == 2 and compute.mean(table["even"]).as_py() == 0.75
        assert table["reward"].null_count == 0
    recorded = row_files.Recording(plan, folder)
    columns = ("response", "response.logp")
    (tokens, _) = recorded.responses(plan.graph.node("actor.generate"), columns, 0, [np.arange(3, 6)], numbers, 4)
    assert [t.tolist() for t in tokens] == [[3, 4]] * 4  # rows without a value are replayed too


def several(folder: Path, stated: str, data: str = "train.jsonl") -> Path:
    """The program of three generations, with an evaluation of `right`."""
    for item in ("train.jsonl", "test.jsonl", "model"):
        if not (folder / item).exists():
            (folder / item).symlink_to(PROGRAM.parent / item)
    path = generations.program(folder)
    evaluation = f"""data test = "{data}" {{ prompt = "prompt", answer = "answer" }}
  evaluate test {{ {stated} }}
  run {{"""
    path.write_text(path.read_text().replace("run {", evaluation))
    return path


def test_a_column_on_the_way_that_nobody_writes_is_told_as_such() -> None:
    text = program(GREEDY).replace("host.reward(response, answer)", "host.reward(response, other)")
    text = text.replace("exact_match()", "exact_match(answer = other)", 1)
    text = text.replace("  columns {", "  columns {\n    other : text", 1)
    found = [d for d in diagnose(text, context(PROGRAM.parent)) if d.severity == "error"]
    assert [(d.code, d.message) for d in found] == [
        ("never-written", "`host.reward` reads `other`, which is never written")
    ]


DRAWN = {
    "": (("8", "0.5"), ("4", "1")),  # one that reads the text of another draws as in training
    ", draws = [draw(solve, samples = 2, temperature = 0)]": (("8", "0.5"), ("2", "0")),
    ", draws = [draw(solve, temperature = 0.1), draw(propose, samples = 1)]": (("1", "0.5"), ("4", "0.1")),
}


@pytest.mark.parametrize("draws", DRAWN)
def test_the_plan_says_how_each_generation_of_an_evaluation_draws(draws: str, tmp_path: Path) -> None:
    plan = compile(several(tmp_path, f"report = right, samples = 8, temperature = 0.5, every = 5{draws}"))
    text = plan.explain()
    part = text[text.index("Evaluations  ") :].split("\n\n")[0].split("──\n")[1].splitlines()
    propose, solve = DRAWN[draws]
    assert [line.split() for line in part] == [
        ["test", "test", "every", "5", "iterations,", "before", "and", "after", "propose", *propose],
        ["training"],
        ["solve", *solve],
    ]
    assert load(plan.to_json().encode(), "it", run=True).deploy.evaluations == plan.deploy.evaluations


WRONG_DRAWS = {
    "draw(solv, samples = 1)": ("no generation is called `solv`", "did you mean `solve`?"),
    "draw(try_once, samples = 2)": (
        "`try_once` does not run in `evaluate test`: `right` can be computed without it",
        "leave it",
    ),
    "draw(solve, samples = 1), draw(solve, temperature = 0)": ("`draws` has `solve` twice", "in one `draw`"),
    "draw(solve)": ("this `draw` has no settings", "add `samples = 1`"),
    "draw(samples = 1)": ("the first argument of `draw` is a generation", "as in `draw("),
    "draw(solve, top_p = 1)": ("`draw` has no argument `top_p`", ""),
    "draw(solve, 1)": ("`draw` takes its settings as keyword arguments", ""),
    "draw(solve, samples = 0)": ("`samples` takes a whole number of 1 or more, not `0`", ""),
    "solve": ("`draws` takes a list of `draw(GENERATION", ""),
}


@pytest.mark.parametrize("draws", WRONG_DRAWS)
def test_settings_of_what_does_not_run_are_refused(draws: str, tmp_path: Path) -> None:
    text = several(tmp_path, f"report = right, draws = [{draws}]").read_text()
    (found,) = (d for d in diagnose(text, context(tmp_path)) if d.severity == "error")
    message, help = WRONG_DRAWS[draws]
    assert message in found.message and help in found.help
    assert text.splitlines()[found.span.line - 1].lstrip().startswith("evaluate test")


def test_what_a_prompt_has_follows_from_all_of_its_generations(tmp_path: Path) -> None:
    stated = "report = right, samples = 3, draws = [draw(solve, samples = 2)], at = [{}]"
    assert compile(several(tmp_path, stated.format(6)))
    (found,) = diagnose(several(tmp_path, stated.format(7)).read_text(), context(tmp_path))
    assert found.message == "`at` has 7, and a prompt has 6 of `right`"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_generation_draws_by_its_own_settings(place: Place, ranks: int) -> None:
    """Three problems of each prompt, of each two solutions, which are the likeliest tokens and so the same."""
    rows = (PROGRAM.parent / "test.jsonl").read_text().splitlines()[:7]
    (place.folder / "few.jsonl").write_text("\n".join(rows) + "\n")
    stated = "report = right, samples = 3, draws = [draw(solve, samples = 2, temperature = 0)], at = [6]"
    path = several(place.folder, stated, "few.jsonl")
    path.write_text(path.read_text().replace("devices_per_node = 1", f"devices_per_node = {ranks}"))
    code, _, err = place.run("p.rlg", "--evaluate", "--out", "out", "--record")
    assert code == 0, err
    place.assert_clean()
    (line,) = metrics(place.folder / "out")
    folder = place.folder / "out" / "evaluation_rows" / "test"
    problems = parquet.read_table(folder / "problem" / "000000.parquet").to_pydict()
    solutions = parquet.read_table(folder / "solution" / "000000.parquet").to_pydict()
    assert [*map(len, (problems["problem"], solutions["solution"]))] == [7 * 3, 7 * 3 * 2]
    drawn = [tuple(tokens) for tokens in problems["problem"]]
    assert any(len({*drawn[first : first + 3]}) > 1 for first in range(0, 21, 3))
    assert solutions["solution"][::2] == solutions["solution"][1::2]
    assert line["right"] == pytest.approx(np.mean(solutions["right"]))
    best = np.array(solutions["right"]).reshape(7, 6).max(axis=1)
    assert line["right/pass@6"] == pytest.approx(best.mean())


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_reports_what_its_recorded_rows_say(place: Place, ranks: int) -> None:
    """Greedy and sampled in one program, on one rank and two; what is reported is computed anew from the rows."""
    stated = "report = [reward, even], every = 1, passing = 0.5, by = kind"
    evaluations = (GREEDY, VOTED.replace("report = reward", stated))
    text = parted(program(*evaluations, given=True)).replace("mini_batch = 256", "mini_batch = prompts * group")
    for old, new in ONE_RANK if ranks == 1 else ():
        text = text.replace(old, new)
    (place.folder / "p.rlg").write_text(text)
    furnish(place.folder)
    code, _, err = place.run("p.rlg", *SMALL, "--iterations", "2", "--out", "out", "--record")
    assert code == 0, err
    place.assert_clean()
    lines = [x for x in metrics(place.folder / "out") if "evaluation" in x]
    assert [(x["evaluation"], x["after_iterations"]) for x in lines] == [
        *(("held_out", 0), ("sampled", 0), ("sampled", 1), ("held_out", 2), ("sampled", 2)),
    ]
    assert not any("@" in key for x in lines for key in x if x["evaluation"] == "held_out")
    for line in (x for x in lines if x["evaluation"] == "sampled"):
        folder = place.folder / "out" / "evaluation_rows" / "sampled"
        table = parquet.read_table(folder / f"{line['after_iterations']:06d}.parquet").to_pydict()
        rewards = np.array(table["reward"]).reshape(-1, 4)
        assert line["reward/pass@1"] == pytest.approx(rewards.mean()) == pytest.approx(line["reward"])
        assert line["reward/pass@4"] == pytest.approx((rewards > 0.5).any(axis=1).mean())
        assert line["reward/best@4"] == pytest.approx(rewards.max(axis=1).mean())
        pairs = [rewards[:, list(pair)].max(axis=1).mean() for pair in combinations(range(4), 2)]
        assert line["reward/pass@2"] == pytest.approx(np.mean(pairs))
        attempts = [(reward, answer.encode()) for reward, answer in zip(table["reward"], table["given"], strict=True)]
        votes = [voted(attempts[first : first + 4]) for first in range(0, len(attempts), 4)]
        assert line["reward/maj@4"] == pytest.approx(np.mean(votes))
        kinds = np.array(table["kind"])
        even = np.array([int(answer) % 2 == 0 for answer in table["answer"]])
        assert {*kinds} == {"long", "short"}
        for kind in ("long", "short"):
            assert line[f"reward/kind={kind}"] == pytest.approx(np.array(table["reward"])[kinds == kind].mean())
            assert line[f"rows/kind={kind}"] == (kinds == kind).sum() / 4
        assert line["without/even"] == (~even).sum() > 0
        assert line["even"] == pytest.approx(np.array(table["reward"])[even].mean())
    trained = [x for x in metrics(place.folder / "out") if "iteration" in x]
    assert all("even" in x and x["without/even"] > 0 and "wrong/result" not in x for x in trained)
