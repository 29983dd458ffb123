"""The language reference is complete, its examples compile, and the committed pages are what the sources give."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from language import TESTS, told

from msrl_graph import algorithms, reference
from msrl_graph.cli import compile_main
from msrl_graph.dsl.attributes import read_as
from msrl_graph.dsl.expressions import Names
from msrl_graph.dsl.parse import parse_set
from msrl_graph.ir.kinds import FLOPS, RATE, TIME, QuantityKind
from msrl_graph.ir.statements import STATEMENTS
from msrl_graph.reference import facts, metric_page, option_page, syntax

WRITTEN = TESTS.parent / "docs" / "reference" / "language"
BLOCK = re.compile(r"^```(\w+)(?: ([^\n]+))?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
BLOCKS = [block for page in reference.PAGES for block in BLOCK.findall(reference.source(page))]
EXAMPLES = [(of, body) for kind, of, body in BLOCKS if kind == "rlg"]
DEPLOY = """\
import grpo
cluster pod {{ device = "ascend-910c", nodes = 2, devices_per_node = 8 }}
deploy grpo on pod {{
  model policy = "qwen2.5-7b"
{}}}
"""


def test_the_pages_are_what_the_sources_give() -> None:
    written = {path.name: path.read_text(encoding="utf-8") for path in WRITTEN.iterdir()}
    assert written == reference.documents(), "run `make docs`, and remove pages that have no source"


def test_every_page_is_part_of_it() -> None:
    pages = {p.stem for p in reference.FOLDER.glob("*.md")} - {metric_page.SOURCE.stem, option_page.SOURCE.stem}
    assert pages == {*reference.PAGES}


def test_the_page_of_metrics_is_what_the_registry_gives() -> None:
    page = (TESTS.parent / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    assert page == metric_page.document(), "run `make docs`"


def test_a_page_begins_with_what_is_on_it() -> None:
    for page in reference.PAGES:
        title, sentence, rest = reference.source(page).split("\n\n", 2)
        assert title.startswith("# ") and sentence.endswith(".") and "## " in rest, page


def test_each_name_is_in_the_index_once() -> None:
    rows = re.findall(r"^\| `(.+?)` \| \[", reference.documents()["names.md"], re.MULTILINE)
    assert sorted(rows) == sorted(reference.names())


@pytest.mark.parametrize(
    ("kind", "known"),
    [
        ("attributes", [*STATEMENTS]),
        ("list", list(facts.LISTS)),
        ("syntax", list(syntax.known())),
    ],
)
def test_everything_stands_in_it_once(kind: str, known: list[str]) -> None:
    found = Counter(name for k, of, body in BLOCKS if k == kind for name in (body.split() if k == "syntax" else [of]))
    assert found == Counter(known)


def test_an_attribute_stands_with_all_that_is_declared_of_it() -> None:
    (row,) = [r for r in facts.attributes("update") if r.name == "mini_batch"]
    meaning = (
        "The number of rows per optimizer step. The seed decides for each epoch which rows belong to which step; the "
        "order in which rows arrive does not. If `mini_batch` does not divide the number of rows, the last step of an "
        "epoch has the remaining rows. So 32 rows with `mini_batch = 12` make steps of 12, 12 and 8 rows. The dp of "
        "the layout must divide `mini_batch`."
    )
    assert row == facts.AttributeRow("mini_batch", "a whole number of 1 or more", "all rows", meaning)


def test_the_defaults_of_the_package_stand_in_the_calls() -> None:
    text = "\n".join(reference.documents().values())
    for (kind, name), (signature, _) in algorithms.library().items():
        head = re.search(rf"\*\*`{name}\((.*?)\)`\*\*", text)
        assert head, (kind, name)
        assert [part.split(" = ")[0] for part in re.split(r", (?![^\[]*\])", head[1]) if part] == [
            o.name for o in signature.options
        ]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e[1].split("\n")[0])
def test_examples_compile(example: tuple[str, str]) -> None:
    of, body = example
    program = {
        "": body,
        "algorithm": f"import grpo\nalgorithm mine extends grpo {{\n{body}}}\n",
        "deploy": DEPLOY.format(body),
    }[of]
    if "algorithm" not in program and "import" not in program:
        program += "import grpo\n"
    assert [d for d in told(program, TESTS / "diagnostics") if d.severity == "error"] == []


def test_an_entry_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for name in sorted(reference.names()):
        assert compile_main(["--explain", name]) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"# {name}\n\n") and out.count("\n") > 2
    assert compile_main(["--explain", "every"]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("An ")] == [
        "An attribute of `worker`: a whole number of 1 or more, by default 1.",
        "An attribute of `update`: a whole number of 1 or more, by default 1.",
        "An attribute of `resharding edge`: a whole number of 1 or more, by default 1.",
        "An attribute of `evaluate`: a whole number of 1 or more, by default only before and after.",
    ]


def test_a_statement_has_an_entry(capsys: pytest.CaptureFixture[str]) -> None:
    statements = {
        *syntax.known()["astmt"].split(" | "),
        *syntax.known()["dstmt"].split(" | "),
        "import",
        "generate",
        "dock",
        "reshard",
        "run",
    }
    assert statements <= reference.names()
    assert compile_main(["--explain", "apart"]) == 0
    out = capsys.readouterr().out
    assert '\napart = "apart" refs\n' in out and "```rlg\nplace actor.generate on nodes 0\n" in out


def test_a_name_that_is_near(capsys: pytest.CaptureFixture[str]) -> None:
    assert compile_main(["--explain", "stalenes"]) == 2
    said = "msrl-compile: no code, statement, attribute or function is called `stalenes`; did you mean `staleness`?\n"
    assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("extends", "replaces the existing one"),
        ("drop", "removes it"),
        ("filter", "`keep`"),
        ("->", "rows pass"),
        ("=>", "weights"),
    ],
)
def test_a_name_that_people_look_up(name: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert compile_main(["--explain", name]) == 0
    assert words in capsys.readouterr().out


def test_a_link_is_its_words(capsys: pytest.CaptureFixture[str]) -> None:
    linked = [n for n in sorted(reference.names()) if "](" in reference.entry(n)]
    assert linked
    for name in linked:
        assert compile_main(["--explain", name]) == 0
        assert "](" not in capsys.readouterr().out, name


@given(st.floats(1e-5, 1e16), st.sampled_from([RATE, FLOPS, TIME]))
def test_a_quantity_reads_as_it_was(value: float, kind: QuantityKind) -> None:
    text = facts.quantity(value, kind.unit)
    assert read_as(kind, "x", parse_set("x", text)[1], Names({})).value == pytest.approx(value, rel=1e-5)
