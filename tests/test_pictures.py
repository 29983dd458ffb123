"""A plan as a picture: Graphviz text against golden texts, and what must hold whatever a program's names are."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from msrl_graph import compile
from msrl_graph.cli import compile_main
from msrl_graph.compile import read, translate
from msrl_graph.emit.dot import dot_text
from msrl_graph.emit.picture import Arrow, Box, Picture, graph_picture, placed_picture, plan_picture
from msrl_graph.graph import Graph
from msrl_graph.plan import Plan

Golden = Callable[[str, str], None]
Capture = pytest.CaptureFixture[str]
PROGRAMS = Path(__file__).parent / "programs"
ARITHMETIC = Path(__file__).parent.parent / "examples" / "arithmetic" / "grpo.rlg"
NASTY = ['a"b', "a\\", 'a\\"', "<b>&amp;", "{|}", "node", "\\n", "ü 名前", "a\nb", "]]>", "</svg><script>alert(1)</script>", "\x00\x07"]
# What Graphviz's grammar allows of what is written here: quoted strings, names, and the signs between them.
TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|->|[A-Za-z_][A-Za-z_0-9]*|[0-9]+|[{}\[\]=,])', re.DOTALL)


def four() -> Plan:
    return compile(PROGRAMS / "apart_four.rlg")


def every(plan: Plan) -> list[Picture]:
    return [graph_picture(plan.graph), placed_picture(plan), plan_picture(plan)]


def nasty() -> Picture:
    """Whatever a name may hold, everywhere a name stands."""
    boxes = [Box(n, "function" if i % 2 else "dock", NASTY[i // 2], (n,)) for i, n in enumerate(NASTY)]
    arrows = [Arrow(a, b, "reshard" if i % 2 else "sample", (a, b)) for i, (a, b) in enumerate(pairwise(NASTY))]
    groups = tuple((g, g) for g in dict.fromkeys(b.group for b in boxes))
    return Picture(NASTY[0], groups, tuple(boxes), tuple(arrows))


def tokens(text: str) -> list[str]:
    found, at = [], 0
    while text[at:].strip():
        match = TOKEN.match(text, at)
        assert match, f"no token of Graphviz's: {text[at : at + 40]!r}"
        found.append(match[1])
        at = match.end()
    return found


def assert_digraph(text: str) -> None:
    """Of the grammar: digraph ID { statements }, brackets that match, edges between names, attributes NAME = value."""
    found = tokens(text)
    assert found[0] == "digraph" and found[1][0] == '"' and found[2] == "{"
    open_ = []
    for before, token, after in zip(found, found[1:], [*found[2:], ""], strict=False):
        if token in "{[":
            open_.append(token)
        elif token in "}]":
            assert open_.pop() == {"}": "{", "]": "["}[token]
        elif token == "->":
            assert before[0] == '"' and after[0] == '"'
        elif token == "=":
            assert before.isidentifier() and (after[0] == '"' or after.isidentifier() or after.isdecimal())
    assert not open_


@pytest.mark.parametrize("stage", ["graph", "placed", "plan"])
@pytest.mark.parametrize("name", ["apart_four", "grpo_page"])
def test_dot(golden: Golden, capsys: Capture, name: str, stage: str) -> None:
    assert compile_main([str(PROGRAMS / f"{name}.rlg"), "--emit", stage, "--format", "dot"]) == 0
    golden(f"{name}.{stage}.dot", capsys.readouterr().out)


@pytest.mark.parametrize("program", [*sorted(PROGRAMS.glob("[gs]*.rlg")), ARITHMETIC], ids=lambda p: p.stem)
def test_what_is_written_follows_graphviz_grammar(program: Path) -> None:
    for picture in every(compile(program)):
        assert_digraph(dot_text(picture))


def test_no_name_ends_another() -> None:
    text = dot_text(nasty())
    assert_digraph(text)
    names = {t for t in tokens(text) if t[0] == '"'}
    assert len({b for b in names if "alert" in b}) >= 2
    assert text.count("\n") == len(text.splitlines()), "a name broke a line"


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not here")
def test_graphviz_reads_it() -> None:
    for picture in (*every(four()), nasty()):
        done = subprocess.run(["dot", "-Tplain"], input=dot_text(picture), capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        assert len(re.findall("^node ", done.stdout, re.MULTILINE)) == len(picture.boxes)
        assert len(re.findall("^edge ", done.stdout, re.MULTILINE)) == len(picture.arrows)


def test_every_state_and_edge_is_drawn() -> None:
    plan = four()
    for picture in (graph_picture(plan.graph), plan_picture(plan)):
        assert [b.name for b in picture.boxes] == [n.name for n in plan.graph.nodes]
        assert sorted((a.src, a.dst, a.kind) for a in picture.arrows) == sorted((e.src, e.dst, e.kind) for e in plan.graph.edges)
    placed = placed_picture(plan)
    assert {b.kind for b in placed.boxes} >= {"dock", "send"}
    order = {b.name: i for i, b in enumerate(placed.boxes)}
    for picture in every(plan):
        order = {b.name: i for i, b in enumerate(picture.boxes)}
        assert all(order[a.src] < order[a.dst] for a in picture.arrows if a.kind == "sample")
        assert {b.group for b in picture.boxes if b.group} == {g for g, _ in picture.groups}


def test_an_algorithm_without_a_deploy_has_a_picture_of_its_graph(capsys: Capture) -> None:
    assert compile_main(["grpo", "--format", "dot"]) == 0
    assert capsys.readouterr().out.startswith('digraph "grpo" {')
    assert compile_main(["grpo", "--emit", "plan", "--format", "dot"]) == 1
    assert "error[no-deploy]" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["dot"])
@pytest.mark.parametrize("arguments", [["--emit", "ast"], ["--emit", "ray"], ["--simulate", "2"], ["--why"]])
def test_what_is_no_graph_has_no_picture(arguments: list[str], form: str) -> None:
    with pytest.raises(SystemExit) as ended:
        compile_main(["grpo", "--format", form, *arguments])
    assert ended.value.code == 2


def programs_graph() -> Graph:
    graph = translate(read("grpo"), until="graph").graph
    assert graph is not None
    return graph


def test_text_of_a_program_stands_in_the_picture_as_it_is() -> None:
    graph = programs_graph()
    worker = replace(graph.workers[0], model='<b>"x"\\')
    picture = graph_picture(replace(graph, workers=(worker, *graph.workers[1:])))
    assert 'policy, model <b>\\"x\\"\\\\' in dot_text(picture)
