"""Text to tree: positions, what may be a name, and that no text whatever brings the parser down."""

from __future__ import annotations

import random
import time
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from language import PROGRAMS, diagnose
from sample import examples

from msrl_graph import algorithms
from msrl_graph.diagnostics import Fault, Span, codes
from msrl_graph.dsl import ast, tree_text
from msrl_graph.dsl.parse import _parser, parse, parse_expr

TEXTS = {p.name: p.read_text(encoding="utf-8") for p in [*PROGRAMS, *sorted(algorithms.FOLDER.glob("*.rlg"))]}


def parts(part: object) -> list[object]:
    """All the parts of a tree that have a span."""
    if isinstance(part, tuple):
        return [p for item in part for p in parts(item)]
    if not hasattr(part, "span"):
        return []
    return [part, *(p for f in fields(part) for p in parts(getattr(part, f.name)))]  # type: ignore[arg-type]


def underlined(text: str, span: Span) -> str:
    lines = text.split("\n")[span.line - 1 : span.end_line]
    lines[-1] = lines[-1][: span.end_column - 1]
    lines[0] = lines[0][span.column - 1 :]
    return "\n".join(lines)


@pytest.mark.parametrize("name", TEXTS)
def test_each_span_is_the_text_of_its_part(name: str) -> None:
    text = TEXTS[name]
    tree = parse(text, name)
    starts = {
        ast.ParamDecl: "param ",
        ast.NodeDecl: "node ",
        ast.WorkerDecl: "worker ",
        ast.AlgorithmDecl: "algorithm ",
        ast.DeployDecl: "deploy ",
        ast.SetDecl: "set ",
    }
    for part in parts(tree):
        span: Span = part.span  # type: ignore[attr-defined]
        under = underlined(text, span)
        assert span.file == name
        assert under == under.strip() and under
        if isinstance(part, ast.Name | ast.Ref | ast.NameExpr):
            assert under == part.text
        elif isinstance(part, ast.Literal_) and part.kind == "int":
            assert int(under) == part.value
        elif isinstance(part, ast.Literal_) and part.kind == "string":
            assert under == f'"{part.value}"'
        elif isinstance(part, ast.Literal_) and part.kind == "quantity":
            assert under.endswith(part.unit) and under.startswith(str(part.value))
        elif isinstance(part, ast.Call):
            assert under.startswith(part.name.text) and under.endswith(")")
        elif isinstance(part, ast.NodeDecl):
            assert underlined(text, part.head).rstrip().endswith((")", part.verb.text, *(w.text for w in part.writes)))
        if type(part) in starts:
            assert under.startswith(starts[type(part)])


def test_positions_are_exact() -> None:
    text = 'cluster pod {\r\n\tdevice = "cpu"  # a comment\r\n\tnetwork = 300 MB/s\r\n}\r\n'
    (cluster,) = parse(text, "pod.rlg").items
    assert isinstance(cluster, ast.ClusterDecl)
    assert cluster.span == Span("pod.rlg", 1, 1, 4, 2)
    device, network = cluster.attrs
    assert device.key.span == Span("pod.rlg", 2, 2, 2, 8)
    assert network.value == ast.Literal_("quantity", 300, Span("pod.rlg", 3, 12, 3, 20), "MB/s")


def test_words_of_statements_are_names_where_no_statement_can_begin() -> None:
    names = [
        "reward",
        "host",
        "group",
        "samples",
        "epochs",
        "on",
        "per",
        "as",
        "data",
        "model",
        "run",
        "layout",
        "frozen",
        "extends",
        "nodes",
    ]
    for name in names:
        node = f"node {name}.{name}({name}) -> {name} {{ {name} = {name} }}"
        parse(f"algorithm {name} {{ param {name} = 1\n worker {name} : policy\n {node} }}", "n")
        parse(f"cluster {name} {{ {name} = 1 }}", "n")
        parse(f"algorithm a {{ columns {{ {name} : f32 }} }}", "n")


