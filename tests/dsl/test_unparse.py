"""Tree to text and back: the same tree, apart from spans."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given
from language import PROGRAMS, TESTS
from sample import examples
from trees import FILES

from msrl_graph import algorithms
from msrl_graph.dsl import ast
from msrl_graph.dsl.ast import same_tree
from msrl_graph.dsl.parse import parse
from msrl_graph.dsl.unparse import write

REAL = [*PROGRAMS, *sorted(algorithms.FOLDER.glob("*.rlg")), *sorted((TESTS.parent / "examples").rglob("*.rlg"))]


@pytest.mark.parametrize("path", REAL, ids=lambda p: p.stem)
def test_a_program_is_itself_again(path: Any) -> None:
    tree = parse(path.read_text(encoding="utf-8"), "p.rlg")
    text = write(tree)
    assert same_tree(parse(text, "p.rlg"), tree)
    assert write(parse(text, "p.rlg")) == text


def test_operators_take_parentheses_where_they_must() -> None:
    for text in (
        "a - (b - c)",
        "a - b - c",
        "-(a + b) * c",
        "-a // --b",
        "(a < b) == c",
        "[(a + b) % 2, f(x = -1, a > b)]",
        "a / (b / c)",
    ):
        program = f"algorithm p {{\n  param x = {text}\n}}\n"
        assert write(parse(program, "p.rlg")) == program


def test_numbers_and_strings_stay_what_they_are() -> None:
    values = [
        "1e-6",
        "1e+22",
        "0.1",
        "5.0",
        "18446",
        "1e+22 GB",
        "1.5 TFLOP/s",
        "300 MB/s",
        '"a \\"b\\" \\\\ \\n \\t é"',
        "true",
    ]
    program = "cluster p {\n" + "".join(f"  k{i} = {v}\n" for i, v in enumerate(values)) + "}\n"
    assert write(parse(program, "p.rlg")) == program


@examples(300, suppress_health_check=[HealthCheck.too_slow])
@given(FILES)
def test_any_tree_is_itself_again(tree: ast.File) -> None:
    assert same_tree(parse(write(tree), "p.rlg"), tree)
