"""The passes in their order, and the verifier: what the compiler makes passes it, and what was changed in a plan's file
is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import chain
from typing import Any, get_args

import page
import pytest
from folders import ROOT
from hypothesis import given
from hypothesis import strategies as st
from sample import examples

from msrl_graph import compile
from msrl_graph.analysis.async_schedule import skipping_edges
from msrl_graph.backends import ENGINES
from msrl_graph.checks.table import CHECKS
from msrl_graph.compiler import loading, pipeline
from msrl_graph.compiler.loading import load
from msrl_graph.compiler.pipeline import LAST, PASSES
from msrl_graph.compiler.plan_names import find_wrong_names
from msrl_graph.diagnostics import Fault
from msrl_graph.emit import facts as emit_facts
from msrl_graph.emit import text as emit_text
from msrl_graph.emit.diff import difference
from msrl_graph.ir.instruction import Instruction, Op, Walk, Walker
from msrl_graph.ir.plan import Plan
from msrl_graph.passes import order
from msrl_graph.passes.dock import InsertDock
from msrl_graph.passes.facts import Fact, Section
from msrl_graph.passes.order import ORDER, passes
from msrl_graph.passes.place import PlacementPass
from msrl_graph.passes.reshard import InsertResharding
from msrl_graph.passes.schedule import BuildSchedule
from msrl_graph.passes.spec import Pass
from msrl_graph.planner.place import PlaceNodes

PROGRAMS = {
    str(p.relative_to(ROOT)): p
    for folder in ("tests/programs", "examples")
    for p in sorted((ROOT / folder).rglob("*.rlg"))
}
# Weights that are swapped, sent, and sent in each round of prompts; evaluations; a refill; several updates of a worker.
VARIED: dict[str, dict[str, Any]] = {
    "grpo_page": {},
    "apart_two": {},
    "apart_four": {},
    "stale": {},
    "dapo": {"model": "tiny"},
    "ppo": {"model": "tiny"},
}


# The passes


def test_whatever_a_pass_needs_stands_before_it() -> None:
    names = [step.name for step in PASSES]
    assert len(names) == len({*names}) and names[0] == "place"
    for at, step in enumerate(PASSES):
        assert {*step.needs} <= {*names[:at]}, step.name
    assert {*CHECKS} - {"graph", "evaluated", "files"} <= {*names} and {*LAST.values()} <= {*names}


@pytest.mark.parametrize("step", [*PASSES.after("place")], ids=lambda s: s.name)
def test_a_pass_needs_what_it_says_and_all_of_that(step: Any) -> None:
    start = page.start(evaluations=(page.EVALUATION,))
    needed = [*step.needs]
    for name in needed:
        needed += page.PASSES[name].needs
    whole = page.PASSES.until(step.name).apply(start)
    before = page.PASSES.until(step.name).only(*(s.name for s in page.PASSES if s.name != step.name)).apply(start)
    filled = [f.name for f in fields(Plan) if getattr(whole, f.name) != getattr(before, f.name) and f.name != "notes"]
    assert {*filled} <= {*(step.fills or ("parts",))} and len(filled) <= 1

    def part(plan: Plan, without: Plan) -> Any:
        """What it fills, or, of a pass that fills nothing, what it notes."""
        return getattr(plan, filled[0]) if filled else [n for n in plan.notes if n not in without.notes]

    def made(*names: str) -> Any:
        given = page.PASSES.only(*names).apply(start)
        return part(step.apply(given), given)

    assert made(*needed) == part(whole, before)
    for lacking in step.needs:
        try:
            assert made(*({*needed} - {lacking})) != part(whole, before), f"{step.name} does not need {lacking}"
        except (KeyError, AttributeError, ValueError, StopIteration, AssertionError, ZeroDivisionError) as error:
            assert "does not need" not in str(error), error


def test_parts_of_the_list_are_named_by_where_they_begin_and_end() -> None:
    listed = passes(PlaceNodes(ENGINES), ENGINES)
    names = [s.name for s in listed]
    assert [s.name for s in listed.until("dock")] == names[: names.index("dock") + 1]
    assert [s.name for s in listed.after("place").until("reshard")] == names[1 : names.index("reshard") + 1]
    assert [s.name for s in listed.only("schedule", "place")] == ["place", "schedule"]
    assert listed["dock"] == InsertDock(ENGINES)
    with pytest.raises(ValueError, match="'no'"):
        listed.until("no")


@dataclass(frozen=True)
class Prompts:
    """The results of the pass below."""

    seen: int
    most: float


class CountPrompts(Pass):
    """A pass in one file: the prompts of a run."""

    name = "prompts"
    title = "Prompts"
    needs = ("place",)

    def apply(self, plan: Plan) -> Plan:
        iterations = plan.deploy.run.iterations
        return plan.with_part(self.name, Prompts(plan.graph.rows[0] * iterations, 1.5))

    @staticmethod
    def verify(plan: Plan) -> Iterator[str]:
        results = plan.part("prompts", Prompts)
        if results is None or results.seen < 1:
            yield "it sees no prompts"

    @staticmethod
    def facts(plan: Plan) -> Section:
        results = plan.part("prompts", Prompts)
        return {"run": {"seen": Fact(float(results.seen), "prompts"), "most": Fact(results.most)}} if results else {}


def test_a_new_pass_is_a_class_and_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its results are in the plan and its file, verified, shown and compared."""
    for module in (order, emit_text, emit_facts, loading):
        monkeypatch.setattr(module, "ORDER", (*ORDER, CountPrompts))
    monkeypatch.setattr(loading, "PASSES", pipeline.pipeline())
    plan = compile(ROOT / "tests/programs/grpo_page.rlg")
    rows = plan.graph.rows[0] * plan.deploy.run.iterations
    assert plan.part("prompts", Prompts) == Prompts(rows, 1.5)
    again = load(plan.to_json().encode(), "it", run=True)
    assert again.parts == plan.parts and again.to_json() == plan.to_json()
    assert [line.split() for line in plan.explain().partition("\nPrompts\n")[2].splitlines()[2:4]] == [
        ["run", "seen", f"{rows:,}"],
        ["run", "most", "1.5"],
    ]
    more = replace(plan, deploy=replace(plan.deploy, run=replace(plan.deploy.run, iterations=1)))
    changes = difference(plan, CountPrompts(ENGINES).apply(more))
    assert [(c.item, c.what, c.old, c.new) for c in changes if c.part == "Prompts"] == [
        ("run", "seen", rows, plan.graph.rows[0])
    ]
    others = {name: results for name, results in plan.parts.items() if name != "prompts"}
    changed = others | {"prompts": {"seen": 2, "most": 1.5}}
    for wrong, why in ((others, "it sees no prompts"), (changed, "`parts.prompts.seen`")):
        with pytest.raises(Fault, match=why):
            load(replace(plan, parts=wrong).to_json().encode(), "it", run=True)


