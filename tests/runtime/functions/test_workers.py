"""Functions that several processes, or an event loop, call side by side give what one after another would."""

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from folders import TESTS
from function_calls import prepared, results
from killed_runs import computed, program
from place import MINE, ONE_RANK, SMALL

from msrl_graph.algorithms import registry
from msrl_graph.ir.graph import Expr, State
from msrl_graph.runtime.process.task_report import RunError

REWARD = "def f(response: str, score, *, rng):\n    {first}\n    return len(response) + score + rng.random()\n"
STATE = State("rate", "f32", Expr("number", 0.5), per="prompt")
PER_PROMPT = """def f(answer, score, *, rng):
    return [float(s) + rng.random() for s in score]
"""
CASES = {
    "a row": {"source": REWARD.format(first="pass"), "writes": ("reward",)},
    "several values": {
        "source": "def f(response, score):\n    return [float(score)] * len(response), {'of': response.tolist()}\n",
        "writes": ("advantage", "notes"),
    },
    "a group": {"source": PER_PROMPT, "writes": ("reward",), "per": "prompt"},
    "a value of a group": {
        "source": "def f(score):\n    return score.sum()\n", "writes": ("difficulty",), "per": "prompt",
    },
    "a state": {
        "source": "def f(score, rate):\n    return 1.0 * score, rate + score.sum()\n",
        "writes": ("reward",), "gives": ("reward", "rate"), "states": (STATE,), "per": "prompt",
    },
    "a filter": {"source": "def f(score):\n    return score > 2\n", "writes": (), "key": "keep"},
    "a choice": {"source": "def f(score):\n    return [1, 0, 1]\n", "writes": (), "key": "select", "per": "prompt"},
    "rows that fail": {
        "source": "def f(response: str, score):\n    assert response, 'empty'\n    return score\n",
        "writes": ("reward",), "on_failure": "leave",
    },
    "values that do not fit": {
        "source": "def f(score):\n    return [float(score[0]), 'much']\n",
        "writes": ("reward",), "per": "prompt", "on_failure": "leave",
    },
}  # fmt: skip


def shown(found):
    """All that a node made, to be compared."""
    columns = {
        name: (
            p.rows.tolist(),
            p.column.values.tolist(),
            None if p.column.offsets is None else p.column.offsets.tolist(),
        )
        for name, p in found.columns.items()
    }
    states = {name: (list(v.units), list(v.values)) for name, v in found.states.items()}
    return columns, states, {k: (f.reason, f.summary.reason, n) for k, (f, n) in found.failed.items()}


@pytest.mark.parametrize("case", CASES)
def test_workers_make_of_rows_and_groups_what_one_process_makes(case, tmp_path):
    alone, shared = (results(tmp_path, **CASES[case], workers=n) for n in (0, 3))
    assert shown(alone) == shown(shared)


def test_results_come_in_order_whoever_is_done_first(tmp_path):
    slow = REWARD.format(first="import time; time.sleep(0.3 * (score == 1))")
    rewards = [results(tmp_path, slow, ("reward",), workers=n).columns["reward"].column.values for n in (0, 4)]
    assert rewards[0].tolist() == rewards[1].tolist()


def test_calls_are_made_side_by_side(tmp_path):
    """Each waits until all four have begun."""
    meet = f"""import os, time
def f(score):
    open({str(tmp_path)!r} + f"/{{score:g}}", "w").close()
    until = time.monotonic() + 20
    while not all(os.path.exists({str(tmp_path)!r} + f"/{{n}}") for n in (1, 2, 3, 4)):
        assert time.monotonic() < until
        time.sleep(0.01)
    return float(os.getpid())
"""
    found = results(tmp_path, meet, ("reward",), workers=4).columns["reward"].column.values
    assert len({*found.tolist()}) == 4 and os.getpid() not in found


def test_the_first_row_that_fails_is_told_with_its_place_and_what_it_was_given(tmp_path):
    source = "def f(response: str):\n    assert len(response) != 1, 'too short'\n    return 1.0\n"
    with pytest.raises(RunError) as failed:
        results(tmp_path, source, ("reward",), workers=2)
    told = str(failed.value)
    assert "failed on row 1 of iteration 7: AssertionError: too short, at" in told and "mine.py:2" in told
    assert "response: 'c'" in told


DIES = """import os, signal
def f(score):
    if score == 3 and not os.path.exists({mark!r}):
        {mark_it}
        {die}
    return score
"""


