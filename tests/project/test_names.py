"""Names and words in the package: a reader of one file can tell what a name is, and reads each sentence once.

The rules are in CONTRIBUTING.md. Each assertion prints what to change."""

import ast
import io
import re
import tokenize
from collections import defaultdict
from pathlib import Path

import pytest
from folders import ROOT

PACKAGE = ROOT / "msrl_graph"
FILES = sorted(PACKAGE.rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *PACKAGE.rglob("*.md")])
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# Shares of what is stored: an index or a mathematical symbol may have one letter, a swap is one assignment.
ONE_LETTER = 0.02
PARALLEL = 3  # in 10,000 lines
# What to write in place of words that are no words of the trade.
WORDS = {
    r"anew": "again, new, or re- (restarted)",
    r"whoever": "the process, the caller",
    r"(gone|goes|go|going) on with": "resume, continue",
    r"(is|are|was|be) told of": "is reported, learns",
    r"heeds?|honou?rs?": "supports, reads",
    r"parted": "sharded, partitioned",
    r"by its name \(": "with an error that names it",
    r"stands apart": "is separate",
    r"may be said": "you can write",
    r"beside the": "next to, with, compared with",
}
WORD = re.compile("|".join(rf"\b(?P<w{i}>{word})\b" for i, word in enumerate(WORDS)), re.IGNORECASE)


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_the_name_of_a_public_class_occurs_once():
    """Two classes with one name cannot be told apart in a traceback, a search or an import."""
    places = defaultdict(list)
    for path, tree in TREES.items():
        for item in ast.walk(tree):
            if isinstance(item, ast.ClassDef) and not item.name.startswith("_"):
                places[item.name].append(place(path, item.lineno))
    repeated = [f"{name}: {', '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1]
    assert not repeated, "rename all but one after their role, or begin the name with `_`:\n" + "\n".join(repeated)


def test_the_first_line_of_a_docstring_is_short():
    long = [
        place(path, item.body[0].lineno)
        for path, tree in TREES.items()
        for item in ast.walk(tree)
        if isinstance(item, DOCUMENTED) and len((ast.get_docstring(item) or "").partition("\n")[0]) > 80
    ]
    assert not long, "shorten to a phrase of at most 80 characters, and put the rest below:\n" + "\n".join(long)


def test_names_have_more_than_one_letter():
    stores = [
        (path, item)
        for path, tree in TREES.items()
        for item in ast.walk(tree)
        if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store)
    ]
    short = [place(path, item.lineno) for path, item in stores if len(item.id) == 1 and item.id not in "_i"]
    assert len(short) <= ONE_LETTER * len(stores), "name some of these for what they hold:\n" + "\n".join(short)


def test_a_line_assigns_once():
    """`a = b = 0`, swaps and unpacking are one assignment."""
    parallel = [
        place(path, item.lineno)
        for path, tree in TREES.items()
        for item in ast.walk(tree)
        if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Tuple) and isinstance(item.value, ast.Tuple)
    ]
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in FILES)
    assert len(parallel) <= PARALLEL * lines / 10_000, "write one assignment a line in:\n" + "\n".join(parallel)


def texts(path: Path) -> list[tuple[int, str]]:
    """Each comment and string of a module, with its line."""
    source = path.read_text(encoding="utf-8")
    comments = [
        (token.start[0], token.string)
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    strings = [
        (item.lineno, item.value)
        for item in ast.walk(TREES[path])
        if isinstance(item, ast.Constant) and isinstance(item.value, str)
    ]
    return comments + strings


def prose(path: Path) -> list[tuple[int, str]]:
    """Each line of a page that is in no block of code."""
    lines = []
    code = False
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if line.lstrip().startswith("```"):
            code = not code
        elif not code:
            lines.append((number, re.sub(r"`[^`]*`", "``", line)))
    return lines


@pytest.mark.parametrize("path", [*FILES, *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_text_uses_words_of_the_trade(path: Path):
    wrong = []
    for line, text in texts(path) if path.suffix == ".py" else prose(path):
        for found in WORD.finditer(text):
            better = next(better for i, better in enumerate(WORDS.values()) if found[f"w{i}"])
            wrong.append(f"{place(path, line)}: `{found[0]}`: write {better}")
    assert not wrong, "\n".join(wrong)
