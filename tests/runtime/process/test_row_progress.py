"""Rows count as they are computed: a function hands on what is done, and whoever waits sees that it moves."""

import time
import uuid

import numpy as np
import pytest
from function_calls import prepared

from msrl_graph.runtime.dock.segments import Activity, Room
from msrl_graph.runtime.functions.function_node import Results
from msrl_graph.runtime.process import row_progress

REWARD = "def f(response: str, score):\n    return score * 10, len(response)\n"
GROUPS = "def f(score):\n    return score - score.mean(), score\n"
FAILS = "def f(score):\n    if score == 3: raise ValueError('judge')\n    return score\n"
EVEN = "def f(score):\n    return score % 2 == 0\n"
TWICE = "def f(score):\n    return [1, 1]\n"
CASES = {
    "rows": (REWARD, ("reward", "level"), "row", {}),
    "groups": (GROUPS, ("reward", "level"), "prompt", {}),
    "batch": (GROUPS, ("reward", "level"), "batch", {}),
    "failing": (FAILS, ("reward",), "row", {"on_failure": "leave"}),
    "failing groups": (FAILS.replace("== 3", "[0] == 3"), ("reward",), "prompt", {"on_failure": "leave"}),
    "keep": (EVEN, (), "row", {"key": "keep"}),
    "select": (TWICE, (), "prompt", {"key": "select"}),
}


@pytest.fixture
def told():
    """What is reported in this process."""
    found = []
    row_progress.listen(lambda *report: found.append(report))
    yield found
    row_progress.listen(lambda *report: None)


def plain(results):
    """What there is to compare of results."""
    columns = {n: (p.rows.tolist(), p.column.values.tolist(), type(p)) for n, p in results.columns.items()}
    failed = {where: (failure.reason, size) for where, (failure, size) in results.failed.items()}
    return columns, results.states, failed, results.rows


@pytest.mark.parametrize("case", CASES)
def test_parts_of_a_batch_are_the_batch(case, tmp_path, told):
    source, writes, per, more = CASES[case]
    function, batch, task = prepared(tmp_path, source, writes, per, **more)
    whole = function(batch, task)
    reported, told[:] = [*told], []
    parts = [*function.parts(batch, task, part_seconds=0.0)]
    units = {"row": 4, "prompt": 2, "batch": 1}[per]
    assert len(parts) == units and [part.last for part in parts] == [False] * (units - 1) + [True]
    assert plain(Results.joined(parts)) == plain(whole)
    assert told == reported == [(rows, 4, "") for rows in np.linspace(0, 4, units + 1).astype(int)]


def test_what_takes_no_time_is_one_part(tmp_path):
    function, batch, task = prepared(tmp_path, REWARD, ("reward", "level"))
    assert [part.rows for part in function.parts(batch, task, part_seconds=1.0)] == [4]


def test_the_dock_of_the_host_reads_how_far_a_process_is(tmp_path):
    room = Room.create(f"msrl-test-{uuid.uuid4().hex}", 0)
    activity = Activity(room, "functions of host 0")
    activity.set_activity("host.reward in train/0")
    activity.set_computed_rows(0, 24)
    now = time.monotonic()
    assert room.read_statuses()["functions of host 0"].progress(now) == "0 of 24 rows are done"
    time.sleep(0.06)
    activity.set_computed_rows(3, 24, "`Game` in turn 1")
    said = room.read_statuses()["functions of host 0"]
    assert said.progress(said.last_row_at + 7) == "3 of 24 rows are done, the last 7 s ago, `Game` in turn 1"
    assert now <= said.last_row_at <= time.monotonic()
    activity.set_activity("host.advantage in train/0")  # it counts anew, and has moved when it had moved
    assert room.read_statuses()["functions of host 0"][5:] == (0, 0, said.last_row_at, "")
