"""A plan's file that somebody edited: it runs what a program could say, or it is refused."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from folders import ROOT
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from sample import examples

from msrl_graph import compile
from msrl_graph.cli import run_main
from msrl_graph.compiler.loading import load, plain
from msrl_graph.diagnostics import Fault
from msrl_graph.ir.plan import Plan

# One pool and several, a refill and several updates, states and schedules, an environment, text, pairs.
NAMES = ("tests/programs/apart_two", "tests/programs/stale", "examples/calculator/calculator", "examples/dpo/dpo")
PACKAGED = ("dapo", "ppo")


@cache
def written(name: str) -> str:
    path = next(ROOT.glob(f"{name}.rlg"), None)
    return (compile(path) if path else compile(name, model="tiny")).to_json()


def loaded(plan: Any) -> Plan:
    return load(json.dumps(plan).encode(), "it", run=True)


def refused(plan: Any) -> str:
    with pytest.raises(Fault) as fault:
        loaded(plan)
    (told,) = fault.value.diagnostics
    assert told.code == "bad-plan" and "\n" not in told.message
    return told.message.removeprefix("it is not a plan of this version: ")


def node(plan: Any, name: str) -> Any:
    return next(n for n in plan["graph"]["nodes"] if n["name"] == name)


PRELOAD = {"name": "LD_PRELOAD", "value": "/x.so", "why": "", "source": "", "fails": ""}


def around(plan: Any, **more: Any) -> Any:
    return {"pool": plan["pools"][0]["name"], "settings": [], "python": "", **more}


EDITS = {
    "a negative number of iterations": (
        lambda p: p["deploy"]["run"].update(iterations=-5),
        "`iterations` takes a whole number of 1 or more, not `-5`",
    ),
    "no time to wait": (lambda p: p["deploy"]["dock"].update(deadline=0.0), "`deadline` must be above 0"),
    "no time to wait in the docks alone": (
        lambda p: p["docks"].update(deadline=0.0),
        "`docks.deadline` is not what the compiler makes of its program",
    ),
    "a deploy named as another folder": (lambda p: p["deploy"].update(name="../../x"), "`../../x` is not a name"),
    "a function that is not in the file": (
        lambda p: node(p, "actor.generate")["attributes"]["environment"].update(value=f"{__file__}:Nothing"),
        "has no class `Nothing`",
    ),
    "a file that is not there": (
        lambda p: node(p, "actor.generate")["attributes"]["environment"].update(value="/no/other.py:Calculator"),
        "`/no/other.py` cannot be read",
    ),
    "another type": (lambda p: p["deploy"]["run"].update(seed="1"), "Expected `int`, got `str`"),
    "an unknown attribute": (
        lambda p: node(p, "actor.update")["attributes"].update(mini_bach=node(p, "actor.update")["attributes"]["loss"]),
        "`update` has no attribute `mini_bach`",
    ),
    "an unknown field": (lambda p: p["deploy"]["run"].update(itrations=5), "`deploy.run` has no field `itrations`"),
    "a field that is missing": (lambda p: p["deploy"]["run"].pop("restarts"), "lacks the field `restarts`"),
    "variables for the processes": (
        lambda p: p["surroundings"].append(around(p, settings=[PRELOAD])),
        "`surroundings` is not what the compiler makes of its program",
    ),
    "another interpreter": (
        lambda p: p["surroundings"].append(around(p, python="/tmp/python")),
        "`surroundings` is not what the compiler makes of its program",
    ),
    "rows that the source does not give": (
        lambda p: p["graph"]["rows"].__setitem__(0, 10**7),
        "`graph.rows[0]` is not what the compiler makes of its program",
    ),
    "more hosts": (lambda p: p["cluster"].update(nodes=10**9), "`nodes` of its cluster takes a whole number"),
}  # fmt: skip


@pytest.mark.parametrize("how", EDITS)
def test_an_edit_that_no_program_could_say_is_refused(how: str) -> None:
    edit, why = EDITS[how]
    plan = json.loads(written("examples/calculator/calculator"))
    edit(plan)
    assert why in refused(plan)


@pytest.mark.parametrize("what", ["columns", "workers", "nodes", "states", "params"])
def test_a_name_that_leads_to_another_folder_is_refused_wherever_it_is(what: str) -> None:
    name = "dapo" if what == "params" else "ppo"
    text = written(name)
    plan = json.loads(text)
    found = plan["graph"][what]
    names = list(found) if isinstance(found, dict) else [x["name"] for x in found]
    for old in names[:3]:
        assert refused(json.loads(text.replace(json.dumps(old), json.dumps(f"../{old}"))))


def test_what_a_program_could_say_too_is_taken() -> None:
    plan = json.loads(written("examples/calculator/calculator"))
    plan["deploy"]["run"] |= {"iterations": 7, "seed": 3, "on_nan": "skip"}
    run = loaded(plan).deploy.run
    assert (run.iterations, run.seed, run.on_nan) == (7, 3, "skip")


def test_what_is_only_compared_may_be_of_files_that_are_gone() -> None:
    plan = json.loads(written("examples/calculator/calculator"))
    node(plan, "actor.generate")["attributes"]["environment"]["value"] = "/no/other.py:Calculator"
    assert load(json.dumps(plan).encode(), "it")


def test_a_command_says_what_is_wrong_with_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = json.loads(written("examples/calculator/calculator"))
    plan["deploy"]["run"]["iterations"] = -5
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert run_main([str(tmp_path / "plan.json"), "--dry-run", "--out", str(tmp_path / "out")]) == 1
    told = capsys.readouterr().err
    assert told.startswith("error[bad-plan]") and "`iterations` takes a whole number of 1 or more, not `-5`" in told
    assert "Traceback" not in told and not (tmp_path / "out").exists()


def places(part: Any) -> Iterator[tuple[Any, Any]]:
    """Each value in a plan's JSON, as what it is in and its key there."""
    for key, value in list(part.items()) if isinstance(part, dict) else enumerate(part):
        yield part, key
        if isinstance(value, dict | list):
            yield from places(value)


