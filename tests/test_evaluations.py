"""Evaluations: their names, what they report, and that a run computes it as somebody would by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from language import context, diagnose, lowered

from msrl_graph import Cluster, Deploy, Imported, compile, to_rlg
from msrl_graph.compiler.loading import load
from msrl_graph.diagnostics import Fault
from msrl_graph.ir.plan import Plan

ROOT = Path(__file__).parent.parent
PROGRAM = ROOT / "examples" / "arithmetic" / "grpo.rlg"
TEXT = PROGRAM.read_text()
STATED = next(line for line in TEXT.splitlines() if line.startswith("  evaluate held_out"))
GREEDY = "evaluate held_out { every = 2, report = reward, samples = 1, temperature = 0 }"
SAMPLED = "evaluate sampled { data = held_out, report = reward, samples = 4, temperature = 1 }"


def program(*evaluations: str) -> str:
    """The example with these evaluations in the place of its own."""
    return TEXT.replace(STATED, "\n".join(f"  {e}" for e in evaluations))


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
    assert (found.code, found.message) == ("unknown-name", "no data are called `sampled`")
    assert "; a name of its own needs `evaluate sampled { data = held_out, … }`" in found.help
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