def test_a_worker_that_is_killed_once_is_replaced_and_its_rows_are_computed_again(tmp_path):
    mark = str(tmp_path / "was-here")
    source = DIES.format(mark=mark, mark_it=f"open({mark!r}, 'w').close()", die="os.kill(os.getpid(), signal.SIGKILL)")
    assert results(tmp_path, source, ("reward",), workers=2).columns["reward"].column.values.tolist() == [1, 2, 3, 4]
    assert Path(mark).exists()


@pytest.mark.parametrize(
    ("die", "told"),
    [
        ("os._exit(3)", "it ended its process with status 3"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "it ended its process: Segmentation fault"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "its process was killed in it 2 times"),
    ],
)
def test_a_call_that_ends_its_worker_is_named_and_not_made_again(die, told, tmp_path):
    source = DIES.format(mark=str(tmp_path / "never"), mark_it="pass", die=die)
    with pytest.raises(RunError, match=r"failed on row 2 of iteration 7: ProcessDied: ") as failed:
        results(tmp_path, source, ("reward",), workers=2)
    assert told in str(failed.value)
    if "SEGV" in die:
        assert "mine.py:5" in str(failed.value)


def test_who_stops_asking_leaves_no_call_under_way(tmp_path):
    """The first row fails when the second is under way, which goes on when the error is known."""
    source = f"""import os, time
def seen(name):
    until = time.monotonic() + 60
    while not os.path.exists({str(tmp_path)!r} + name):
        assert time.monotonic() < until
        time.sleep(0.01)

def f(score):
    if score == 1:
        seen("/begun")
        raise ValueError("no")
    open({str(tmp_path / "begun")!r}, "w").close()
    seen("/known")
    open({str(tmp_path / "done")!r}, "w").close()
    return score
"""
    function, batch, task = prepared(tmp_path, source, ("reward",), workers=2)
    for _ in range(2):  # they can be asked again
        with pytest.raises(RunError, match="no"):
            function(batch, task)
        assert not (tmp_path / "done").exists()
    (tmp_path / "known").touch()
    time.sleep(0.5)
    assert not (tmp_path / "done").exists()


def test_workers_end_with_who_has_them(tmp_path):
    function, batch, task = prepared(tmp_path, "def f(score):\n    return score\n", ("reward",), workers=2)
    function(batch, task)
    nest = psutil.Process(function.workers.nest.process.pid)
    processes = [nest, *nest.children()]
    assert len(processes) == 3
    del function
    gc.collect()
    _, alive = psutil.wait_procs(processes, 10)
    assert not alive


def test_a_nest_that_somebody_kills_is_begun_again(tmp_path):
    function, batch, task = prepared(tmp_path, "def f(score):\n    return score\n", ("reward",), workers=2)
    first = shown(function(batch, task))
    function.workers.nest.process.kill()
    function.workers.nest.process.wait()
    assert shown(function(batch, task)) == first


def test_what_functions_tell_in_workers_is_counted(tmp_path):
    source = "from msrl_graph.algorithms.registry import tell\ndef f(score):\n    tell('seen', 1)\n    return score\n"
    registry.take_amounts()
    results(tmp_path, source, ("reward",), workers=2)
    assert registry.take_amounts() == {"seen": 4}


def test_a_function_that_only_one_process_may_call_is_called_by_this_one(tmp_path):
    mark = "from msrl_graph import function\nimport os\n@function(parallel=False)\n"
    found = results(tmp_path, mark + "def f(score):\n    return float(os.getpid())\n", ("reward",), workers=2)
    assert {*found.columns["reward"].column.values.tolist()} == {float(os.getpid())}


def test_a_file_that_cannot_be_imported_is_told(tmp_path):
    with pytest.raises(RunError, match=r"mine\.py \(.*\) cannot be imported: ImportError: no, at .*mine\.py:1"):
        results(tmp_path, "raise ImportError('no')\ndef f(score):\n    return score\n", ("reward",), workers=2)


