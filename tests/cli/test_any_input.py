"""No input whatever gives a traceback: what comes out is a plan, a graph, or diagnostics with places in a text that is
there.

The mutations are in broken.py. `MSRL_EXAMPLES=100` tries 100 times as many.
"""

from __future__ import annotations

import copy
import io
import itertools
import json
import os
import random
import re
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from broken import MUTATIONS, PLANNED, ROOT, TEXTS, compiled, mutated
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from language import TESTS
from rich.cells import cell_len
from sample import examples

import msrl_graph
from msrl_graph import cli
from msrl_graph.cli import fmt
from msrl_graph.diagnostics import Diagnostic, Fault, Span, render
from msrl_graph.dsl import ast
from msrl_graph.dsl.parse import parse

Capture = pytest.CaptureFixture[str]
MORE = int(os.environ.get("MSRL_EXAMPLES", "1"))
PAGE = TEXTS["tests/programs/grpo_page.rlg"]
ANY = st.sampled_from(sorted(TEXTS))
RNG = st.integers(0, 2**32).map(random.Random)


def few(most: int) -> settings:
    """The same examples each time, so that a change that fails here has brought the failure."""
    return examples(most * MORE, derandomize=MORE == 1, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True)
def _our_own_mistakes_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSRL_DEBUG", "1")


def folder(name: str) -> Path:
    return (ROOT / name).parent


# Any program


@few(150)
@example("examples/arithmetic/one_rank.rlg", random.Random(327))  # reads what nobody writes, and no term uses
@given(st.sampled_from(sorted(PLANNED)), RNG)
def test_a_broken_program_has_a_plan_or_diagnostics(name: str, rng: random.Random) -> None:
    compiled(mutated(name, rng), folder=folder(name), **PLANNED[name])


@few(20)
@given(ANY, RNG, st.sampled_from(sorted(MUTATIONS)))
def test_each_mutation_of_each_program_is_survived(name: str, rng: random.Random, kind: str) -> None:
    compiled(mutated(name, rng, [kind]), folder=folder(name))


@few(60)
@given(ANY, RNG)
def test_a_file_cut_at_any_byte(name: str, rng: random.Random) -> None:
    data = TEXTS[name].encode()
    try:
        text = data[: rng.randrange(len(data) + 1)].decode()
    except UnicodeDecodeError:
        return
    compiled(text, folder=folder(name))


@few(60)
@given(ANY, RNG)
def test_a_layout_loses_nothing_of_a_program_and_leaves_a_broken_one(name: str, rng: random.Random) -> None:
    text = mutated(name, rng)
    path = SCRATCH[0] / "p.rlg"
    path.write_bytes(text.encode())
    try:
        tree = parse(text.replace("\r\n", "\n").replace("\r", "\n"), "p.rlg")
    except Fault:
        assert fmt.main([str(path)]) == 1 and path.read_bytes() == text.encode()
        return
    assert fmt.main([str(path)]) == 0
    assert ast.same_tree(parse(path.read_text(encoding="utf-8"), "p.rlg"), tree)


SCRATCH: list[Path] = []


