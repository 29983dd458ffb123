"""Where messages of a run say that a node is: where its call is stated, also where the node itself is of the
algorithm that another one extends."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from language import TESTS

from msrl_graph import compile
from msrl_graph.ir.plan import Plan
from msrl_graph.runtime.data.numerics import NumericsWatch
from msrl_graph.runtime.functions.user_traceback import describe_failure
from msrl_graph.runtime.metrics.row_failures import failures
from msrl_graph.runtime.process.task import Task
from msrl_graph.runtime.process.task_report import Report, RunError

MODEL = TESTS.parent / "examples" / "arithmetic" / "model"
BASE = """import grpo
algorithm judged extends grpo {
  node host.reward(response, answer) -> reward { call = "rewards.py:judge" }
}
"""
CHILD = """import "base.rlg"
algorithm leaving extends judged {

  node host.reward { call = "rewards.py:judge", on_failure = leave, per = prompt }
}
cluster one { device = "cpu" }
deploy leaving on one {
  set prompt_len = 6
  set response_len = 5
  model policy = "MODEL"
  data source = "rows.jsonl"
}
"""
WHERE = "`host.reward` (line 4 of child.rlg)"


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    (tmp_path / "rewards.py").write_text("def judge(response, answer):\n    return 1.0\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "base.rlg").write_text(BASE)
    (tmp_path / "child.rlg").write_text(CHILD.replace("MODEL", str(MODEL)))
    return compile(tmp_path / "child.rlg")


def test_rows_that_failed_are_those_of_the_call_of_the_child(plan: Plan) -> None:
    report = Report("functions")
    for name, number, of in (("host.reward/failed", 1, 0), ("host.reward/failed/raised", 1, 0)):
        report.count(name, number, of)
    report.count("kept/host.reward", 3, 4)
    (told,) = failures(plan, Task("train", 0, 4), [report])
    assert told.startswith(f"{WHERE}: 1 of 4 rows failed in iteration 0")


def test_a_result_that_is_no_number_is_of_the_call_of_the_child(plan: Plan) -> None:
    node = plan.graph.node("host.reward")
    watch = NumericsWatch(plan)
    with pytest.raises(RunError, match="is not finite") as raised:
        watch.report_rows(node, Task("train", 0, 4), Report("functions"), "reward", np.array([3]), "it is not finite")
    assert str(raised.value).startswith(f"{WHERE} on row 3 of iteration 0: it is not finite")


def test_what_a_function_raises_is_of_the_call_of_the_child(plan: Plan) -> None:
    told = describe_failure(plan.graph.node("host.reward"), ValueError("no"), "row 0")
    assert told.startswith(f"{WHERE} failed on row 0: ValueError: no")


def test_a_node_that_calls_nothing_is_where_it_is_stated(plan: Plan) -> None:
    node = plan.graph.node("actor.infer")
    assert describe_failure(node, ValueError("no"), "row 0").startswith(f"`actor.infer` ({node.span.place}) failed")
