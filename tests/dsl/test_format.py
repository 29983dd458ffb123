"""The one layout of programs: what it looks like, and that nothing is lost on the way to it."""

from __future__ import annotations

import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from folders import ROOT, TESTS
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from language import PROGRAMS
from lark import Token
from sample import examples
from trees import FILES

from msrl_graph import algorithms
from msrl_graph.diagnostics import Fault
from msrl_graph.dsl import ast
from msrl_graph.dsl.format import WIDTH, format
from msrl_graph.dsl.parse import parse, parse_tokens
from msrl_graph.dsl.unparse import write

OWN = [*sorted(algorithms.FOLDER.glob("*.rlg")), *sorted((ROOT / "examples").rglob("*.rlg"))]
# Every statement of the language, also those that cannot be compiled yet, in a layout that only a parser likes.
MESSY = TESTS / "messy.rlg"
TEXTS = {
    str(p.relative_to(ROOT)): p.read_text(encoding="utf-8") for p in [*OWN, *PROGRAMS, MESSY] if p.is_relative_to(ROOT)
}


def comments(text: str) -> list[str]:
    found = re.findall(r'"(?:\\.|[^"\\\n])*"|#[^\n]*', text)
    return [f.rstrip() for f in found if f.startswith("#")]


def leaves(tree: Any) -> Iterator[Token]:
    for child in tree.children:
        if isinstance(child, Token):
            yield child
        elif child is not None:
            yield from leaves(child)


def begun(tree: Any) -> set[int]:
    """Where attributes begin that no comma parts from those before them: these need a new line."""
    found = set[int]()
    parts = [c for c in tree.children if c is not None]
    for before, part in zip([None, *parts], parts, strict=False):
        if isinstance(part, Token):
            continue
        found |= begun(part)
        if part.data == "attr" and not isinstance(before, Token):
            found.add(next(leaves(part)).start_pos or 0)
    return found


def mutated(text: str, gap: Callable[[str, bool, bool], str]) -> str:
    """The program with other white space between its tokens: `gap` gives it from the old one, whether two words meet,
    and whether a new line is needed."""
    tree = parse_tokens(text, "mutated")
    lines = begun(tree)
    out = list[str]()
    end = 0
    for token in leaves(tree):
        assert token.start_pos is not None and token.end_pos is not None
        words = end > 0 and all(re.match(r"\w", c) for c in (text[end - 1], token[0]))
        # On one line with a number, a name may be its unit.
        unit = bool(out) and out[-1][0].isdigit() and words
        out += [gap(text[end : token.start_pos], words, unit or token.start_pos in lines), token]
        end = token.end_pos
    return "".join([*out, gap(text[end:], False, False)])


def holds(text: str) -> str:
    """What a layout promises; gives it."""
    new = format(text, "p.rlg")
    assert ast.same_tree(parse(text, "p.rlg"), parse(new, "p.rlg"))
    assert comments(new) == comments(text)
    assert format(new, "p.rlg") == new
    assert new.endswith("\n") and not new.startswith("\n") and not new.endswith("\n\n")
    assert "\n\n\n" not in new and "\r\n" not in new and not new.startswith("\ufeff")
    assert not any(line != line.rstrip() for line in new.split("\n"))
    return new


