"""What a notebook asks of a run: iterations as they end, tables of metrics and rows, a reason when it is interrupted,
and text that stays text."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from folders import ROOT

from msrl_graph import Fault
from msrl_graph.runtime.driver.callbacks import MetricsFollower
from msrl_graph.runtime.driver.outcome import Outcome
from msrl_graph.runtime.metrics.metrics_file import METRICS

EXAMPLE = ROOT / "examples" / "arithmetic"
# A kernel of Jupyter as rich recognises it, with the variable that it sets.
KERNEL = """
import builtins, os
class ZMQInteractiveShell: ...
builtins.get_ipython = ZMQInteractiveShell
os.environ["FORCE_COLOR"] = "1"
"""
SCRIPT = """
from msrl_graph import Cluster, Deploy, compile, run
deploy = Deploy("grpo", on=Cluster("laptop", device="cpu"))
deploy.set(prompts=8, group=4, prompt_len=6, response_len=5)
deploy.model("policy", "./model").data("source", "train.jsonl", prompt="prompt", answer="answer")
plan = compile(deploy)
"""


def python(place: Path, code: str) -> subprocess.Popen[str]:
    """Start a script beside the example's model and data."""
    for item in ("train.jsonl", "model"):
        (place / item).symlink_to(EXAMPLE / item)
    (place / "script.py").write_text(SCRIPT + textwrap.dedent(code))
    command = [sys.executable, "-W", "ignore", "script.py"]
    return subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def write(path: Path, *lines: dict[str, object], more: str = "") -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + more)


def iteration(number: int, **more: object) -> dict[str, object]:
    return {"iteration": number, "seconds": 1.5, "padding": "x" * number, **more}


# Iterations as they end


def test_each_iteration_is_told_once_though_a_run_is_restarted(tmp_path: Path) -> None:
    metrics = tmp_path / METRICS
    told = []
    follower = MetricsFollower(metrics, told.append, 0)
    follower.begin_attempt(0)
    follower.look()
    write(metrics, {"evaluation": "test"}, iteration(0), iteration(1, kl=None), more='{"iteration": 2, ')
    follower.look()
    follower.look()
    write(metrics, {"evaluation": "test"}, iteration(0), iteration(1, kl=None), iteration(2))
    follower.look()
    assert [line["iteration"] for line in told] == [0, 1, 2]
    assert math.isnan(told[1]["kl"])
    # The next attempt goes on after iteration 0: what stands behind it is old until it is removed.
    follower.begin_attempt(2)
    follower.look()
    write(metrics, {"evaluation": "test"}, iteration(0))
    follower.look()
    write(metrics, {"evaluation": "test"}, *map(iteration, range(5)))
    follower.look()
    assert [line["iteration"] for line in told] == [0, 1, 2, 3, 4]


def test_lines_that_a_resumed_run_replaces_are_not_told(tmp_path: Path) -> None:
    metrics = tmp_path / METRICS
    told = []
    write(metrics, *map(iteration, range(6)))
    follower = MetricsFollower(metrics, told.append, 2)
    follower.begin_attempt(2)
    follower.look()
    assert told == []
    write(metrics, iteration(0), iteration(1))
    follower.look()
    write(metrics, iteration(0), iteration(1), iteration(2, new=1))
    follower.look()
    assert [line.get("new") for line in told] == [1]


def test_a_function_that_raised_is_not_called_again(tmp_path: Path) -> None:
    calls = []

    def fail(line: dict[str, object]) -> None:
        calls.append(line["iteration"])
        raise ValueError("no more")

    write(tmp_path / METRICS, iteration(0), iteration(1))
    follower = MetricsFollower(tmp_path / METRICS, fail, 0)
    follower.look()
    follower.look()
    assert calls == [0] and isinstance(follower.error, ValueError)
    assert follower.error.__notes__ == ["raised by `on_iteration` after iteration 0"]
    assert follower.has_iteration(1) and not follower.has_iteration(2)


# Tables


@pytest.mark.parametrize("url", [False, True])
def test_metrics_are_a_table_of_all_figures(tmp_path: Path, url: bool) -> None:
    write(
        tmp_path / METRICS,
        {"evaluation": "test", "after_iterations": 0, "reward": 0.25},
        iteration(0, kl=None, phases={"reshard": 0.5}, none=None),
        iteration(1, kl=1, loss=0.5, changed=["seed"]),
        more='{"iteration": 2',
    )
    outcome = Outcome(f"file://{tmp_path}" if url else tmp_path, {})
    table = outcome.metrics
    assert table.column_names == ["iteration", "seconds", "padding", "kl", "phases/reshard", "none", "loss", "changed"]
    assert table.column("iteration").to_pylist() == [0, 1] and table.column("kl").to_pylist() == [None, 1]
    assert table.column("phases/reshard").to_pylist() == [0.5, None]
    assert table.column("loss").to_pylist() == [None, 0.5] and str(table.schema.field("none").type) == "double"
    assert outcome.evaluations.to_pylist() == [{"evaluation": "test", "after_iterations": 0, "reward": 0.25}]


