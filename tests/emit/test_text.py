"""What is shown of a plan, against golden texts: read them as an engineer would."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from dataclasses import replace

import page
import pytest
from folders import TESTS

from msrl_graph import compile
from msrl_graph.compiler.pipeline import translate
from msrl_graph.compiler.sources import read_source
from msrl_graph.diagnostics.quantities import duration, size
from msrl_graph.emit import json as emit_json
from msrl_graph.emit.placed_graph import build_placed_graph
from msrl_graph.emit.ray import ray_script
from msrl_graph.emit.text import graph_text, placed_text, plan_text
from msrl_graph.ir.plan import Plan, from_json

Golden = Callable[[str, str], None]
TEXT = (TESTS / "programs" / "grpo_page.rlg").read_text(encoding="utf-8")
PLAN = page.plan(page.start(evaluations=(page.EVALUATION,)))


def of_page() -> Plan:
    return compile("grpo_page.rlg", text=TEXT)


def test_the_fixture_is_the_pages_program() -> None:
    # The same plan from the text and from the hand-built graph, but for spans, options that no pass reads, and the
    # order of nodes.
    ours = page.plan(page.start())
    theirs = of_page()
    assert {p.node: (str(p.layout), p.layout.inner, p.engine.options, p.reason) for p in ours.placements} == {
        p.node: (str(p.layout), p.layout.inner, p.engine.options, p.reason) for p in theirs.placements
    }
    assert set(ours.docks.controllers) == set(theirs.docks.controllers)
    assert [[(i.op, i.node) for i in s.instructions] for s in ours.schedule] == [
        [(i.op, i.node) for i in s.instructions] for s in theirs.schedule
    ]
    assert (ours.reshards, ours.memory) == (theirs.reshards, theirs.memory)
    assert {(t.src, t.dst, t.bytes) for t in ours.traffic} == {(t.src, t.dst, t.bytes) for t in theirs.traffic}


def test_plan_text(golden: Golden) -> None:
    golden("grpo_page.plan.txt", plan_text(of_page()))


def test_placed_text(golden: Golden) -> None:
    golden("grpo_page.placed.txt", placed_text(of_page()))


def test_graph_text(golden: Golden) -> None:
    golden("grpo_page.graph.txt", graph_text(of_page().graph))


def test_ray_script(golden: Golden) -> None:
    script = ray_script(of_page())
    golden("grpo_page.ray.txt", script[: script.index('PLAN = r"""')])


@pytest.mark.parametrize("width", [80, 100, 160])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    for text in (plan_text(PLAN, width), placed_text(PLAN, width), graph_text(PLAN.graph, width)):
        assert max(map(len, text.split("\n"))) <= width
        assert "…" not in text
        assert "\x1b" not in text


def test_colour_is_only_there_when_asked_for() -> None:
    assert "\x1b[" in plan_text(PLAN, colour=True)


def test_a_plan_that_passes_have_not_finished_can_be_shown() -> None:
    start = page.start()
    assert "Plan: 0 states" in plan_text(start)
    for step in page.PASSES:
        start = step.apply(start)
        assert plan_text(start)


def test_json_of_every_stage() -> None:
    plan = json.loads(PLAN.to_json())
    keys = {
        "format_version",
        "graph",
        "cluster",
        "placements",
        "docks",
        "reshards",
        "schedule",
        "traffic",
        "memory",
        "estimate",
        "notes",
    }
    assert keys <= plan.keys()
    assert plan["reshards"][0]["released_bytes_per_device"] == PLAN.reshards[0].released_bytes_per_device
    assert plan["reshards"][0]["peak_bytes_per_device"] == PLAN.reshards[0].peak_bytes_per_device
    assert json.loads(emit_json.graph_json(PLAN.graph))["graph"]["name"] == "grpo"
    tree = json.loads(emit_json.tree_json(translate(read_source("a.rlg", TEXT), until="ast").tree))
    assert [i["is"] for i in tree["ast"]["items"]] == ["Algorithm", "Cluster", "Deploy"]
    shown = json.loads(emit_json.placed_json(PLAN))
    assert {n["kind"] for n in shown["nodes"]} == {"state", "dock", "allgather_swap"}


def test_every_edge_of_the_placed_graph_goes_through_what_the_passes_put_in() -> None:
    vertices, arcs = build_placed_graph(PLAN)
    names = {v.name for v in vertices}
    states = {v.name for v in vertices if v.kind == "state"}
    assert all(a.src in names and a.dst in names and not {a.src, a.dst} <= states for a in arcs)
    assert len(names) == len(vertices) == 7 + 6 + 1


def test_the_script_holds_the_plan_and_is_python() -> None:
    plan = replace(
        PLAN,
        notes=(
            *PLAN.notes,
            replace(PLAN.notes[0], text='quotes """ and \\ backslashes \\" and ""'),
        ),
    )
    script = ray_script(plan)
    ast.parse(script)
    names: dict[str, object] = {"__name__": "script"}
    exec(script, names)
    text = names["PLAN"]
    assert isinstance(text, str)
    assert from_json(text) == plan
    assert "sys.exit(run_plan(PLAN, arguments.out))" in script


def test_numbers() -> None:
    assert [size(n) for n in (0, 999, 1500, 8192124928, 999_600_000, 3e15)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "8.19 GB",
        "1,000 MB",
        "3,000 TB",
    ]
    assert [duration(s) for s in (0, 1e-7, 2e-5, 0.0209, 1.5, 12345)] == [
        "0",
        "< 1 us",
        "20 us",
        "20.9 ms",
        "1.5 s",
        "12,345 s",
    ]