# The verifier


@cache
def written(name: str) -> str:
    options = VARIED[name]
    return compile(name if options else ROOT / "tests" / "programs" / f"{name}.rlg", **options).to_json()


def refused(plan: Any) -> str:
    """Why a plan's JSON is refused."""
    with pytest.raises(Fault) as fault:
        load(json.dumps(plan).encode(), "it")
    (told,) = fault.value.diagnostics
    assert told.code == "bad-plan"
    return told.message.removeprefix("it is not a plan of this version: ")


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_what_the_compiler_makes_passes(name: str) -> None:
    try:
        plan = compile(PROGRAMS[name])
    except Fault as fault:
        assert {d.code for d in fault.diagnostics} <= {"no-deploy", "missing-file"}
        return
    assert [*chain(find_wrong_names(plan), PASSES.verify(plan))] == []
    assert load(plan.to_json().encode(), "it").to_json() == plan.to_json()


def instructions(plan: Any) -> list[tuple[list[Any], int]]:
    return [(s["instructions"], i) for s in plan["schedule"] for i in range(len(s["instructions"]))]


def parts(plan: Any, kind: str) -> list[tuple[list[Any], int]]:
    """Each thing of a kind, as the list that it is in and its place there."""
    if kind == "instructions":
        return instructions(plan)
    found = plan["docks"]["controllers"] if kind == "controllers" else plan[kind]
    return [(found, i) for i in range(len(found))]


WORDS = ("RUN", "RESHARD", "RELEASE", "SWAP_IN", "WAIT", "AGAIN", "STOP", "", "functions", "devices", "train", "x")
KINDS = ("instructions", "controllers", "placements", "reshards", "schedule", "pools", "traffic")


