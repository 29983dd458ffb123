"""No input whatever gives a traceback: what comes out is a plan, a graph, or diagnostics with places in a text that is there.

The mutations are in broken.py. `MSRL_EXAMPLES=100` tries 100 times as many.
"""

from __future__ import annotations

import io
import os
import random
import re
import time
from pathlib import Path

import pytest
from broken import MUTATIONS, PLANNED, ROOT, TEXTS, compiled, mutated
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import msrl_graph
from msrl_graph import cli, fmt
from msrl_graph.diagnostics import Diagnostic, Fault, Span, render
from msrl_graph.dsl import ast
from msrl_graph.dsl.parse import parse

Capture = pytest.CaptureFixture[str]
MORE = int(os.environ.get("MSRL_EXAMPLES", "1"))
PAGE = TEXTS["tests/programs/grpo_page.rlg"]
ANY = st.sampled_from(sorted(TEXTS))
RNG = st.integers(0, 2**32).map(random.Random)


def few(examples: int) -> settings:
    """The same examples each time, so that a change that fails here has brought the failure."""
    return settings(max_examples=examples * MORE, derandomize=MORE == 1, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True)
def _our_own_mistakes_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSRL_DEBUG", "1")


def folder(name: str) -> Path:
    return (ROOT / name).parent


# Any program


@few(150)
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
    assert ast.same(parse(path.read_text(encoding="utf-8"), "p.rlg"), tree)


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
        (PAGE.encode("utf-16-le"), "character '\\x00' is no sign of the language"),
        (b"\x80", "is not UTF-8 text"),
        (b"\0" * 100, "character '\\x00' is no sign of the language"),
        (b"", "the file holds no program"),
        (b"\xef\xbb\xbf", "the file holds no program"),
        (b"# nothing\r# more\r\n#", "the file holds no program"),
    ],
    ids=["cut inside of a character", "UTF-16", "UTF-16 without a mark", "a byte", "NULs", "empty", "a mark", "comments"],
)
def test_bytes_that_are_no_program(data: bytes, told: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    ("line", "word", "under"),
    [
        ("param x = 1 wrong", "wrong", "            ^^^^^"),
        ("\tparam\tx = 1 wrong", "wrong", "\t     \t      ^^^^^"),
        ('"漢字" wrong', "wrong", "       ^^^^^"),
        ('"漢字" wrong', '"漢字"', "^^^^^^"),
        ('"e\u0301" wrong', "wrong", "    ^^^^^"),
        ('"👩‍👩‍👧" wrong', "wrong", "     ^^^^^"),
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
