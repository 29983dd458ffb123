"""`run` of the Python API: every option of msrl-run, functions that stand in no file, and scripts that would start
themselves."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from folders import ROOT

from msrl_graph import Algorithm, Fault, compile, run
from msrl_graph.api import _only_as_main
from msrl_graph.builder import pickled_functions
from msrl_graph.compiler import pipeline

EXAMPLE = ROOT / "examples" / "arithmetic"

SCRIPT = """\
from msrl_graph import Algorithm, Cluster, Deploy, compile, run

{function}

a = Algorithm("mine", extends="grpo")
a.node("host.reward", "response, answer", "reward", call={name})
deploy = Deploy(a, on=Cluster("laptop", device="cpu"))
deploy.set(prompts=8, group=4, prompt_len=6, response_len=5)
deploy.model("policy", "./model")
deploy.data("source", "train.jsonl", prompt="prompt", answer="answer")
deploy.run(iterations=1)
{start}
"""
SCORE = "def score(response: str, answer: str) -> float:\n    return float(response == answer)"


def script(place, function=SCORE, name="score", start="run(compile(deploy), out='out')", **options):
    (place / "mine.py").write_text(SCRIPT.format(function=function, name=name, start=start))
    for item in ("train.jsonl", "model"):
        if not (place / item).exists():
            (place / item).symlink_to(EXAMPLE / item)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "mine.py"], cwd=place, capture_output=True, text=True, timeout=200, **options
    )
    return done.returncode, done.stdout, done.stderr


def test_a_script_that_its_own_processes_would_start_again_is_refused_at_its_line(tmp_path):
    code, _, err = script(tmp_path)
    assert code == 1 and not (tmp_path / "out").exists()
    path = tmp_path / "mine.py"
    assert err[err.index("error[") :] == (
        "error[unguarded-run]: the processes of the run load `score` from this file, and would each start a run\n"
        f"  --> {path}:13:1\n   |\n13 | run(compile(deploy), out='out')\n   | ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^\n"
        '   = help: put the call that starts the run under `if __name__ == "__main__":`, or the functions into a '
        "file of their own\n"
    ), err
    guarded = "if __name__ == '__main__':\n    run(compile(deploy), out='out', dry_run=True, iterations=7, seed=3)"
    code, out, err = script(tmp_path, start=guarded)
    assert (code, err) == (0, "") and out.startswith("mine: 7 iterations from the beginning, seed 3\n"), (out, err)
    (tmp_path / "rewards.py").write_text(SCORE)
    elsewhere = script(tmp_path, "from rewards import score", start="run(compile(deploy), out='out', dry_run=True)")
    assert elsewhere[0] == 0, elsewhere


def test_a_process_of_a_run_starts_none(tmp_path, monkeypatch):
    monkeypatch.setenv("MSRL_RUN", "/tmp/of-another")
    with pytest.raises(
        Fault, match=r"error\[unguarded-run\]: a process of a run, while loading its functions, would start another run"
    ):
        run(compile("grpo", model="tiny"))


@pytest.mark.parametrize(
    ("source", "line", "guarded"),
    [
        ("run()\n", 1, False),
        ("if __name__ == '__main__':\n    run()\n", 2, True),
        ("if '__main__' == __name__:\n    def f():\n        pass\n    f()\n", 4, True),
        ("if __name__ == '__main__':\n    pass\nelse:\n    run()\n", 4, False),
        ("if True:\n    run()\n", 2, False),
    ],
)
def test_a_guard_is_an_if_that_asks_for_the_name(source, line, guarded):
    assert _only_as_main(source, line) is guarded


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"plan": None}, "`run` takes a plan, not None\n = help: make one: run(compile(program))"),
        ({"iterations": True}, "`iterations` is a whole number from 0 to 2^53, not True"),
        ({"seed": -1}, "`seed` is a whole number from 0 to 2^53, not -1"),
        ({"seed": "3"}, "`seed` is a whole number from 0 to 2^53, not a str"),
        ({"resume": 3}, "`resume` is a folder, a str or a Path, not an int"),
    ],
)
def test_what_is_of_the_wrong_kind_is_refused(options, told):
    with pytest.raises(Fault) as caught:
        run(**{"plan": compile("grpo", model="tiny"), **options})
    assert str(caught.value).replace("  =", " =") == f"error[bad-value]: {told}"


def kept(function):
    """What a run's process would load of a function that a program is given."""
    a = Algorithm("mine", extends="grpo")
    a.node("host.reward", "response, answer", "reward", call=function)
    (path, name), namespace = re.search(r'call = "(.+):(\w+)"', str(a)).groups(), {}
    namespace["__file__"] = path
    exec(Path(path).read_text(), namespace)
    return namespace[name], Path(path).read_text()


def test_functions_that_stand_in_no_file_are_kept_by_value():
    bonus = 0.5

    def nested(response: str, answer: str, *, most: int = 3) -> float:
        return bonus + (response == answer)

    loaded, text = kept(nested)
    assert (
        loaded("a", "a") == 1.5 and "def nested(response: str, answer: str, *, most: int = None) -> float: ..." in text
    )
    loaded, text = kept(lambda response, answer: float(len(response)))
    assert loaded([1, 2], "") == 2.0 and "def lambda_(response, answer): ..." in text
    assert kept(partial(nested, most=4))[0]("a", "b") == 0.5


def test_a_function_of_a_file_stays_there_and_a_wrapped_one_is_its_own_files():
    assert pickled_functions.find_home(script) == (Path(__file__), "script")
    assert pickled_functions.find_home(compile) == (
        Path(pipeline.__file__),
        "compile",
    )  # its wrapper's code lies in another file
    assert pickled_functions.find_home(Path.exists) is None and pickled_functions.find_home(len) is None


if pickled_functions.find_home is not None:  # as under a guard

    def guarded(response, answer):
        return 0.5


def doubled(response, answer):
    return 0.0


if doubled is not None:

    def doubled(response, answer):
        return 0.25


def test_a_function_under_an_if_is_kept_by_value():
    """No process would find it in the file: it loads the file by another name, and the compiler reads what stands at
    the top level."""
    assert pickled_functions.find_home(guarded) is None and pickled_functions.find_home(doubled) is None
    assert kept(guarded)[0]("a", "b") == 0.5 and kept(doubled)[0]("a", "b") == 0.25


@pytest.mark.slow
def test_a_lambda_of_a_script_without_a_guard_trains(tmp_path):
    lambda_ = "lambda response, answer: float(len(response) < 4) + bonus"
    code, _, err = script(
        tmp_path, "bonus = 0.25", lambda_, "print(run(compile(deploy), 'out', record=True, stderr=None).folder)"
    )
    assert code == 0, err
    assert (tmp_path / "out" / "rows" / "000000.parquet").is_file()


def test_a_plan_and_a_graph_can_be_sent_to_another_process():
    """Whatever was computed of them before."""
    plan = compile(EXAMPLE / "grpo.rlg")
    str(plan)
    assert pickle.loads(pickle.dumps(plan)) == plan and pickle.loads(pickle.dumps(plan.graph)) == plan.graph