@examples(200)
@given(st.data())
def test_what_is_dropped_doubled_or_renamed_is_refused(data: st.DataObject) -> None:
    plan = json.loads(written(data.draw(st.sampled_from(sorted(VARIED)))))
    kind = data.draw(st.sampled_from([k for k in KINDS if parts(plan, k)]))
    inside, at = data.draw(st.sampled_from(parts(plan, kind)))
    how = data.draw(st.sampled_from(("drop", "double", "rename")))
    if how == "drop":
        del inside[at]
    elif how == "double":
        inside.insert(data.draw(st.integers(0, len(inside))), copy.deepcopy(inside[at]))
    else:
        named = {k for k in ("op", "node", "other", "pool", "task", "src", "dst") if k in inside[at]}
        key = data.draw(st.sampled_from(sorted(named or {"name"})))
        others = {*WORDS, *(n["name"] for n in plan["graph"]["nodes"])} - {inside[at][key]}
        inside[at][key] = data.draw(st.sampled_from(sorted(others)))
    assert refused(plan)


def test_an_instruction_of_no_node_is_refused() -> None:
    plan = json.loads(written("apart_two"))
    for inside, at in parts(plan, "instructions"):
        node = inside[at]["node"]
        inside[at]["node"] = ""
        assert refused(plan)
        inside[at]["node"] = node


def changed(name: str, pool: int, *steps: tuple[str, str] | tuple[str, str, str]) -> Any:
    """A plan whose stream of a pool is these instructions."""
    plan = json.loads(written(name))
    plan["schedule"][pool]["instructions"] = [dict(zip(("op", "node", "other"), (*s, ""), strict=False)) for s in steps]
    return plan


def stream(name: str, pool: int) -> list[tuple[str, str, str]]:
    return [(x["op"], x["node"], x["other"]) for x in json.loads(written(name))["schedule"][pool]["instructions"]]


def moved(steps: list[Any], first: int, to: int) -> list[Any]:
    left = [*steps[:first], *steps[first + 1 :]]
    return [*left[:to], steps[first], *left[to:]]


@pytest.mark.parametrize(
    ("program", "pool", "order", "told"),
    [
        ("grpo_page", 0, lambda s: moved(s, 0, 1), "run `actor.generate` while its weights are not on the devices"),
        ("grpo_page", 0, lambda s: moved(s, 1, 2), "run `actor.generate` while its weights are not on the devices"),
        (
            "grpo_page",
            0,
            lambda s: [x for x in s if x[0] not in ("SWAP_IN", "WAIT")],
            "run `actor.infer` while its weights are not on the devices",
        ),
        ("grpo_page", 0, lambda s: [x for x in s if x[0] != "SWAP_IN"], "wait for the weights of `actor.update`"),
        (
            "grpo_page",
            0,
            lambda s: [*s, ("RESHARD", *s[0][1:])],
            "leave a node that has not run, or weights where the next task",
        ),
        ("grpo_page", 1, lambda s: [*s[1:], s[0]], "wait for each other"),
        ("apart_two", 1, lambda s: [*s[1:], s[0]], "wait for each other"),
    ],
)
def test_weights_and_rows_are_there_when_they_are_needed(program: str, pool: int, order: Any, told: str) -> None:
    before = stream(program, pool)
    why = refused(changed(program, pool, *order(before)))
    assert why.startswith("the streams of `train` ") and told in why


def test_weights_stay_where_the_next_iteration_may_generate_with_them() -> None:
    path = ROOT / "tests" / "programs" / "stale.rlg"
    plan = compile(path, text=path.read_text().replace("{ staleness = staleness }", "{ staleness = 3, every = 2 }"))
    assert not [*BuildSchedule.verify(plan)]
    leaves = {x.node for s in plan.schedule for x in s.instructions if x.op == "RELEASE"}
    ((edge, _),) = skipping_edges(plan).items()
    assert edge[1] not in leaves
    run = Instruction("RUN", edge[1])
    streams = tuple(
        replace(
            s,
            instructions=tuple(
                y for x in s.instructions for y in ([x, Instruction("RELEASE", edge[1])] if x == run else [x])
            ),
        )
        for s in plan.schedule
    )
    wrong = [*BuildSchedule.verify(replace(plan, schedule=streams))]
    assert wrong and all("which the next iteration may generate with" in w for w in wrong)


def test_a_round_is_repeated_by_all_that_have_a_part_in_it() -> None:
    for pool, steps in enumerate(json.loads(written("dapo"))["schedule"]):
        again = [x for x in steps["instructions"] if x["op"] == "AGAIN"]
        for x in again:
            left = [s for s in stream("dapo", pool) if s[0] != "AGAIN"]
            assert (
                "leave a node that has not run" in (why := refused(changed("dapo", pool, *left)))
                or "wait for each other" in why
            )
            elsewhere = [
                (*s[:2], "source" if s[2] != "source" else x["node"]) if s[0] == "AGAIN" else s
                for s in stream("dapo", pool)
            ]
            assert refused(changed("dapo", pool, *elsewhere))


