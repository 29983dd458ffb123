"""A plan as a picture: Graphviz text against golden texts, and what must hold whatever a program's names are."""

from __future__ import annotations

import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from folders import ROOT, TESTS
from hypothesis import given
from hypothesis import strategies as st

from msrl_graph import compile
from msrl_graph.cli import compile_main
from msrl_graph.compiler.pipeline import translate
from msrl_graph.compiler.sources import read_source
from msrl_graph.emit.dot import dot_text
from msrl_graph.emit.html import fragment, graph_html, placed_html, plan_html
from msrl_graph.emit.layered_layout import draw
from msrl_graph.emit.picture import Arrow, Box, Picture, graph_picture, placed_picture, plan_picture
from msrl_graph.emit.svg import shorten, svg
from msrl_graph.ir.graph import Graph
from msrl_graph.ir.plan import Plan, PlanNote
from msrl_graph.simulation.timeline import timeline

Golden = Callable[[str, str], None]
Capture = pytest.CaptureFixture[str]
PROGRAMS = TESTS / "programs"
ARITHMETIC = ROOT / "examples" / "arithmetic" / "grpo.rlg"
SOME = [*(PROGRAMS / f"{n}.rlg" for n in ("grpo_page", "apart_two", "stale")), ARITHMETIC]
NASTY = [
    'a"b',
    "a\\",
    'a\\"',
    "<b>&amp;",
    "{|}",
    "node",
    "\\n",
    "ü 名前",
    "a\nb",
    "]]>",
    "</svg><script>alert(1)</script>",
    "\x00\x07",
]
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
    found = []
    at = 0
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


@pytest.mark.parametrize("program", SOME, ids=lambda p: p.stem)
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
        assert sorted((a.src, a.dst, a.kind) for a in picture.arrows) == sorted(
            (e.src, e.dst, e.kind) for e in plan.graph.edges
        )
    placed = placed_picture(plan)
    assert {b.kind for b in placed.boxes} >= {"dock", "send"}
    order = {b.name: i for i, b in enumerate(placed.boxes)}
    for picture in every(plan):
        order = {b.name: i for i, b in enumerate(picture.boxes)}
        assert all(order[a.src] < order[a.dst] for a in picture.arrows if a.kind == "sample")
        assert {b.group for b in picture.boxes if b.group} == {g for g, _ in picture.groups}


def test_a_state_leads_from_who_sets_it_to_who_reads_it() -> None:
    text = (PROGRAMS / "curriculum.rlg").read_text(encoding="utf-8")
    deploy = 'deploy curriculum on one { model policy = "tiny"\n data source = "train.jsonl" }'
    plan = translate(
        read_source("curriculum.rlg", f'{text}cluster one {{ device = "cpu", devices_per_node = 2 }}\n{deploy}')
    ).plan
    assert plan is not None
    for picture in every(plan):
        assert [(a.src, a.dst, a.lines) for a in picture.arrows if a.kind == "kept"] == [
            ("host.track", "source", ("success",))
        ]
        assert [b.name for b in picture.boxes if "sets success" in b.lines] == ["host.track"]
        assert '"host.track" -> "source" [label="success", style=dotted, constraint=false]' in dot_text(picture)
        assert 'class="kept"' in svg(picture)


def test_an_algorithm_without_a_deploy_has_a_picture_of_its_graph(capsys: Capture) -> None:
    assert compile_main(["grpo", "--format", "dot"]) == 0
    assert capsys.readouterr().out.startswith('digraph "grpo" {')
    assert compile_main(["grpo", "--emit", "plan", "--format", "dot"]) == 1
    assert "error[no-deploy]" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["dot", "html"])
@pytest.mark.parametrize("arguments", [["--emit", "ast"], ["--emit", "ray"], ["--simulate", "2"], ["--why"]])
def test_what_is_no_graph_has_no_picture(arguments: list[str], form: str) -> None:
    with pytest.raises(SystemExit) as ended:
        compile_main(["grpo", "--format", form, *arguments])
    assert ended.value.code == 2


