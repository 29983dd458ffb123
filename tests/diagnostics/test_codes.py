"""The pages of codes: each says what a code means, why it matters, with an example and what to write instead, and all
of it is true.

Beside the pages' programs lie `rewards.py` and `train.jsonl` of the corpus, and a model.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from diagnostic_files import ELSEWHERE
from language import TESTS, told

from msrl_graph.cli import compile_main
from msrl_graph.diagnostics import codes

PACKAGE = codes.FOLDER.parent.parent
PAGE = re.compile(r"# ([\w-]+)\n\n(.+?)\n\n(.+?)\n\n## Example\n\n(.+?)\n\n## Instead\n\n(.+)\n", re.DOTALL)
PROGRAM = re.compile(r"```rlg\n(.*?)```", re.DOTALL)
# What one sees on a command line, as messages of a run are.
SCENE = re.compile(r"```text\n\$ .*?\n(?:error|warning|hint)\[([\w-]+)\]: .*?\n```", re.DOTALL)
CODES = sorted(codes.known())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    for name in ("rewards.py", "train.jsonl"):
        (folder / name).write_bytes((TESTS / "corpus" / name).read_bytes())
    (folder / "model").symlink_to(TESTS.parent / "examples" / "arithmetic" / "model")
    return folder


def parts(code: str) -> tuple[str, str]:
    """Of a page, the section with the example and the one with what to write instead."""
    found = PAGE.fullmatch(codes.page(code))
    assert found is not None, "a page is: title, what it means, why it matters, Example, Instead"
    assert found[1] == code
    assert not re.search(r"\n\n", found[2])
    return found[4], found[5]


@pytest.mark.parametrize("code", [c for c in CODES if c not in ELSEWHERE])
def test_the_example_is_wrong_and_the_other_is_not(code: str, folder: Path) -> None:
    wrong, right = ("".join(PROGRAM.findall(p)) for p in parts(code))
    assert wrong and right
    assert {d.code for d in told(wrong, folder)} == {code}
    assert [d for d in told(right, folder) if d.severity != "hint"] == []


@pytest.mark.parametrize("code", sorted(ELSEWHERE))
def test_what_a_run_tells_is_shown(code: str) -> None:
    example, _ = parts(code)
    found = SCENE.fullmatch(example)
    assert found is not None
    assert found[1] == code


def test_every_code_in_the_source_has_its_page_and_no_other_has() -> None:
    """A code is the first argument of what makes a diagnostic; a few stand elsewhere in the source, as constants all
    the same."""
    told = set()
    constants = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                constants.add(node.value)
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                name = (
                    node.func.id
                    if isinstance(node.func, ast.Name)
                    else node.func.attr
                    if isinstance(node.func, ast.Attribute)
                    else ""
                )
                if name in ("Diagnostic", "mistake"):
                    told.add(node.args[0].value)
    assert len(told) > 30
    assert told - codes.known() == set()
    assert codes.known() - constants == set()


def test_the_catalogue_is_what_the_pages_say() -> None:
    written = (TESTS.parent / "docs" / "reference" / "codes.md").read_text(encoding="utf-8")
    assert written == codes.catalogue(), "run `make docs`"
    assert all(f"| [{code}](" in written for code in CODES)


def test_a_meaning_is_one_sentence_that_stands_nowhere_else() -> None:
    source = "".join(p.read_text(encoding="utf-8") for p in PACKAGE.rglob("*.py"))
    meanings = [codes.meaning(c) for c in CODES]
    assert len({*meanings}) == len(meanings)
    assert [m for m in meanings if not m.endswith(".") or ". " in m or m in source] == []


def test_a_page_is_shown_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    for code in CODES:
        assert compile_main(["--explain", code]) == 0
        assert capsys.readouterr().out == codes.page(code)


def test_a_page_is_laid_out_for_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert compile_main(["--explain", "two-writers", "--color", "always"]) == 0
    out = capsys.readouterr().out
    assert "\x1b[" in out and "```" not in out and "algorithm mine extends grpo" in re.sub(r"\x1b\[[\d;]*m", "", out)