def test_pools_that_have_a_device_in_common() -> None:
    plan = compile(ROOT / "tests" / "programs" / "apart_two.rlg")
    one, other = plan.pools
    for pool in (replace(other, first=one.first), replace(other, first=one.first + one.devices - 1)):
        placed = tuple(replace(p, first=pool.first) if p.pool == pool.name else p for p in plan.placements)
        found = [*PlacementPass.verify(replace(plan, pools=(one, pool), placements=placed))]
        assert found == [f"its pools `{one.name}` and `{other.name}` have a device in common"]
    beyond = replace(plan, pools=(one, replace(other, first=plan.cluster.devices)))
    assert [*PlacementPass.verify(beyond)] == [f"the cluster does not have the devices of its pool `{other.name}`"]


def test_only_a_generation_numbers_its_replicas_as_neighbours() -> None:
    plan = compile(ROOT / "tests" / "programs" / "grpo_page.rlg")
    assert plan.placement("actor.generate").layout.inner == 2 and not [*PlacementPass.verify(plan)]
    for node, inner, faults in (("actor.update", 2, 1), ("actor.generate", 4, 0), ("actor.generate", 3, 1)):
        one = plan.placement(node)
        changed = replace(one, layout=replace(one.layout, inner=inner))
        placed = tuple(changed if p is one else p for p in plan.placements)
        found = [*PlacementPass.verify(replace(plan, placements=placed))]
        assert found == [f"the replicas of `{node}` cannot be next to each other in groups of {inner}"] * faults


def test_a_controller_hears_of_what_its_node_reads() -> None:
    plan = compile(ROOT / "tests" / "programs" / "small.rlg")
    first, *others = plan.docks.controllers
    for wrong, told in (
        (replace(first, columns=(*first.columns, "reward")), "does not have exactly the columns of its node"),
        (replace(first, groups=first.groups + 1), "does not have as many groups as the node"),
        (replace(first, host=plan.cluster.nodes), "is not on a host of the cluster"),
    ):
        (why,) = InsertDock.verify(replace(plan, docks=replace(plan.docks, controllers=(wrong, *others))))
        assert told in why


def test_each_tensor_is_in_one_bucket() -> None:
    plan = compile(ROOT / "tests" / "programs" / "small.rlg")
    (edge,) = plan.reshards
    for buckets in (edge.buckets[1:], (*edge.buckets, edge.buckets[0][:1])):
        (why,) = InsertResharding.verify(replace(plan, reshards=(replace(edge, buckets=buckets),)))
        assert why == f"the buckets of `{edge.name}` do not have every tensor once"


# Instructions


class Told(Walker):
    """Keeps the name of each method that a walk calls."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        names = object.__getattribute__(self, "names") if name in METHODS else []
        return (lambda *_: names.append(name)) if name in METHODS else object.__getattribute__(self, name)

    run = reshard = release = swap_in = wait = again = lambda *_: None  # type: ignore[assignment]


METHODS = {op.lower() for op in get_args(Op)}


def test_each_instruction_is_a_method_of_whoever_walks() -> None:
    assert Walker.__abstractmethods__ == METHODS
    for op in get_args(Op):
        told = Told()
        begin = [Instruction("RESHARD", "u", "g"), Instruction("RUN", "g")]
        assert Walk({"pool": [*begin, Instruction(op, "g", "g")]}).finish(told)
        assert told.names == ["reshard", "run", op.lower()]


def test_pools_meet_where_they_reshard_and_wait_for_each_other_elsewhere() -> None:
    send = Instruction("RESHARD", "u", "g")
    other = Instruction("RESHARD", "u", "h")
    assert Walk({"a": [send, other], "b": [send], "c": [other]}).finish(Told())
    assert not Walk({"a": [send, other], "b": [other, send]}).finish(Told())
    assert not Walk({"a": [send, send], "b": [send]}).finish(Told())


def test_an_instruction_says_what_it_is() -> None:
    assert str(Instruction("RUN", "a.b")) == "RUN a.b"
    assert str(Instruction("RESHARD", "a.update", "a.generate")) == "RESHARD a.update => a.generate"
