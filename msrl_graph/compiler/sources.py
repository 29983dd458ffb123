"""Where programs come from: a path, an algorithm of the package, what was built in Python, and what those import.

Invariant: a source has one name, by which spans point into it, and one folder, at which the paths in it begin.
"""

from __future__ import annotations

import linecache
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .. import algorithms
from ..diagnostics import Diagnostic, Fault, Span, kind_of, nearest
from ..dsl import ast
from ..dsl.parse import flag_text, parse
from ..files import program_text
from ..files.paths import is_file

if TYPE_CHECKING:
    from ..builder import Program


@dataclass(frozen=True)
class ProgramSource:
    """A program's text; `folder` is what the paths in it are relative to. With `tree`, the program that a Python file
    of this text made; `deploy` is the one of it that is meant, where nobody chooses another."""

    name: str
    text: str
    folder: Path
    tree: ast.File | None = None
    deploy: str | None = None


def read(source: str | Path | Program | ast.File, text: str | None = None) -> ProgramSource:
    """The source that a path or the name of a package's algorithm stands for, or that a program was built in."""
    if not isinstance(source, str | Path):
        tree, meant = (source, None) if isinstance(source, ast.File) else _built(source)
        path = Path(tree.path)
        folder = path.parent if is_file(path) else Path()
        return ProgramSource(tree.path, "".join(linecache.getlines(tree.path)), folder, tree, meant)
    path = Path(source)
    if text is not None:
        return ProgramSource(str(source), program_text.plain(text, str(source)), path.parent if path.suffix else Path())
    if not is_file(path) and path.suffix == "" and len(path.parts) == 1:
        path = algorithms.FOLDER / f"{source}.rlg"
        if not is_file(path):
            known = [p.stem for p in algorithms.FOLDER.glob("*.rlg")]
            message = f"`{source}` is neither a file nor an algorithm of the package"
            raise Fault(Diagnostic("missing-file", message, help=nearest(str(source), known)))
        return ProgramSource(path.name, program_text.read(path, path.name), path.parent)
    return ProgramSource(str(source), program_text.read(path, str(source)), path.parent)


def _built(source: object) -> tuple[ast.File, str | None]:
    """The tree, and the deploy that is meant by itself: one that extends another has that beside it in the file."""
    from ..builder import Deploy, Program

    if not isinstance(source, Program):
        raise Fault(Diagnostic("bad-value", f"a program is a path, or what was built in Python, not {kind_of(source)}"))
    return source.tree(), source.name if isinstance(source, Deploy) else None


def importer(folder: Path) -> Callable[[str, bool, Span], ast.File]:
    """What gives the trees of imported files, each read once, for a program whose paths are relative to a folder."""
    return partial(_import, folder, {})


def _import(folder: Path, read: dict[Path, ast.File], target: str, of_file: bool, span: Span) -> ast.File:
    """The tree of an imported file, relative to the file that imports it, or of an algorithm of the package; `read`
    keeps those that were read already."""
    beside = Path(span.file).parent if is_file(Path(span.file)) else folder
    path = beside / target if of_file else algorithms.FOLDER / f"{target}.rlg"
    # One file has one name, so that an import of itself is seen.
    path = Path(os.path.normpath(path))
    if not of_file and not is_file(path):
        known = [p.stem for p in algorithms.FOLDER.glob("*.rlg")]
        there = is_file(beside / f"{target}.rlg")
        help = f'for the file beside this one write `import "{target}.rlg"`' if there else nearest(target, known)
        raise Fault(Diagnostic("unknown-name", f"no algorithm of the package is called `{target}`", span, help))
    if path not in read:
        read[path] = parse(program_text.read(path, target, span), str(path))
    return read[path]


def texts(source: ProgramSource | None, diagnostics: Sequence[Diagnostic]) -> Mapping[str, str]:
    """The texts that diagnostics point into, by the names that their spans have: the source's, files that it imports,
    and flags of the command line."""
    found = {} if source is None else {source.name: source.text}
    for name in {s.file for d in diagnostics for s in (d.span, *(r for r, _ in d.related))} - found.keys():
        if (flag := flag_text(name)) is not None:
            found[name] = flag
            continue
        path = Path(name)
        if is_file(path):
            found[name] = path.read_text(encoding="utf-8-sig", errors="replace")
        elif lines := linecache.getlines(name):
            found[name] = "".join(lines)  # a cell of a notebook
    return found
