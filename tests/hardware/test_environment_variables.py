"""Environment variables that a plan wants of its processes: by pool, each with why; what the user has set stays."""

import os
import re
import subprocess
import sys

import pytest

from msrl_graph import compile
from msrl_graph.emit.ray import ray_script
from msrl_graph.emit.text import plan_text
from msrl_graph.hardware.environment_variables import Setting, find_overridden, missing_settings
from msrl_graph.runtime.driver import environment_check

PROGRAM = """import grpo
cluster pod {{ device = "{device}", nodes = 2, devices_per_node = 8 }}
deploy grpo on pod {{
  model policy = "{model}"
  data source = "rows.jsonl" {{ prompt = "p", answer = "a" }}
  {places}
  engine actor.generate = vllm
  run {{ deterministic = {deterministic} }}
}}
"""


def plan(device="ascend-910c-die", places="place actor.generate on nodes 0", deterministic="false"):
    return compile(
        "p.rlg",
        text=PROGRAM.format(
            device=device, model="tiny" if device == "cpu" else "qwen2.5-7b", places=places, deterministic=deterministic
        ),
    )


def wanted(made, device):
    return {s.name: s.value for s in made.environment_of(device).settings}


@pytest.mark.filterwarnings("ignore::msrl_graph.ProgramWarning")
def test_each_pool_wants_what_its_devices_and_its_engines_want():
    made = plan()
    generate = wanted(made, 0)
    update = wanted(made, 8)
    late = f"{made.deploy.dock.deadline + 60:.0f}"
    assert update == {
        "HCCL_BUFFSIZE": "200",
        "HCCL_CONNECT_TIMEOUT": late,
        "HCCL_EXEC_TIMEOUT": late,
        "HCCL_HOST_SOCKET_PORT_RANGE": "auto",
        "HCCL_NPU_SOCKET_PORT_RANGE": "auto",
    }
    assert generate == update | {
        "VLLM_ASCEND_ENABLE_NZ": "0",
        "TASK_QUEUE_ENABLE": "1",
        "ASCEND_LAUNCH_BLOCKING": "0",
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:False",
    }
    assert all(s.why and s.source for of in made.surroundings for s in of.settings)
    same = wanted(plan(deterministic="true"), 8)
    assert same == update | {"HCCL_DETERMINISTIC": "true", "LCCL_DETERMINISTIC": "1"}


@pytest.mark.filterwarnings("ignore::msrl_graph.ProgramWarning")
@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_other_kinds_of_devices_want_nothing_of_ascend(device):
    assert plan(device, "").surroundings == ()


@pytest.mark.filterwarnings("ignore::msrl_graph.ProgramWarning")
def test_text_and_script_say_them_with_why():
    made = plan()
    said = "TASK_QUEUE_ENABLE=1: no graph is captured with level 2 (verl, perf_tuning_on_ascend.rst)"
    assert said in ray_script(made)
    found = plan_text(made, width=200)
    assert re.search(r"HCCL_NPU_SOCKET_PORT_RANGE=auto +any free port.* all\n", found)
    assert re.search(r"TASK_QUEUE_ENABLE=1 +no graph .* devices 0\.\.7\n", found)


def test_what_the_user_has_set_stays_and_is_told(monkeypatch):
    mine = Setting("A", "1", "it must be", "a page")
    theirs = Setting("B", "2", "so", "a page")
    assert missing_settings([mine, theirs], {"A": "7"}) == {"B": "2"}
    assert find_overridden([mine, theirs], {"A": "7", "B": "2"}) == [(mine, "7")]


@pytest.mark.slow
def test_a_rank_begins_with_them_and_with_what_the_user_has_set(tmp_path):
    """They are there before anything of torch is loaded; outside an actor of Ray's no rank is made, nor Ray started."""
    wanted = (Setting("FIRST", "1", "so", "a page"), Setting("SECOND", "2", "so", "a page"))
    make = f"""import os
from msrl_graph.hardware.environment_variables import Setting
from msrl_graph.runtime.rank.host import RankHost, RankSetup
try:
    RankHost.__ray_metadata__.modified_class('', RankSetup(0, 1, '', 'logs', {wanted!r}))
finally:
    open("seen", "w").write(os.environ["FIRST"] + os.environ["SECOND"])
"""
    variables = os.environ | {"SECOND": "7", "RAY_ENABLE_AUTO_CONNECT": "0"}
    subprocess.run([sys.executable, "-c", make], env=variables, cwd=tmp_path, capture_output=True)
    assert (tmp_path / "seen").read_text() == "17"


@pytest.mark.filterwarnings("ignore::msrl_graph.ProgramWarning")
@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("HCCL_EXEC_TIMEOUT", "60", "kept-variable"),
        ("TASK_QUEUE_ENABLE", "0", "kept-variable"),
        ("TASK_QUEUE_ENABLE", "2", "failing-variable"),
        ("VLLM_ASCEND_ENABLE_NZ", "2", "failing-variable"),
        ("PYTORCH_NPU_ALLOC_CONF", "max_split_size_mb:128,expandable_segments:True", "failing-variable"),
        ("PYTORCH_NPU_ALLOC_CONF", "max_split_size_mb:128", "kept-variable"),
    ],
)
def test_a_run_tells_of_variables_that_stay_and_refuses_those_that_fail(monkeypatch, name, value, code):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv(name, value)
    made = plan()
    (found,) = environment_check.check(made)
    (setting,) = (s for s in made.environment_of(0).settings if s.name == name)
    assert (found.code, found.severity) == (code, "error" if code == "failing-variable" else "warning")
    stays = "" if code == "failing-variable" else " and is kept"
    assert found.message == (
        f"{name} is {value!r} in your environment{stays}; the plan wants {setting.value!r}: {setting.why}"
    )
    # What the help says helps, and on a cluster it is the hosts' environment that counts.
    monkeypatch.delenv(name)
    assert environment_check.check(made) == []
    monkeypatch.setenv(name, setting.value)
    assert environment_check.check(made) == []
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert environment_check.check(made) == []