def test_a_byte_order_mark_is_no_part_of_the_program() -> None:
    text = 'cluster pod {\n  device = "cpu"\n}\n'
    assert parse("\ufeff" + text, "pod.rlg") == parse(text, "pod.rlg")
    with pytest.raises(Fault) as caught:
        parse("\ufeffclustre pod { }", "pod.rlg")
    assert caught.value.diagnostics[0].span == Span("pod.rlg", 1, 1, 1, 8)


@pytest.mark.parametrize("between", [", ", ",\n", "\n", "  # a comment\n", "\n, ", " ,"])
def test_attributes_end_with_a_comma_or_a_new_line(between: str) -> None:
    (cluster,) = parse(f"cluster pod {{ nodes = 1{between}devices_per_node = 2 }}", "n").items
    assert isinstance(cluster, ast.ClusterDecl) and [a.key.text for a in cluster.attrs] == ["nodes", "devices_per_node"]


def test_a_range_is_two_whole_numbers() -> None:
    (deploy,) = parse("deploy a on b { place c, d.e together on nodes 0..47 devices 3 }", "r").items
    assert isinstance(deploy, ast.DeployDecl)
    (place,) = deploy.body
    assert isinstance(place, ast.PlaceDecl) and place.together and place.nodes and place.devices
    assert (place.nodes.first, place.nodes.last, place.devices.first, place.devices.last) == (0, 47, 3, 3)


def test_operators_bind_as_in_arithmetic() -> None:
    def shape(e: ast.Expr) -> object:
        if isinstance(e, ast.Binary):
            return (shape(e.left), e.op, shape(e.right))
        if isinstance(e, ast.Neg):
            return ("-", shape(e.operand))
        return e.value if isinstance(e, ast.Literal_) else e.text  # type: ignore[union-attr]

    assert shape(parse_expr("a - b - 2 * -c", "e")) == (("a", "-", "b"), "-", (2, "*", ("-", "c")))
    assert shape(parse_expr("(a + 1) // 2 <= 3", "e")) == ((("a", "+", 1), "//", 2), "<=", 3)


def test_strings_have_four_escapes() -> None:
    value = parse_expr(r'"a\"b\\c\n\t"', "e")
    assert isinstance(value, ast.Literal_) and value.value == 'a"b\\c\n\t'


def test_the_tree_can_be_shown() -> None:
    shown = tree_text.show(parse('import grpo\ncluster one { device = "cpu", nodes = 2 }', "f.rlg"))
    assert shown == (
        "File path=f.rlg 1:1-2:42\n"
        "  items: Import target=grpo is_file=False 1:1-1:12\n"
        "  items: Cluster 2:1-2:42\n"
        "    name: Name one 2:9-2:12\n"
        "    attrs: Attr 2:15-2:29\n"
        "      key: Name device 2:15-2:21\n"
        '      value: string "cpu" 2:24-2:29\n'
        "    attrs: Attr 2:31-2:40\n"
        "      key: Name nodes 2:31-2:36\n"
        "      value: int 2 2:39-2:40\n"
    )


def survives(text: str) -> None:
    """Told or not, nothing but diagnostics with places in the text comes out of the front half."""
    lines = text.split("\n")
    for d in diagnose(text):
        assert d.code in codes.known()
        for span in (d.span, *(s for s, _ in d.related)):
            if span.file == "program.rlg":
                assert 1 <= span.line <= len(lines) and 1 <= span.column <= len(lines[span.line - 1]) + 1, d
                assert (span.end_line, span.end_column) >= (span.line, span.column), d


FUZZ = examples(150, suppress_health_check=[HealthCheck.too_slow])
PIECES = sorted(
    {w for t in TEXTS.values() for w in t.split()}
    | {"{", "}", "(", ")", "->", "=>", "=", ",", "..", "1e999", "-1", "128 GiB", '"', "\x00", "#"}
)


@FUZZ
@given(st.text())
def test_any_text_survives(text: str) -> None:
    survives(text)


