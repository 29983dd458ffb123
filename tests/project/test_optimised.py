"""`python -O` leaves out every `assert`: what checks a program, a pass or an engine is an error of its own."""

import ast
import subprocess
import sys

import pytest
from folders import ROOT

PACKAGE = ROOT / "msrl_graph"
PROGRAM = ROOT / "examples" / "arithmetic" / "grpo.rlg"
NARROWING = ("isinstance", "callable")


def narrows(test: ast.expr) -> bool:
    """Whether an assertion says only of which type something is."""
    if isinstance(test, ast.BoolOp):
        return all(map(narrows, test.values))
    if isinstance(test, ast.UnaryOp):
        return narrows(test.operand)
    if isinstance(test, ast.Compare):
        return all(isinstance(c, ast.Constant) and c.value is None for c in test.comparators)
    return isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id in NARROWING


def test_assertions_of_the_package_only_narrow_types():
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assert) and (node.msg is not None or not narrows(node.test))
    ]
    assert not found, "\n".join(["these check something, and vanish under `python -O`:", *found])


def optimised(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-O", "-c", f"assert False\n{code}"], capture_output=True, text=True, cwd=ROOT
    )


BREAK = """
from msrl_graph import compile
from msrl_graph.compiler.pipeline import PASSES
type(PASSES[{name!r}]).verify = staticmethod(lambda plan: iter(["rows are lost"]))
compile({program!r})
"""


@pytest.mark.parametrize("name", ["dock", "schedule", "memory"])
def test_a_pass_that_breaks_its_promise_ends_an_optimised_compile(name):
    ran = optimised(BREAK.format(name=name, program=str(PROGRAM)))
    assert ran.returncode == 1
    assert f"BrokenPass: the pass `{name}` broke its promise: rows are lost" in ran.stderr


def test_a_layout_that_changes_the_program_ends_an_optimised_format():
    code = """
from msrl_graph.dsl import format
format._join_lines = lambda lines: "cluster other { }"
format.format("cluster here { nodes = 1 }", "p.rlg")
"""
    ran = optimised(code)
    assert ran.returncode == 1
    assert "RuntimeError: the layout changed the program" in ran.stderr


def test_two_pools_that_wait_for_each_other_end_an_optimised_simulation():
    code = f"""
from dataclasses import replace
from msrl_graph import compile, simulate
plan = compile({str(ROOT / "examples" / "countdown" / "countdown.rlg")!r})
turned = tuple(replace(s, instructions=s.instructions[::-1]) for s in plan.schedule)
simulate(replace(plan, schedule=turned), iterations=2)
"""
    ran = optimised(code)
    assert ran.returncode == 1
    assert "RuntimeError: two pools wait for each other" in ran.stderr
