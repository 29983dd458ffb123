"""Every diagnostic of the language, with its exact text: the Markdown files in `diagnostics`.

In a file, each ```rlg block is a program and the ```text block after it all that is told of it; a line `# --deploy
NAME`, `# --model NAME` or `# --set NAME=VALUE` at the head of a program stands for the command line, and `# run` for
what msrl-run checks before it starts anything. `pytest --update` rewrites the expected texts.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
from diagnostic_files import ELSEWHERE
from language import TESTS, context, diagnose, head, told

from msrl_graph.compiler.sources import collect_texts
from msrl_graph.diagnostics import codes, render

BLOCK = re.compile(r"```rlg\n(.*?)```\n\n```text\n(.*?)```\n", re.DOTALL)
FOLDER = TESTS / "diagnostics"
FILES = sorted(FOLDER.glob("*.md"))
PLACED = {"delayed-state", "few-rows", "known-bad", "shared-staleness"}  # warnings of a placed plan


def shown(program: str) -> str:
    with contextlib.chdir(FOLDER):  # so that paths in messages are the program's own
        found = diagnose(program, context(Path(), *head(program)))
        if not any(d.severity == "error" for d in found):
            # What the passes, and the checks of a run, tell of a program whose text is right; those of the text are
            # told already.
            found += [d for d in told(program, FOLDER) if d.severity == "error" or d.code in PLACED]
        sources = {**collect_texts(None, found), "program.rlg": program}
    return "".join(render(d, sources) + "\n" for d in found).replace(f"{FOLDER}/", "")


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_exact_text(path: Path, update: bool) -> None:
    text = path.read_text(encoding="utf-8")
    assert BLOCK.search(text), "no program"
    assert len(BLOCK.findall(text)) == text.count("```rlg"), "a program without its text"
    new = BLOCK.sub(lambda m: f"```rlg\n{m[1]}```\n\n```text\n{shown(m[1])}```\n", text)
    if update and new != text:
        path.write_text(new, encoding="utf-8", newline="\n")
    assert update or new == text


def test_every_code_has_an_example() -> None:
    examples = {
        c
        for p in FILES
        for c in re.findall(r"^(?:error|warning|hint)\[([\w-]+)\]", p.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert examples == codes.known() - ELSEWHERE


def test_a_message_reads_like_one() -> None:
    for path in FILES:
        for message in re.findall(
            r"^(?:error|warning)\[[\w-]+\]: (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE
        ):
            assert not message.endswith("."), message
            assert message[0] in "`" or message[0].islower(), message