def programs_graph() -> Graph:
    graph = translate(read_source("grpo"), until="graph").graph
    assert graph is not None
    return graph


def test_text_of_a_program_stands_in_the_picture_as_it_is() -> None:
    graph = programs_graph()
    worker = replace(graph.workers[0], model='<b>"x"\\')
    picture = graph_picture(replace(graph, workers=(worker, *graph.workers[1:])))
    assert 'policy, model <b>\\"x\\"\\\\' in dot_text(picture)


# Pages.

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Reader(HTMLParser):
    """Reads a page: every element is closed where it belongs; keeps what is asked for from elsewhere, and the text that
    is seen."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.foreign: list[str] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.foreign += [
            f"{k}={v}" for k, v in attrs if k in ("src", "href", "srcset", "action", "data") or k.startswith("on")
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def whole(program: Path) -> str:
    plan = compile(program)
    return plan_html(plan, timeline(plan))


@pytest.mark.parametrize("program", SOME, ids=lambda p: p.stem)
def test_a_page_is_well_formed_and_asks_for_nothing(program: Path) -> None:
    plan = compile(program)
    for page in (plan_html(plan, timeline(plan)), placed_html(plan), graph_html(plan.graph)):
        read = Reader(page)
        assert not read.foreign and not {"script", "link", "iframe", "img", "object"} & set(read.tags)
        assert not re.search(r"https?:|url\(|@import|//", page.split("<svg")[0] + page.split("</svg>")[1])
        assert "default-src 'none'" in page
        drawn = ET.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
        assert {t.text for t in drawn.iter("title")} >= {n.name for n in plan.graph.nodes if n.name == "source"}


def test_a_page_holds_what_the_text_says(capsys: Capture) -> None:
    from msrl_graph.emit.text import plan_text

    plan = four()
    seen = Reader(plan_html(plan, timeline(plan))).text
    for line in plan_text(plan, width=4000).split("\n"):
        for cell in re.split(r"\s{2,}", line.strip()):
            assert " ".join(cell.split()) in seen or set(cell) <= {"─"}, cell
    assert re.search(r"An iteration [\d,]+ s", seen) and "functions" in seen


def test_the_same_program_gives_the_same_page() -> None:
    assert whole(ARITHMETIC) == whole(ARITHMETIC)


def test_names_are_text_in_a_page() -> None:
    plan = four()
    nasties = [n for n in NASTY if "<" in n or "&" in n or '"' in n]
    named = replace(
        plan,
        notes=tuple(PlanNote(n, n) for n in nasties),
        pools=tuple(replace(p, name=n) for p, n in zip(plan.pools, nasties, strict=False)),
        graph=replace(plan.graph, name=nasties[-1]),
    )
    renamed = {p.name: n for p, n in zip(plan.pools, nasties, strict=False)}
    named = replace(named, placements=tuple(replace(p, pool=renamed.get(p.pool, p.pool)) for p in plan.placements))
    for page in (plan_html(named), placed_html(named), graph_html(named.graph), fragment(nasty())):
        read = Reader(page)
        assert "script" not in read.tags
        assert "<script>" not in page
    seen = Reader(plan_html(named)).text
    assert all(" ".join(n.split()) in seen for n in nasties)
    titles = {t.text for t in ET.fromstring(svg(nasty())).iter("title")}
    assert {"<b>&amp;", 'a\\"', "</svg><script>alert(1)</script>"} <= {
        title.split(" ")[0] if title else "" for title in titles
    }


@pytest.mark.slow
def test_ten_thousand_devices_take_no_longer_page_than_sixteen() -> None:
    text = (PROGRAMS / "grpo_page.rlg").read_text(encoding="utf-8")
    assert "nodes            = 2" in text and "{ tp = 8, dp = 2 }" in text
    many = text.replace("nodes            = 2", "nodes            = 1250").replace(
        "{ tp = 8, dp = 2 }", "{ tp = 8, dp = 1250 }"
    )
    many = many.replace("{ tp = 4, dp = 4 }", "{ tp = 4, dp = 2500 }").replace(
        "prompts      = 256", "prompts      = 10000"
    )
    small = compile("small.rlg", text=text)
    large = compile("large.rlg", text=many)
    assert large.cluster.devices == 10_000
    pages = [plan_html(p, timeline(p)) for p in (small, large)]
    assert "hosts 0..1249, 1250 equal ones" in pages[1]
    assert len(pages[1]) < 1.1 * len(pages[0])


def test_the_timeline_is_the_estimate_where_nothing_differs() -> None:
    # With room in the KV cache for all sequences.
    plan = compile(PROGRAMS / "grpo_page.rlg", sets={"prompts": "32", "response_len": "2048"})
    shown = timeline(plan)
    assert plan.estimate is not None
    assert shown.seconds == pytest.approx(plan.estimate.iteration_seconds.value)
    phases = {p.name: p.seconds.value for p in plan.estimate.phases}
    worked = sum((s.end - s.begin) * s.share for s in shown.stretches if s.node == "actor.update")
    exchange = phases.get("gradient exchange of actor.update", 0.0)
    assert worked == pytest.approx(phases["actor.update"] + exchange)


def test_an_iteration_that_others_overlap_shows_both() -> None:
    shown = timeline(compile(PROGRAMS / "stale.rlg"))
    first = {s.node: s.begin for s in reversed(shown.stretches)}
    assert {"actor.generate", "actor.update"} <= first.keys() and "overlap" in shown.about
    assert all(0 <= s.begin < s.end <= shown.seconds and 0 < s.share <= 1 for s in shown.stretches)


def test_notebooks_show_pictures() -> None:
    plan = four()
    for shown in (plan, plan.graph):
        page = shown._repr_html_()
        assert type(page) is str  # whatever it is put together with stays as it is
        read = Reader(page)
        assert "svg" in read.tags and not read.foreign and "actor.update" in read.text


@st.composite
def graphs(draws: st.DrawFn) -> tuple[dict[str, tuple[float, float]], list[tuple[str, str, tuple[float, float]]]]:
    count = draws(st.integers(1, 9))
    extent = st.tuples(st.floats(10, 300), st.floats(10, 80))
    boxes = {f"b{i}": draws(extent) for i in range(count)}
    label = st.one_of(st.just((0.0, 0.0)), extent)
    ends = st.tuples(st.sampled_from(sorted(boxes)), st.sampled_from(sorted(boxes)), label).filter(
        lambda e: e[0] != e[1]
    )
    return boxes, draws(st.lists(ends, max_size=14)) if count > 1 else []


@given(graphs())
def test_nothing_that_is_drawn_overlaps(
    given: tuple[dict[str, tuple[float, float]], list[tuple[str, str, tuple[float, float]]]],
) -> None:
    boxes, arrows = given
    found = draw(boxes, arrows)
    places = [(*found.places[n], *e) for n, e in boxes.items()]
    places += [(*r.label, *e) for r, (_, _, e) in zip(found.routes, arrows, strict=True) if r.label is not None]
    for i, (x, y, w, h) in enumerate(places):
        assert (
            x - w / 2 >= -0.01
            and x + w / 2 <= found.width + 0.01
            and y - h / 2 + 0.01 >= 0
            and y + h / 2 <= found.height + 0.01
        )
        for u, v, a, b in places[:i]:
            assert abs(x - u) >= (w + a) / 2 - 0.01 or abs(y - v) >= (h + b) / 2 - 0.01
    assert sum(r.label is not None for r in found.routes) == sum(e[0] > 0 for *_, e in arrows)
    for route, (src, dst, _) in zip(found.routes, arrows, strict=True):
        for (x, y), name in ((route.points[0], src), (route.points[-1], dst)):
            (u, v), (w, h) = found.places[name], boxes[name]
            assert abs(x - u) <= w / 2 and abs(abs(y - v) - h / 2) < 0.01


def test_a_name_that_is_cut_keeps_both_ends() -> None:
    assert shorten("actor.generate") == "actor.generate"
    cut = shorten("actor_with_a_name_that_nobody_would_ever_write.generate", 20)
    assert cut.startswith("actor_") and cut.endswith(".generate") and len(cut) == 20
