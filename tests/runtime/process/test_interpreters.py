"""The interpreter of a pool: stated once, told where it will not do, and packages that cannot be beside each other.

That a run's ranks have it, tests/scenarios/runs/test_main_job.py holds."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from own_engine import GENERATOR, TRAINER

from msrl_graph import backends, compile
from msrl_graph.backends.spec import EnginePackages
from msrl_graph.data.plan_paths import make_absolute
from msrl_graph.diagnostics import Fault
from msrl_graph.emit.ray import ray_script
from msrl_graph.emit.text import plan_text
from msrl_graph.runtime.process import host_facts, interpreters
from msrl_graph.runtime.process.host_facts import Versions

PROGRAM = """import grpo
cluster pod {{ device = "cpu", devices_per_node = 2 }}
deploy grpo on pod {{
  model policy = "tiny"
  data source = "rows.jsonl" {{ prompt = "p", answer = "a" }}
  {statements}
}}
"""
OWN = {"Python": "3.11.7", "msrl-graph": "0.1.0 0a1b2c3d", "ray": "2.60.0", "torch": "2.13.0+cpu"}


def plan(*statements, path="p.rlg"):
    return compile(path, text=PROGRAM.format(statements="\n  ".join(statements)))


def refused(*statements):
    with pytest.raises(Fault) as caught:
        plan(*statements)
    (told,) = caught.value.diagnostics
    return told


def test_a_pool_has_the_interpreter_that_one_of_its_engines_states(tmp_path):
    made = plan("apart actor.generate", 'engine actor.generate = vllm { python = "/opt/vllm/bin/python" }')
    assert [made.environment_of(device).python for device in range(2)] == ["/opt/vllm/bin/python", ""]
    assert "interpreter of device 0: /opt/vllm/bin/python\n" in plan_text(made)
    assert "\n    device 0, with /opt/vllm/bin/python\n" in ray_script(made)
    # All states of a pool have it, and a path is from the folder of the file that says it.
    (tmp_path / "p.rlg").write_text(PROGRAM.format(statements='engine actor.generate = hf { python = "env/python" }'))
    made = make_absolute(compile(tmp_path / "p.rlg"))
    assert {made.environment_of(device).python for device in range(2)} == {str(tmp_path / "env" / "python")}


def test_two_interpreters_of_a_pool_are_told_and_either_help_is_true():
    first = 'engine actor.generate = hf { python = "/a" }'
    other = 'engine actor.update = fsdp { python = "/b" }'
    told = refused(first, other)
    assert (told.code, told.span.line) == ("bad-value", 7)
    assert told.message == (
        '`actor.infer` and `actor.generate` run in the same processes, which have one interpreter: "/a" or "/b"'
    )
    assert told.help == "state `python` for one of them, or separate them: `apart actor.generate, actor.infer`"
    assert [span.line for span, _ in told.related] == [6]
    assert plan(first).environment_of(0).python == "/a"
    made = plan("apart actor.generate, actor.infer", first, other)
    assert {made.environment_of(p.name).python for p in made.pools} == {"/a", "/b"}


def changed(spec, **capabilities):
    return replace(spec, capabilities=replace(spec.capabilities, **capabilities))


def test_packages_that_cannot_be_beside_each_other_are_told_and_an_interpreter_is_the_way_out(monkeypatch):
    generator = replace(changed(GENERATOR, options=("dtype",)), packages=EnginePackages(needs=("ray-ascend",)))
    bridge = replace(backends.ENGINES["megatron"].packages, needs=("megatron-bridge",))
    monkeypatch.setitem(backends.ENGINES, "likeliest", generator)
    monkeypatch.setitem(backends.ENGINES, "pairs", replace(TRAINER, packages=bridge))
    generates = "engine actor.generate = likeliest"
    trains = "engine actor.update = pairs"
    told = refused(generates, trains)
    assert (told.code, told.span.line) == ("clashing-packages", 7)
    assert told.message.startswith("`ray-ascend` and `megatron-bridge` cannot be in one environment: Python: ray-")
    assert told.help == (
        'give `actor.update` an interpreter of its own: `engine actor.update = pairs { python = "…" }`, on devices of '
        "its own: `apart actor.generate, actor.update`"
    )
    apart = "apart actor.generate, actor.update"
    alone = 'engine actor.update = pairs { python = "/opt/bridge/bin/python" }'
    assert refused(generates, alone).message.startswith(  # in one pool one interpreter is no way out
        "`ray-ascend` and `megatron-bridge` cannot be in one environment (/opt/bridge/bin/python): "
    )
    told = refused(apart, generates, trains)
    assert told.help == 'give `actor.update` an interpreter of its own: `engine actor.update = pairs { python = "…" }`'
    assert plan(apart, generates, alone).environment_of(1).python == "/opt/bridge/bin/python"


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({}, ""),
        ({"Python": "3.11.9", "torch": "2.10.0"}, ""),  # what it loads is its own affair
        ({"Python": "3.12.1"}, "has Python 3.12.1 (the run has 3.11.7)"),
        ({"ray": "2.60.1", "msrl-graph": "0.1.0 ff"}, "has msrl-graph 0.1.0 ff (the run has 0.1.0 0a1b2c3d), ray 2.6"),
        ({"ray": "", "msrl-graph": ""}, "lacks msrl-graph, ray"),
    ],
)
def test_what_an_interpreter_must_have(found, told):
    wrong = interpreters.find_mismatch(Versions(found=OWN | found, wrong=""), OWN)
    assert wrong.startswith(told) and bool(wrong) == bool(told)


@pytest.mark.parametrize(
    ("python", "told"),
    [
        ("/nowhere/python", "does not run: No such file or directory"),
        ("/bin/false", "does not run: exit status 1"),
        ("/bin/ls", "does not run: "),
    ],
)
def test_one_that_is_none_is_told_at_its_line_before_anything_starts(python, told):
    made = plan("apart actor.generate", f'engine actor.generate = hf {{ python = "{python}" }}')
    (found,) = interpreters.check_interpreters(made)
    assert (found.code, found.span.line) == ("not-installed", 7)
    assert found.message.startswith(f"the interpreter {python} {told}")


def test_an_environment_tells_what_it_has_and_not_what_lies_about(tmp_path, monkeypatch):
    """A real one, empty; what lies in the folder from which it is asked is not of it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    (tmp_path / "msrl_graph").mkdir()
    (tmp_path / "msrl_graph" / "__init__.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    made = plan("apart actor.generate", 'engine actor.generate = hf { python = "env/bin/python" }')
    ((python, command),) = interpreters.commands(made).items()
    seen = host_facts.query_interpreter(command)
    assert (python, seen["wrong"]) == ("env/bin/python", "")
    assert seen["found"] == {**dict.fromkeys(seen["found"], ""), "Python": ".".join(map(str, sys.version_info[:3]))}
    assert {"msrl-graph", "ray", "torch", "transformers"} <= seen["found"].keys()
    (told,) = interpreters.check_interpreters(made)
    assert told.message.startswith("the interpreter env/bin/python lacks msrl-graph, torch, ray, ")
    assert json.loads(subprocess.check_output(command)) == seen["found"]
