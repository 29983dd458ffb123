"""Broken programs, each modelled on a failure that users of such systems have met: what is wrong is told, there and
nowhere else.

A file of `corpus` says in its first lines which failure it is. A mark `#! code` stands on each line at which that code
must be told (two of one code on a line: `#! code, code`); what has no place in the text is marked in the first line.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from language import TESTS, told

FOLDER = TESTS / "corpus"
FILES = sorted(FOLDER.glob("*.rlg"))
MARK = re.compile(r"#! ([\w-]+(?:, [\w-]+)*)$")


def marked(text: str) -> list[tuple[int, str]]:
    """The line and the code of each mark."""
    lines = ((number, MARK.search(line)) for number, line in enumerate(text.splitlines(), 1))
    return sorted((number, code) for number, mark in lines if mark for code in mark[1].split(", "))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_what_is_wrong_is_told_where_it_is(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# "), "the failure, in words"
    found = told(text, FOLDER)
    assert {d.span.file for d in found} <= {"program.rlg", ""}
    assert sorted((max(1, d.span.line), d.code) for d in found) == marked(text)


def test_each_program_has_a_mark() -> None:
    assert len(FILES) >= 60
    assert [p.stem for p in FILES if not marked(p.read_text(encoding="utf-8"))] == []