@pytest.fixture(autouse=True, scope="module")
def _scratch(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A folder that hypothesis' examples write into."""
    SCRATCH[:] = [tmp_path_factory.mktemp("any")]


# Programs of odd shapes

MANY = 10_000  # more than any stack holds; lines of which each has a mistake are fewer, since each is shown
BLOCK = "algorithm a {\n%s\n}\n"
DEEP = {
    "parentheses": BLOCK % f"param x = {'(' * MANY}1{')' * MANY}",
    "open parentheses": BLOCK % f"param x = {'(' * MANY}",
    "lists": BLOCK % f"param x = {'[' * MANY}{']' * MANY}",
    "calls": BLOCK % f"param x = {'f(' * MANY}{')' * MANY}",
    "minus": BLOCK % f"param x = {'-' * MANY}1",
    "a sum": BLOCK % f"param x = 1{' + 1' * MANY}",
    "a power": BLOCK % f"param x = 1{' * 10000000' * 40}",
    "algorithms": "algorithm a {" * MANY,
    "braces": "{" * MANY,
    "closing braces": "}" * MANY,
    "a chain of edges": BLOCK % f"a{' -> a' * 1000}",
    "a list of states": BLOCK % f"a{', a' * 1000} -> b",
    "params": BLOCK % "\n".join(f"param p{i} = p{i + 1}" for i in range(MANY // 4)),
    "squares": BLOCK % "\n".join(["param p0 = 2", *(f"param p{i + 1} = p{i} * p{i}" for i in range(60))]),
    "algorithms that extend": "".join(f"algorithm a{i} extends a{i + 1} {{ }}\n" for i in range(200)),
    "a cycle of them": "algorithm a extends b { }\nalgorithm b extends c { }\nalgorithm c extends b { }\n",
    "imports": "import grpo\n" * 1000,
    "lines": PAGE + "\n" * MANY + "x",
    "comments": "# nothing\n" * MANY,
    "nothing": "",
    "blanks": " \n\t\f\n",
    "a long name": PAGE.replace("actor", "a" * 5000),
    "a long path": PAGE.replace("deepscaler.jsonl", "x" * 5000 + ".jsonl"),
    "a long model": PAGE.replace("qwen2.5-32b", "x/" * 5000),
    "a long import": f'import "{"x" * 5000}"\n',
    "a long file of functions": PAGE.replace("math_verify()", f'"{"x" * 5000}.py:f"'),
    "a path with NUL": PAGE.replace("deepscaler.jsonl", "\0.jsonl"),
    "a model with NUL": PAGE.replace("qwen2.5-32b", "./\0"),
    "an import with NUL": 'import "\0.rlg"\n',
    "functions with NUL": PAGE.replace("math_verify()", '"\0.py:f"'),
    "a long last word": PAGE + "x" * 100_000,
    "a long number": PAGE.replace("= 256", f"= {'9' * 100_000}"),
    "one line": re.sub(r"#.*", "", PAGE).replace("\n", " "),
    "no-break blanks": PAGE.replace("param", "param\xa0", 1),
    "wide blanks": PAGE.replace(" = ", "\u3000=\u3000", 1),
    "emoji": PAGE.replace("actor", "👩‍👩‍👧", 1),
    "wide comments": PAGE.replace("# G, prompts", "# 漢字 👩‍👩‍👧 e\u0301"),
    "a lone accent": "\u0301",
    "too many devices": PAGE.replace("nodes            = 2", "nodes = 100000000"),
    "too many rows": PAGE.replace("= 256", "= 100000000"),
    "stages": PAGE.replace("{ tp = 8, dp = 2 }", f"{{ pp = 2, stages = [1{', 1' * MANY}] }}"),
}


@pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
def test_odd_shapes(text: str, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "odd.rlg"
    path.write_bytes(text.encode())
    began = time.perf_counter()
    _, told = compiled(text, folder=tmp_path)
    assert cli.compile_main([str(path), "--check"]) == int(any(d.severity == "error" for d in told))
    assert fmt.main([str(path), "--check"]) in (0, 1)
    assert time.perf_counter() - began < 30
    assert len(capsys.readouterr().err) < 1_000_000


# Bytes


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ("# ü".encode()[:-1], "is not UTF-8 text"),
        (b"\xff\xfe" + PAGE.encode("utf-16-le"), "is not UTF-8 text"),
        (PAGE.encode("utf-16-le"), "character '\\x00' is not valid here"),
        (b"\x80", "is not UTF-8 text"),
        (b"\0" * 100, "character '\\x00' is not valid here"),
        (b"", "the file has no program"),
        (b"\xef\xbb\xbf", "the file has no program"),
        (b"# nothing\r# more\r\n#", "the file has no program"),
    ],
    ids=[
        "cut inside of a character",
        "UTF-16",
        "UTF-16 without a mark",
        "a byte",
        "NULs",
        "empty",
        "a mark",
        "comments",
    ],
)
def test_bytes_that_are_no_program(
    data: bytes, told: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p.rlg"
    path.write_bytes(data)
    (tmp_path / "q.rlg").write_text('import "p.rlg"\n')
    for main, arguments in ((cli.compile_main, ["--check"]), (fmt.main, ["--check"]), (cli.run_main, ["--dry-run"])):
        assert main([str(path), *arguments]) == 1  # type: ignore[operator]
        assert told in capsys.readouterr().err
        if main is not cli.run_main:
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
            assert main(["-", *arguments]) == 1  # type: ignore[operator]
            assert told in capsys.readouterr().err
    assert cli.compile_main([str(tmp_path / "q.rlg"), "--check"]) == 1
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("end", ["\r\n", "\r"])
def test_line_ends_change_no_place(end: str, tmp_path: Path) -> None:
    wrong = PAGE.replace("ref_logp, advantage) {", "ref_logb, advantage) {")
    (tmp_path / "p.rlg").write_bytes(wrong.replace("\n", end).encode())
    told = []
    for options in (
        {"source": "p.rlg", "text": wrong},
        {"source": "p.rlg", "text": wrong.replace("\n", end)},
        {"source": tmp_path / "p.rlg"},
    ):
        with pytest.raises(Fault) as caught:
            msrl_graph.check(**options)  # type: ignore[arg-type]
        told.append([(d.code, d.span.line, d.span.column, d.span.end_column) for d in caught.value.diagnostics])
    assert told[0] == told[1] == told[2] == [("unknown-column", 30, 49, 57)]


def test_text_that_no_file_can_hold() -> None:
    for call in (msrl_graph.compile, msrl_graph.check):
        with pytest.raises(Fault, match="is not UTF-8 text"):
            call("p.rlg", text=PAGE.replace("deepscaler", "\ud800"))


# Carets

JOINED = pytest.mark.skipif(cell_len("👩‍👩‍👧") > 2, reason="an older rich takes what is joined for its parts")


@pytest.mark.parametrize(
    ("line", "word", "under"),
    [
        ("param x = 1 wrong", "wrong", "            ^^^^^"),
        ("\tparam\tx = 1 wrong", "wrong", "\t     \t      ^^^^^"),
        ('"漢字" wrong', "wrong", "       ^^^^^"),
        ('"漢字" wrong', '"漢字"', "^^^^^^"),
        ('"e\u0301" wrong', "wrong", "    ^^^^^"),
        pytest.param('"👩‍👩‍👧" wrong', "wrong", "     ^^^^^", marks=JOINED),
        ("\u3000wrong", "wrong", "  ^^^^^"),
        ('a\t"b\tc"', '"b\tc"', " \t^^\t^^"),
        ("\u0301", "\u0301", "^"),
    ],
)
def test_carets_stand_under_what_they_mean(line: str, word: str, under: str) -> None:
    column = line.index(word) + 1
    span = Span("p.rlg", 2, column, 2, column + len(word))
    shown = render(Diagnostic("syntax", "wrong", span), {"p.rlg": f"\n{line}\n"}).split("\n")
    assert shown[-2:] == [f"2 | {line}", f"  | {under}"]


def test_characters_that_move_a_cursor_are_shown_by_signs() -> None:
    line = "a\x1b[31m\x00\x7f\r\x85\u202e\u2028b wrong"
    span = Span("p.rlg", 1, len(line) - 4, 1, len(line) + 1)
    shown = render(Diagnostic("syntax", "wrong", span), {"p.rlg": line}).split("\n")
    assert shown[-2:] == ["1 | a␛[31m␀␡␍\ufffd\ufffd\ufffdb wrong", "  |               ^^^^^"]


@pytest.mark.parametrize("at", [0, 300, 5000, 9990])
def test_of_a_long_line_what_is_near_is_shown(at: int) -> None:
    line = "x" * at + "wrong" + "y" * (10_000 - at)
    span = Span("p.rlg", 1, at + 1, 1, at + 6)
    source, under = render(Diagnostic("syntax", "wrong", span), {"p.rlg": line}).split("\n")[-2:]
    assert source[under.index("^") : under.rindex("^") + 1] == "wrong" and under.count("^") == 5
    assert len(source) < 260
    # What goes beyond it is underlined to its end.
    wide = render(Diagnostic("syntax", "wrong", Span("p.rlg", 1, 1, 1, 9000)), {"p.rlg": line}).split("\n")
    assert len(wide[-1]) < 260


# Plans that were edited


def _paths(part: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    for key, value in part.items() if isinstance(part, dict) else enumerate(part[:6]) if isinstance(part, list) else ():
        yield from _paths(value, (*at, key))


def _at(part: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        part = part[key]
    return part


def edited(plan: Any, rng: random.Random) -> Any:
    """A plan with a part of it deleted, replaced by another, or changed."""
    plan = copy.deepcopy(plan)
    depth = rng.choice((2, 3, 4, 5, 9))
    places = [p for p in _paths(plan) if 0 < len(p) <= depth]
    path = rng.choice(places)
    owner = _at(plan, path[:-1])
    key = path[-1]
    match owner[key], rng.randrange(3):
        case _, 0:
            del owner[key]
        case _, 1:
            owner[key] = copy.deepcopy(_at(plan, rng.choice(places)))
        case str(), _:
            owner[key] = rng.choice([w for w in (_at(plan, p) for p in places) if isinstance(w, str)])
        case bool() | None, _:
            owner[key] = rng.choice((True, False, 0, "x", []))
        case int() | float(), _:
            owner[key] = rng.choice((0, -1, 1, 3, 2**53, 2**63, 1e308, -0.5, 10**30))
        case list() as old, _:
            owner[key] = rng.choice((old[::-1], old[:-1], old * 2, []))
        case _:
            owner[key] = rng.choice(({}, [], None, "x"))
    return plan


PLANS = (
    "tests/programs/grpo_page.rlg",
    "tests/programs/apart_two.rlg",
    "tests/programs/stale.rlg",
    "examples/arithmetic/two_ranks.rlg",
)


@cache
def plan_of(name: str) -> Any:
    return json.loads(msrl_graph.compile(ROOT / name).to_json())


def compared(name: str, text: str) -> int:
    """The exit status of a comparison with a plan of this text, the same however it is shown."""
    path = SCRATCH[0] / "plan.json"
    path.write_text(text)
    one, two = (
        cli.compile_main([str(ROOT / name), "--diff", str(path), "--format", form]) for form in ("text", "json")
    )
    assert one == two and one in (0, 1)
    return one


@few(15)
@given(st.sampled_from(PLANS), RNG)
def test_a_plan_that_was_edited_is_compared_and_checked_or_refused(name: str, rng: random.Random) -> None:
    refused = compared(name, json.dumps(edited(plan_of(name), rng)))
    path = SCRATCH[0] / "plan.json"
    assert cli.run_main([str(path), "--dry-run", "--out", str(SCRATCH[0] / "out")]) in ((1,) if refused else (0, 1, 3))


def _swapped(plan: Any, *path: Any, to: Any) -> Any:
    plan = copy.deepcopy(plan)
    _at(plan, path[:-1])[path[-1]] = to
    return plan


@pytest.mark.parametrize(
    ("path", "to", "told"),
    [
        (("graph", "nodes", 1, "per"), "x", "it has no column `x`"),
        (("graph", "nodes", 2, "reads", 0), "x", "it has no column `x`"),
        (("graph", "nodes", 2, "writes"), [], "it has no writer of `old_logp`"),
        (("graph", "nodes", 1, "worker"), "x", "it has no worker `x`"),
        (("graph", "nodes", 1, "verb"), "source", "its source is not the first node, or not the only source"),
        (("graph", "nodes", 1, "writes", 0), "advantage", "it has the writer of the column `advantage` more than once"),
        (("graph", "columns", 0, "level"), 7, "it has no rows of the level of `prompt`"),
        (("graph", "edges", 1, "dst"), "x", "it has no node `x`"),
        (
            ("graph", "edges", 1, "dst"),
            "actor.generate",
            "`actor.generate` comes before `actor.generate`, which it reads from",
        ),
        (("deploy", "models"), {}, "it has no model `policy`"),
        (("placements", 1, "pool"), "x", "it has no pool `x`"),
        (("pools", 0, "nodes", 0), "x", "it has no node `x`"),
    ],
)
def test_a_name_that_a_plan_lacks_is_told(
    path: tuple[Any, ...], to: Any, told: str, tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(_swapped(plan_of(PLANS[0]), *path, to=to)))
    assert cli.run_main([str(file), "--dry-run"]) == 1
    assert f"error[bad-plan]: {file} is not a plan of this version: {told}\n" in capsys.readouterr().err


def test_a_plan_that_took_no_time_is_compared(capsys: Capture) -> None:
    assert (
        compared(PLANS[0], json.dumps(_swapped(plan_of(PLANS[0]), "estimate", "iteration_seconds", "value", to=0.0)))
        == 0
    )
    assert re.search(r"An iteration takes [^(]{1,30} more\.", " ".join(capsys.readouterr().out.split()))


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"{", b"[]", b"null", b"{}", b"[" * 100_000, b'{"format_version": 1}', b'{"a": ' * 50_000]
)
def test_bytes_that_are_no_plan(data: bytes, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(data)
    assert cli.run_main([str(path), "--dry-run"]) == 1
    assert cli.compile_main([str(ROOT / PLANS[0]), "--diff", str(path)]) == 1
    assert capsys.readouterr().err.count("error[bad-plan]") == 2


@pytest.mark.parametrize("name", ["\0", "x" * 5000, ".", "no/such"])
def test_a_plan_that_cannot_be_read(name: str, capsys: Capture) -> None:
    assert cli.compile_main([str(ROOT / PLANS[0]), "--diff", name]) == 1
    assert "error[missing-file]" in capsys.readouterr().err


# All mistakes at once, and none that follows from another

MISTAKES = {
    "a param": ("param kl_coef      = 0.001", "param kl_coef = 1 / 0", "division-by-zero"),
    "a temperature": ("temperature = 1.0", "temperature = -1", "bad-value"),
    "an attribute": ("samples = group", "samplse = group", "unknown-attribute"),
    "a function": ("math_verify()", "math_verfy()", "unknown-function"),
    "an optimizer's option": ("lr = 1e-6", "lr = 1 GB", "bad-unit"),
    "a device": ('"ascend-910c"', '"ascend-910x"', "unknown-device"),
    "a model": ('"qwen2.5-32b"', '"qwen2.5-33b"', "unknown-model"),
    "a layout's key": ("{ tp = 8, dp = 2 }", "{ tp = 8, dq = 2 }", "unknown-attribute"),
    "a count": ("iterations = 1000", "iterations = 0", "bad-value"),
}


def _mistaken(*names: str) -> list[str]:
    text = PAGE
    for name in names:
        old, new, _ = MISTAKES[name]
        assert text.count(old) == 1, name
        text = text.replace(old, new)
    _, told = compiled(text, folder=folder("tests/programs/grpo_page.rlg"))
    return sorted(d.code for d in told if d.severity == "error")


@pytest.mark.parametrize(("one", "two"), list(itertools.combinations(MISTAKES, 2)))
def test_two_mistakes_are_told_and_no_third(one: str, two: str) -> None:
    assert _mistaken(one) == [MISTAKES[one][2]]
    assert _mistaken(one, two) == sorted([MISTAKES[one][2], MISTAKES[two][2]])


def test_more_stages_than_can_be_counted_are_refused() -> None:
    for sizes in ("pp = 100000000", "pp = 10000, vpp = 100000"):
        _, told = compiled(PAGE.replace("{ tp = 8, dp = 2 }", f"{{ {sizes} }}"), folder=TESTS)
        assert [d.code for d in told if d.severity == "error"] == ["bad-value"]