VALUES = st.one_of(
    st.sampled_from([-1, 0, 1, 2, 2**31, 10**12, -0.5, 0.0, 1e300, True, False, None, [], {}, "a" * 5000, "\u2028"]),
    st.sampled_from(["", "../x", "actor.update", "row", "call", "x y", "source", "batch", "swap", "send", "/etc/p:f"]),
)  # fmt: skip


@examples(60, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_plan_that_is_changed_anywhere_is_refused_or_means_what_a_program_can_say(data: st.DataObject) -> None:
    text = written(data.draw(st.sampled_from([*NAMES, *PACKAGED])))
    plan = json.loads(text)
    # By parts: else nearly all places are those of tensors' names.
    part = data.draw(
        st.sampled_from(["graph", "cluster", "deploy", "pools", "placements", "docks", "schedule", "reshards"])
    )
    inside = [(holder, key) for holder, key in places(plan[part]) if key not in ("buckets", "tensors")]
    small = [x for x in inside if not isinstance(x[0], list) or len(x[0]) < 30]
    holder, key = data.draw(st.sampled_from(small or [(plan, part)]))
    how = data.draw(st.sampled_from(["value", "value", "drop", "double"]))
    if how == "value":
        holder[key] = data.draw(VALUES)
    elif how == "drop":
        del holder[key]
    elif isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    else:
        holder[f"{key}_"] = copy.deepcopy(holder[key])
    began = time.process_time()
    try:
        found = loaded(plan)
    except Fault as fault:
        assert [d.code for d in fault.diagnostics] == ["bad-plan"]
        return
    finally:
        assert time.process_time() - began < 20
    # What was taken is what was written, and it is the compiler's own.
    assert plain(found, ()) == plan
    assert load(found.to_json().encode(), "it", run=True)
