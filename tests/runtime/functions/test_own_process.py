"""A user's code that forks or ends the process that calls it: one process answers, and what ends is named."""

import asyncio
import subprocess
import sys

import numpy as np
import pytest
from agent_plays import played
from environment_stages import tool
from failing_stages import begun, planned
from folders import TESTS
from function_calls import call
from gymnasium_files import file
from gymnasium_files import planned as gym_planned
from gymnasium_files import played as gym_played

from msrl_graph.runtime.process.task_report import RunError

HERE = TESTS
CHILD = "import os; child = os.fork(); child and print('ended with', os.waitpid(child, 0)[1] >> 8, flush=True)"
CALLS = """
from pathlib import Path
from function_calls import call
made = call(Path({folder!r}), {source!r}, ("reward",))
print("answered", made["reward"].values.tolist(), flush=True)
"""


@pytest.mark.parametrize(
    ("after", "status"),
    [
        ("return float(score)", 0),
        ("if not child: raise ValueError('in the child')\n    return float(score)", 1),
        ("if not child: raise SystemExit(5)\n    return float(score)", 5),
        ("if not child: os._exit(6)\n    return float(score)", 6),
    ],
)
def test_a_child_that_a_reward_forks_answers_nothing(after, status, tmp_path):
    source = f"def f(score):\n    {CHILD}\n    {after}\n"
    program = [sys.executable, "-c", CALLS.format(folder=str(tmp_path), source=source)]
    paths = {"PYTHONPATH": f"{HERE}:{HERE / 'support'}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False, env=paths)
    assert done.stdout.splitlines() == [f"ended with {status}"] * 4 + ["answered [1.0, 2.0, 3.0, 4.0]"], done


def test_children_that_work_as_they_should_are_let_be(tmp_path):
    """Those of multiprocessing end by themselves."""
    source = "import multiprocessing\n\ndef f(score):\n    work = multiprocessing.get_context('fork')\n"
    source += "    with work.Pool(2) as pool:\n        return sum(pool.map(float, [score, 0, 1]))\n"
    program = [sys.executable, "-c", CALLS.format(folder=str(tmp_path), source=source)]
    paths = {"PYTHONPATH": f"{HERE}:{HERE / 'support'}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False, env=paths)
    assert done.stdout == "answered [2.0, 3.0, 4.0, 5.0]\n", done


@pytest.mark.parametrize("on_failure", ["stop", "drop_row", "drop_group"])
def test_a_child_that_an_environment_forks_answers_nothing(on_failure, tmp_path):
    forks = "import os; child = os.fork(); child and os.waitpid(child, 0)"
    episodes = begun(planned(tool(tmp_path, step=forks), on_failure))
    first = episodes.reset()
    said = episodes.step(np.arange(8), ["1"] * 8, 1)
    assert [text.startswith("=1") and not over for text, over in said] == [True] * 8
    assert [over for _, over in first] == [False] * 8
    assert episodes.end({"response": np.full(8, 6)}).all()


@pytest.mark.parametrize("wait", ["", "async "])
def test_an_environment_that_ends_its_process_where_that_is_a_rank_is_named(wait, tmp_path):
    path = tool(tmp_path, step="if self.answer == '181' and self.number < 50: import os; os._exit(3)")
    path.write_text(path.read_text().replace("    def ", f"    {wait}def "))
    episodes = begun(planned(path, "stop"))
    episodes.reset()
    with pytest.raises(RunError) as told:
        episodes.step(np.arange(8), ["1"] * 8, 1)
    head = str(told.value).splitlines()[0]
    assert "failed on row 4, turn 1 of iteration 3: ProcessExit: it ends its process with status 3, at " in head
    assert head.endswith(f"{path}:12"), head


def test_a_reward_that_is_a_coroutine_is_run_as_the_help_says(tmp_path):
    source = "import asyncio\n\nasync def waits(score):\n    return float(score)\n\n"
    fix = "def f(score): return asyncio.run(waits(score))"
    assert call(tmp_path, source + fix, ("reward",))["reward"].values.tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("close", ["__import__('os')._exit(3)", "__import__('os').fork()", "raise SystemExit(4)"])
def test_an_instance_that_is_closed_ends_and_doubles_nothing(close, tmp_path):
    (_, _, two), columns, stay, _ = gym_played(gym_planned(file(tmp_path, close=close)))
    assert stay.all() and len(two) == len(columns["reward"].values) == 8


EXITS = """
import os
from urllib.request import Request, urlopen

def ends(question, base_url, api_key):
    {body}

async def waits(question, base_url, api_key):
    {body}
"""


@pytest.mark.parametrize("name", ["ends", "waits_too"])
@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("os._exit(3)", "ProcessExit: it ends its process with status 3, at "),
        ("(child := os.fork()) and os.waitpid(child, 0)", "BadResult: it got no answer from the policy"),
    ],
)
def test_an_agent_that_ends_or_forks_its_process_fails_alone(name, body, told, made, tmp_path):
    with (tmp_path / "talks.py").open("a") as file:
        file.write(EXITS.format(body=body).replace("waits", "waits_too"))
    _, over = asyncio.run(played(made(name), ["", ""]))
    failure, _ = next(iter(over.failed.values()))
    assert failure.summary.reason.startswith(told), failure
    assert failure.reason == ("exited" if "Exit" in told else "rubbish")


FORKED = """
import os, signal, sys, time
from msrl_graph.runtime.process.fork_setup import release_children
signal.signal(signal.SIGTERM, lambda *_: os._exit(1))  # in Python, as in a process of Ray
release_children()
if sys.argv[1:]:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))  # the user's own
for _ in range(50):
    if not (child := os.fork()):
        if sys.argv[1:]:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(2)
        os._exit(3)
    if not sys.argv[1:]:
        os.kill(child, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), end=" ")
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
"""


@pytest.mark.parametrize(("own", "status"), [([], "-15"), (["own"], "7")])
def test_a_child_that_is_asked_to_end_before_its_first_line_ends(own, status, tmp_path):
    """CPython forgets the signal where it is handled in Python. A handler of the user's is theirs."""
    program = [sys.executable, "-c", FORKED, *own]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == [status] * 50, done