WAITS = """import asyncio
under_way = most = 0
async def f(score, *, rng):
    global under_way, most
    under_way += 1
    most = max(most, under_way)
    await asyncio.sleep(0.05 * (5 - score))
    under_way -= 1
    {then}
    return score + rng.random() + 100 * most
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_calls_that_wait_are_made_at_once_and_their_results_come_in_order(workers, tmp_path):
    found = results(tmp_path, WAITS.format(then="pass"), ("reward",), workers=workers).columns["reward"].column.values
    plain = "def f(score, *, rng):\n    return score + rng.random() + 400\n"
    assert found.tolist() == results(tmp_path, plain, ("reward",)).columns["reward"].column.values.tolist()


def test_a_batch_may_be_waited_for(tmp_path):
    source = "import asyncio\nasync def f(score):\n    await asyncio.sleep(0)\n    return score * 2\n"
    found = results(tmp_path, source, ("reward",), per="batch").columns["reward"].column.values
    assert found.tolist() == [2, 4, 6, 8]


@pytest.mark.parametrize("then", ["assert score != 3, 'three'", "import os; score != 3 or os._exit(1)"])
def test_a_call_that_waits_and_fails_is_told(then, tmp_path):
    with pytest.raises(RunError, match=r"failed on row 2 of iteration 7: (AssertionError: three|ProcessExit: it ends)"):
        results(tmp_path, WAITS.format(then=then), ("reward",))


DYING = """
import sys
from pathlib import Path
from function_calls import prepared
from msrl_graph.runtime.functions.crash_journal import CrashJournal

source = "import os, signal\\nasync def f(score):\\n    score != 3 or os.kill(os.getpid(), 11)\\n    return score"
function, batch, task = prepared(Path({folder!r}), source, ("reward",))
function.of_unit.note = CrashJournal(Path({folder!r}, "note"), again=bool(sys.argv[1:]))
function(batch, task)
"""


def test_calls_at_once_in_which_a_process_died_are_not_made_again(tmp_path):
    """Whoever takes its place tells of it."""
    program = [sys.executable, "-c", DYING.format(folder=str(tmp_path))]
    here = TESTS
    paths = {"PYTHONPATH": f"{here}:{here / 'support'}", "PATH": "/usr/bin:/bin"}
    died, told = (
        subprocess.run([*program, *again], capture_output=True, text=True, timeout=120, check=False, env=paths)
        for again in ([], ["again"])
    )
    assert died.returncode == -signal.SIGSEGV, died
    what = "failed on one of 4 calls in progress of iteration 7: ProcessDied: it ended its process: Segmentation fault"
    assert what in told.stderr and "mine.py:3" in told.stderr, told.stderr


def test_what_a_file_keeps_between_calls_may_belong_to_the_loop(tmp_path):
    source = """import asyncio
lock = asyncio.Lock()
async def f(score):
    async with lock:
        await asyncio.sleep(0.01)
        return score
"""
    function, batch, task = prepared(tmp_path, source, ("reward",))
    for _ in range(2):
        assert np.array_equal(function(batch, task).columns["reward"].column.values, [1, 2, 3, 4])


@pytest.mark.slow
def test_a_run_with_workers_is_the_run_without_though_some_are_killed_or_stopped(place):
    """One is killed, and one is stopped, which is found out after ten seconds, while others are at their rows."""
    mark = f"open({str(place.folder)!r} + f'/at-{{os.getpid()}}', 'w').close()"
    place.function(f"{mark}\n    time.sleep(0.02)\n    return float(response == answer)")
    runs = {}
    for name, workers in (("alone", 1), ("workers", 3)):
        program(place, *ONE_RANK, MINE, function_workers=workers)
        text = (place.folder / "p.rlg").read_text().replace("  run {", "  dock { deadline = 20 s }\n  run {")
        (place.folder / "p.rlg").write_text(text)
        for seen in place.folder.glob("at-*"):
            seen.unlink()
        process = place.start("p.rlg", *SMALL, "--out", name)
        if workers > 1:
            while len(found := sorted(place.folder.glob("at-*"))) < workers and process.poll() is None:
                time.sleep(0.01)
            assert len(found) == workers
            for path, number in zip(found, (signal.SIGKILL, signal.SIGSTOP), strict=False):
                os.kill(int(path.name[3:]), number)
        _, err = process.communicate(timeout=place.patience)
        assert process.returncode == 0, err
        runs[name] = computed(place.folder / name)
        assert "started again" not in err and "restarting" not in err, err
        if workers > 1:
            assert len([*place.folder.glob("at-*")]) == workers + 2
    (alone, first), (workers, second) = runs.values()
    assert alone == workers and all((first[t] == second[t]).all() for t in first)
    place.assert_clean()