def test_what_was_not_recorded_is_said(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    outcome = Outcome(tmp_path, {})
    with pytest.raises(Fault, match="there are no metrics in"):
        _ = outcome.metrics
    with pytest.raises(Fault, match="recorded no rows") as caught:
        outcome.rows(0)
    assert "= help: run it with `record=True`" in str(caught.value)
    (tmp_path / "rows" / "hint").mkdir(parents=True)
    (tmp_path / "rows" / "response").mkdir()
    parquet.write_table(pa.table({"row": [1, 2]}), tmp_path / "rows" / "response" / "000003.parquet")
    (tmp_path / "rows" / "response" / "000004.partial").write_text("")
    with pytest.raises(Fault, match="several generations: `hint`, `response`") as caught:
        outcome.rows(3)
    # The help can be typed as it is.
    (said,) = re.findall(r"help: name one: (.*)", str(caught.value))
    assert eval(f"outcome.{said}", {"outcome": outcome}).column("row").to_pylist() == [1, 2]
    with pytest.raises(Fault, match="`prompt` is not a generation of this run: `hint`, `response`"):
        outcome.rows(3, "prompt")
    with pytest.raises(Fault, match="has no iteration 4: it has 3 to 3"):
        outcome.rows(4, "response")
    with pytest.raises(Fault, match="has no iteration 0: it has none"):
        outcome.rows(0, "hint")
    for wrong, said in ((-1, "not -1"), ("0", "not a str"), (True, "not True")):
        with pytest.raises(Fault, match=f"`iteration` is a whole number from 0, {said}"):
            outcome.rows(wrong)  # type: ignore[arg-type]


# Text


def test_a_plan_is_text_in_a_notebook() -> None:
    code = f"{KERNEL}\nfrom msrl_graph import compile\nplan = compile({str(EXAMPLE / 'grpo.rlg')!r})\nprint(plan)"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Plan of grpo on laptop") and "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_progress_is_lines_where_there_is_no_terminal() -> None:
    code = f"""{KERNEL}
import sys
from msrl_graph.runtime.metrics.display import Screen
screen = Screen(file=sys.stderr)
screen.print("a line")
print(screen.is_terminal, screen.is_jupyter)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("False False\n", "a line\n")


# Runs


@pytest.mark.slow
def test_the_run_of_the_page_on_python_shows_its_tables(tmp_path: Path) -> None:
    text = (EXAMPLE.parent.parent / "docs" / "guides" / "python.md").read_text(encoding="utf-8")
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "on_iteration" in block)
    process = python(tmp_path, code.replace("200", "2").replace("199", "1"))
    shown, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert re.match(r"0 0\.\d+\n1 0\.\d+\npyarrow.Table\niteration: int64\nreward: double\n", shown), shown
    assert "response_text: string\nreward: float" in shown


@pytest.mark.slow
def test_a_run_tells_of_its_iterations_and_leaves_tables(tmp_path: Path) -> None:
    code = """
    seen = []
    deploy.run(save=3)
    plan = compile(deploy)
    outcome = run(plan, "out", iterations=3, record=True, on_iteration=seen.append)
    assert [line["iteration"] for line in seen] == outcome.metrics.column("iteration").to_pylist() == [0, 1, 2]
    assert [line["loss"] for line in seen] == outcome.metrics.column("loss").to_pylist()
    rows = outcome.rows(2)
    assert rows.num_rows == 32 and {"prompt_text", "response_text", "reward"} <= set(rows.column_names)
    outcome = run(plan, resume="out", iterations=4, on_iteration=seen.append)
    assert [line["iteration"] for line in seen] == [0, 1, 2, 3]
    outcome.rows(3)
    """
    _, err = python(tmp_path, code).communicate(timeout=200)
    assert "has no iteration 3: it has 0 to 2" in err, err


@pytest.mark.slow
def test_a_function_that_raises_ends_the_run_with_its_results(tmp_path: Path) -> None:
    code = """
    def stop(line):
        if line["iteration"] == 1:
            raise ValueError("no more")
    run(plan, "out", iterations=300, on_iteration=stop)
    """
    process = python(tmp_path, code)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 1
    assert "ValueError: no more\nraised by `on_iteration` after iteration 1\n" in err, err
    (done,) = re.findall(r"the run ended after (\d) iterations; the files of the run so far are in out; ", err)
    assert "continue from its last checkpoint with resume=out" in err
    assert [path.name for path in (tmp_path / "out" / "checkpoints").iterdir()] == [f"{int(done):06d}"]
    assert len((tmp_path / "out" / METRICS).read_text().splitlines()) == int(done) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("prepare", "while it was prepared: nothing was started"),
        ("_drive", "before iteration 0 had ended: nothing was trained"),
    ],
)
def test_an_interrupt_before_the_first_iteration_has_a_reason(tmp_path: Path, function: str, why: str) -> None:
    code = f"""
    import os, signal, sys, threading, time
    main = threading.get_ident()
    def calls():
        frame = sys._current_frames()[main]
        while frame is not None:
            yield frame.f_code.co_name
            frame = frame.f_back
    def interrupt():
        while {function!r} not in calls():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=interrupt, daemon=True).start()
    run(plan, "out", iterations=300)
    """
    _, err = python(tmp_path, code).communicate(timeout=100)
    assert err.splitlines()[-1].endswith(f"Interrupted: interrupted by SIGINT {why}"), err
