"""The tutorial is followed to the letter: its files are written, its commands run in order, and what they print is what
the page shows.

A block whose first line is `# NAME.rlg` or `# NAME.py` is a file; a line `$ COMMAND` in a ```text block is run by a
shell, and the lines after it are what it prints, stderr too; `…` on a line of its own stands for lines that are left
out. ```sh blocks need Ray or the network and are only read. `pytest --update` rewrites what is shown: between two `…`
the first line is looked for, and as many lines taken as stand there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from difflib import get_close_matches
from pathlib import Path

import pytest
from language import TESTS

ROOT = TESTS.parent
PAGE = ROOT / "docs" / "getting_started" / "tutorial.md"
EXAMPLE = ROOT / "examples" / "arithmetic"
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
SCENE = re.compile(r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
LEFT_OUT = "…"
COMMANDS = {
    "msrl-compile": ("msrl_graph.cli", "compile_main"),
    "msrl-run": ("msrl_graph.cli", "run_main"),
    "msrl-fmt": ("msrl_graph.cli.fmt", "main"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the page has its reader copy, and the commands as they are installed."""
    work = tmp_path / "first"
    commands = tmp_path / "bin"
    work.mkdir()
    commands.mkdir()
    for name in ("model", "train.jsonl", "test.jsonl", "grpo.rlg"):
        (work / name).symlink_to(EXAMPLE / name)
    called = {
        name: f'-c "import sys; from {module} import {main}; sys.exit({main}())"'
        for name, (module, main) in COMMANDS.items()
    }
    for name, arguments in {**called, "python": ""}.items():
        (commands / name).write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n', encoding="utf-8")
        (commands / name).chmod(0o755)
    return work


def printed(command: str, folder: Path) -> str:
    paths = {
        "PATH": f"{folder.parent / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    environment = {**os.environ, **paths, "MSRL_HERE": "", "NO_COLOR": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environment, text=True, timeout=120, check=False, **streams
    )
    return done.stdout.replace(f"{ROOT}/", "")


def parts(shown: str) -> list[list[str]]:
    """The lines of a text, parted where some are left out."""
    found: list[list[str]] = [[]]
    for line in shown.splitlines():
        found.append([]) if line == LEFT_OUT else found[-1].append(line)
    return found


def agrees(shown: str, real: str) -> bool:
    lines = real.splitlines()
    at = 0
    pieces = parts(shown)
    if len(pieces) == 1:
        return lines == pieces[0]
    for i, piece in enumerate(pieces):
        places = [p for p in range(at, len(lines) - len(piece) + 1) if lines[p : p + len(piece)] == piece]
        wanted = (
            [0] if i == 0 and piece else [len(lines) - len(piece)] if i == len(pieces) - 1 and piece else places[:1]
        )
        if not {*wanted} & {*places}:
            return False
        at = wanted[0] + len(piece)
    return True


def rewritten(shown: str, real: str) -> str:
    """The new text, with as much left out as before; whole where a part cannot be found again."""
    lines = real.splitlines()
    at = 0
    new = []
    for piece in parts(shown) if LEFT_OUT in shown.splitlines() else []:
        first = get_close_matches(piece[0], lines[at:], 1, 0.5) if piece else []
        if piece and not first:
            return real
        at = lines.index(first[0], at) if first else at
        new.append(lines[at : at + len(piece)])
        at += len(piece)
    return (
        f"\n{LEFT_OUT}\n".join("\n".join(piece) for piece in new).removeprefix("\n").removesuffix("\n") + "\n"
        if new
        else real
    )


def test_a_text_agrees_in_its_parts() -> None:
    real = "a\nb\nc\nd\n"
    assert all(agrees(s, real) for s in (real, "a\n…\nd\n", "…\nb\nc\n…\n", "a\n…\n", "…\nd\n", "…\nb\n…\nd\n"))
    assert not any(
        agrees(s, real)
        for s in ("a\nb\nc\n", "b\n…\nd\n", "a\n…\nc\n", "…\nc\n…\nb\n…\n", "…\nb\nd\n…\n", "a\n…\nd\ne\n")
    )
    assert rewritten("aa\n…\ncold\n…\n", "aa\nb\ncolt\nd\n") == "aa\n…\ncolt\n…\n"
    assert agrees(rewritten("…\ncold\n", real + "cord\n"), real + "cord\n")


@pytest.mark.slow
def test_the_page_is_true(folder: Path, update: bool) -> None:
    text = PAGE.read_text(encoding="utf-8")
    shown = []

    def follow(block: re.Match[str]) -> str:
        kind = block[1]
        body = block[2]
        name = re.match(r"# ([\w-]+\.(?:rlg|py))\n", body)
        if name:
            (folder / name[1]).write_text(body, encoding="utf-8")
        if kind != "text":
            return block[0]

        def scene(found: re.Match[str]) -> str:
            real = printed(found[1], folder)
            shown.append((found[1], found[2], real))
            assert "Traceback" not in real
            return found[0] if agrees(found[2], real) else f"$ {found[1]}\n{rewritten(found[2], real)}"

        return f"```text\n{SCENE.sub(scene, body)}```"

    new = BLOCK.sub(follow, text)
    assert len(shown) > 12
    if update and new != text:
        PAGE.write_text(new, encoding="utf-8", newline="\n")
        return
    for command, expected, real in shown:
        assert agrees(expected, real), f"$ {command}\n{real}"


def test_commands_that_are_only_read_have_flags_that_exist(folder: Path) -> None:
    found = [
        line
        for kind, body in BLOCK.findall(PAGE.read_text(encoding="utf-8"))
        if kind == "sh"
        for line in body.splitlines()
    ]
    known = printed("msrl-run --help", folder)
    flags = [flag for line in found if line.startswith("msrl-run") for flag in re.findall(r"--\w[\w-]*", line)]
    assert flags
    assert [flag for flag in flags if f"{flag} " not in known] == []
    for path in re.findall(r"examples/\S+", "\n".join(found)):
        assert list(ROOT.glob(path)), path


@pytest.mark.parametrize(("name", "most"), [("mine.rlg", 25), ("ranged.py", 40), ("brief.rlg", 25)])
def test_a_program_of_ones_own_is_short(name: str, most: int) -> None:
    (body,) = re.findall(rf"```\w+\n# {re.escape(name)}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(body.splitlines()) < most