def test_a_program_with_everything(golden: Callable[[str, str], None]) -> None:
    golden("messy.rlg", holds(MESSY.read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", TEXTS)
def test_each_program_has_a_layout(name: str) -> None:
    new = holds(TEXTS[name])
    assert all(len(re.sub(r"\s*#.*", "", line)) <= WIDTH for line in new.split("\n"))


@pytest.mark.parametrize("path", OWN, ids=lambda p: p.name)
def test_our_own_programs_have_their_layout(path: Path) -> None:
    assert format(path.read_text(encoding="utf-8"), path.name) == path.read_text(encoding="utf-8")


def test_programs_in_the_readme_have_their_layout() -> None:
    programs = re.findall(
        r"^```rlg\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    assert programs
    for program in programs:
        assert format(program, "README.md") == program


PROPERTY = examples(60, suppress_health_check=[HealthCheck.too_slow])
# A program takes more choices than hypothesis likes to draw one by one.
RNG = st.integers(0, 2**32).map(random.Random)


NOTES = ["#", "# a note", "#\ttabs\tand # another", '# "quotes', "# { brace, comma,", "# naïve → ✓  \t", "# a\\"]


def strewn(text: str, rng: random.Random, share: float) -> str:
    """The program with white space, line ends and comments between any two tokens."""

    def gap(old: str, apart: bool, line: bool) -> str:
        new = "".join(
            rng.choice(["", " ", "  ", "\t", "\n", "\r\n", "\n\n", "\n\n\n", "\f"]) for _ in range(rng.randrange(3))
        )
        # The program's own comments stay.
        for comment in [*comments(old), *([rng.choice(NOTES)] if rng.random() < share else [])]:
            new += comment + rng.choice(["\n", "\r\n", "\n\n  ", "\n \t"])
        if line and "\n" not in new:
            new += "\n"
        return new or " " * apart

    return mutated(text, gap)


@PROPERTY
@given(st.sampled_from(sorted(TEXTS)), RNG, st.floats(0, 0.5))
def test_white_space_and_comments_anywhere_lose_nothing(name: str, rng: random.Random, share: float) -> None:
    holds(strewn(TEXTS[name], rng, share))


@PROPERTY
@given(FILES, RNG, st.sampled_from([0, 0.1]))
def test_programs_of_any_shape_lose_nothing(tree: ast.File, rng: random.Random, share: float) -> None:
    assert ast.same_tree(parse(holds(strewn(write(tree), rng, share)), "p.rlg"), tree)


@PROPERTY
@given(st.sampled_from(sorted(TEXTS)), RNG)
def test_white_space_alone_changes_no_layout(name: str, rng: random.Random) -> None:
    """But for blank lines, and for what comments stand on a line of their own."""

    def gap(old: str, apart: bool, line: bool) -> str:
        if "#" in old:
            return re.sub(r"(?<=\n)[ \t]*", lambda _: " " * rng.randrange(4), old)
        if old.count("\n") > 1:
            return "\n" * rng.randrange(2, 4) + " " * rng.randrange(3)
        return rng.choice(["\n", "\n  "] if line else ["\n", " ", "   ", *([] if apart else [""])])

    # Where a comment ends its line, what follows begins another.
    assert format(mutated(TEXTS[name], gap), name) == format(TEXTS[name], name)


BODY = "algorithm a {\n%s}\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # One statement a line; white space says nothing.
        ("import grpo import\n'x'".replace("'", '"'), 'import grpo\nimport "x"\n'),
        ("algorithm a{}cluster c{}", "algorithm a {\n}\ncluster c { }\n"),
        (("algorithm a { param x=-(1+2)*-f(y ,z=[ ] , ) "
            "<=3//2 }"), BODY % "  param x = -(1 + 2) * -f(y, z = []) <= 3 // 2\n"),
        (("algorithm a { param x = 300MB/s\nparam yy = "
            "300  MB/s }"), BODY % "  param x  = 300MB/s\n  param yy = 300  MB/s\n"),
        ("deploy a on b as c { place x,y . z together on nodes 0 .. 1 devices 3 }",
         "deploy a on b as c {\n  place x, y.z together on nodes 0..1 devices 3\n}\n"),
        # A single column on its word's line, more one a line.
        ("algorithm a { columns { x:i32[<=n,2]per y, } }", BODY % "  columns { x : i32[<= n, 2] per y }\n"),
        ("algorithm a { columns { x:f32 yy:f32, } }", BODY % "  columns {\n    x  : f32\n    yy : f32\n  }\n"),
        # The one comma that stays: a column `per` would else belong to the type before.
        (("algorithm a { columns { x:f32, per:f32, "
            "y:f32 } }"), BODY % "  columns {\n    x   : f32,\n    per : f32\n    y   : f32\n  }\n"),
        ("algorithm a { columns { per:f32 y:f32 } }", BODY % "  columns {\n    per : f32\n    y   : f32\n  }\n"),
        # Runs end at blank lines, comments and statements of another kind.
        (("algorithm a {\nparam x = 1\nparam long = 2\n\n\nparam y = 3\n# c\nparam yy = 4\nworker w : "
            "policy\nparam z = 5 }"),
         BODY % ("  param x    = 1\n  param long = 2\n\n  param y = 3\n  # c\n  param yy = 4\n  worker w : policy\n  "
             "param z = 5\n")),
        ("deploy a on b { layout x { tp = 1 } layout yyy { tp = 2 } node_a -> b }",
         "deploy a on b {\n  layout x   { tp = 1 }\n  layout yyy { tp = 2 }\n  node_a -> b\n}\n"),
        # A name that is too long for its run's column takes no part.
        (f"algorithm a {{ param {'x' * 40} = 1\nparam y = 2\nparam zz = 3 }}",
         BODY % f"  param {'x' * 40} = 1\n  param y  = 2\n  param zz = 3\n"),
        # A comment or a blank line among attributes opens them; commas go.
        ("cluster c { a = 1, bb = 2, # two\n }", "cluster c {\n  a  = 1\n  bb = 2  # two\n}\n"),
        ("cluster c {\n\n a = 1\n\n bb = 2\n\n}", "cluster c {\n  a = 1\n\n  bb = 2\n}\n"),
        ("cluster c { # one\n a = 1 }  # end", "cluster c {  # one\n  a = 1\n}  # end\n"),
        ("cluster c {\n # one\n}", "cluster c {\n  # one\n}\n"),
        ("cluster c { a = 1 # x\n\n, # y\n b = 2\n # z\n}", "cluster c {\n  a = 1  # x\n\n  # y\n  b = 2\n  # z\n}\n"),
        # Comments behind lines that follow each other stand in one column; in the midst of a statement they move above
        # it.
        ("algorithm a { # A\nparam x = 1 # x\nparam y = 100 # y\nparam z = 2\nparam w = 3 # w\n}",
         BODY.replace("{", "{    # A") % ("  param x = 1    # x\n  param y = 100  # y\n  param z = 2\n  param w = "
             "3  # w\n")),
        (("# above\n\nimport # here\n grpo # "
            "behind\n\n\n# end\n"), "# above\n\n# here\nimport grpo  # behind\n\n# end\n"),
        ("import a\n\ncluster # c\n c # d\n { a = # e\n 1 }", "import a\n\n# c\n# d\ncluster c {\n  # e\n  a = 1\n}\n"),
        # What the file begins and ends with.
        ("\ufeff\r\n\r\n# a\r\nimport b\r\n\r\n", "# a\nimport b\n"),
    ],
)  # fmt: skip
def test_details(text: str, expected: str) -> None:
    assert holds(text) == expected


def test_what_is_too_long_is_broken_where_it_holds_least() -> None:
    names = ", ".join(f"state_{i}.generate" for i in range(8))
    terms = " + ".join(f"coefficient_{i} * term(alpha, beta)" for i in range(4))
    numbers = ", ".join(["10"] * 40)
    text = f"algorithm a {{ {names} -> b.c -> {names}\nparam x = {terms} }}\n"
    text += f"deploy a on b {{ layout {names} {{ stages = [{numbers}], tp = 1 }} }}"
    assert holds(text) == (
        "algorithm a {\n"
        "  state_0.generate, state_1.generate, state_2.generate, state_3.generate, state_4.generate, "
        "state_5.generate,\n"
        "      state_6.generate, state_7.generate -> b.c\n"
        "      -> state_0.generate, state_1.generate, state_2.generate, state_3.generate, state_4.generate, "
        "state_5.generate,\n"
        "      state_6.generate, state_7.generate\n"
        "  param x = coefficient_0 * term(alpha, beta) + coefficient_1 * term(alpha, beta) + coefficient_2 * "
        "term(alpha, beta)\n"
        "      + coefficient_3 * term(alpha, beta)\n"
        "}\n"
        "deploy a on b {\n"
        "  layout state_0.generate, state_1.generate, state_2.generate, state_3.generate, state_4.generate, "
        "state_5.generate,\n"
        "      state_6.generate, state_7.generate {\n"
        "    stages = [10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, "
        "10, 10, 10, 10,\n"
        "        10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10]\n"
        "    tp     = 1\n"
        "  }\n"
        "}\n"
    )


def test_a_line_has_room_to_the_last_column() -> None:
    def cluster(length: int) -> str:
        return "cluster c { a = 1, b = " + "x" * (length - 25) + " }"

    def edge(length: int) -> str:
        return "  a -> " + "b" * (length - 7)

    assert format(cluster(WIDTH), "p") == f"{cluster(WIDTH)}\n"
    assert format(cluster(WIDTH + 1), "p") == f"cluster c {{\n  a = 1\n  b = {'x' * (WIDTH + 1 - 25)}\n}}\n"
    assert format(BODY % edge(WIDTH), "p") == BODY % f"{edge(WIDTH)}\n"
    assert format(BODY % edge(WIDTH + 1), "p") == BODY % f"  a\n      -> {'b' * (WIDTH + 1 - 7)}\n"
    # The brace belongs to the line.
    deploy = "deploy a on b {\n  layout x,%s%s {\n    tp = 1\n  }\n}\n"
    long = "b" * (WIDTH - len("  layout x,  {"))
    assert format(deploy % (" ", long), "p") == deploy % (" ", long)
    assert format(deploy % (" ", long + "b"), "p") == deploy % ("\n      ", long + "b")


@pytest.mark.parametrize(
    "text", ["", "# only a comment", "cluster c { a = 1 b = 2 }", 'import "a\\q"', "algorithm a {"]
)
def test_a_mistake_is_told_as_the_parser_tells_it(text: str) -> None:
    with pytest.raises(Fault) as told:
        format(text, "p.rlg")
    with pytest.raises(Fault) as parsed:
        parse(text, "p.rlg")
    assert told.value.diagnostics == parsed.value.diagnostics


def test_four_times_the_lines_take_about_four_times_the_calls() -> None:
    text = TEXTS["tests/programs/small.rlg"]

    def calls(lines: int) -> int:
        found, copies = 0, text * (lines // text.count("\n") + 1)

        def count(_frame: object, event: str, _argument: object) -> None:
            nonlocal found
            found += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            format(copies, "long.rlg")
        finally:
            sys.setprofile(None)
        return found

    assert calls(1000) < 5 * calls(250)


def test_long_lists_and_runs_take_no_long_time() -> None:
    names = ", ".join(f"w{i}.infer" for i in range(3000))
    layouts = "".join(f"layout {'x' * (i % 90 + 1)} {{ tp = {i} }}\n" for i in range(1000))
    began = time.process_time()
    format(f"algorithm a {{ {names} -> b }} deploy a on b {{ {layouts} }}", "long.rlg")
    assert time.process_time() - began < 30