@FUZZ
@given(st.lists(st.sampled_from(PIECES), max_size=60).map(" ".join))
def test_any_words_survive(text: str) -> None:
    survives(text)


@FUZZ
@given(st.sampled_from(sorted(TEXTS)), st.floats(0, 1))
def test_a_truncated_program_survives(name: str, share: float) -> None:
    survives(TEXTS[name][: int(len(TEXTS[name]) * share)])


@FUZZ
@given(st.sampled_from(sorted(TEXTS)), st.randoms(use_true_random=False), st.integers(1, 6))
def test_a_mutated_program_survives(name: str, rng: random.Random, changes: int) -> None:
    """Words replaced, dropped, doubled and swapped: most of these get past the parser."""
    words = TEXTS[name].split(" ")
    for _ in range(changes):
        i = rng.randrange(len(words))
        j = rng.randrange(len(words))
        change = rng.randrange(4)
        if change == 0:
            words[i] = rng.choice(PIECES)
        elif change == 1 and len(words) > 1:
            del words[i]
        elif change == 2:
            words.insert(i, words[j])
        else:
            words[i], words[j] = words[j], words[i]
    survives(" ".join(words))


@FUZZ
@given(st.sampled_from(["grpo.rlg", "grpo_page.rlg", "ppo.rlg"]), st.randoms(use_true_random=False))
def test_shuffled_lines_survive(name: str, rng: random.Random) -> None:
    lines = TEXTS[name].split("\n")
    rng.shuffle(lines)
    survives("\n".join(lines))


@FUZZ
@given(st.sampled_from(["grpo.rlg", "grpo_page.rlg", "ppo.rlg"]), st.randoms(use_true_random=False), st.integers(1, 4))
def test_swapped_names_survive(name: str, rng: random.Random, changes: int) -> None:
    """Programs that parse and mean something else."""
    text = TEXTS[name]
    tokens = [
        p.span for p in parts(parse(text, name)) if isinstance(p, ast.Name | ast.Ref | ast.NameExpr | ast.Literal_)
    ]
    lines = text.split("\n")
    for a, b in ((rng.choice(tokens), rng.choice(tokens)) for _ in range(changes)):
        line = lines[a.line - 1]
        lines[a.line - 1] = line[: a.column - 1] + underlined(text, b) + line[a.end_column - 1 :]
    survives("\n".join(lines))


@pytest.mark.parametrize(
    "inner",
    [
        "(" * 5000 + "1" + ")" * 5000,
        "-" * 5000 + "1",
        "1" + " + 1" * 5000,
        "[" * 3000,
        "f(" * 3000,
        "9" * 6000,
        "1e999",
    ],
)
def test_what_is_too_deep_or_too_large_is_told(inner: str) -> None:
    with pytest.raises(Fault) as caught:
        parse(f"algorithm a {{ param x = {inner} }}", "deep.rlg")
    assert [d.code for d in caught.value.diagnostics] == ["syntax"]


def test_a_long_program_takes_no_long_time() -> None:
    text = "algorithm long {\n" + "".join(f"  param p{i} = {i}\n" for i in range(5000)) + "}\n"
    began = time.perf_counter()
    parse(text, str(Path("long.rlg")))
    assert time.perf_counter() - began < 5


@pytest.mark.parametrize("content", [None, b"", b"torn", b"\x80\x04N.", "unwritable"])
def test_the_parser_needs_no_cache(
    content: bytes | str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "msrl_graph"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _parser.cache_clear()
    if content == "unwritable":
        folder.write_text("a file where the folder belongs")
    else:
        parse("import grpo", "first")
        (cached,) = folder.iterdir()
        if isinstance(content, bytes):
            cached.write_bytes(content)
    for _ in range(2):
        _parser.cache_clear()
        assert parse(TEXTS["grpo.rlg"], "grpo.rlg").items
    if content != "unwritable":
        assert [p.name for p in folder.iterdir()] == [cached.name] and cached.stat().st_size > 1000
    _parser.cache_clear()
