"""Reading of programs: from files, from msrl_graph's algorithms and from Python.

Invariant: the text of a program has one name and one folder. The name is the file name in spans. Paths in the program
are relative to the folder.
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
    """The text of a program.

    Paths in the program are relative to `folder`. If a Python file built the program, `text` is the text of that file
    and `tree` is the program. `deploy` is the name of the deploy to use, unless the caller chooses another deploy.
    """

    name: str
    text: str
    folder: Path
    tree: ast.File | None = None
    deploy: str | None = None


def read_source(source: str | Path | Program | ast.File, text: str | None = None) -> ProgramSource:
    """Read the source of a program.

    `source` is a path, the name of an algorithm that msrl_graph provides, or a program built in Python. `text` replaces
    the content of the file.
    """
    if not isinstance(source, str | Path):
        tree, meant = (source, None) if isinstance(source, ast.File) else _unpack_built(source)
        path = Path(tree.path)
        folder = path.parent if is_file(path) else Path()
        return ProgramSource(tree.path, "".join(linecache.getlines(tree.path)), folder, tree, meant)
    path = Path(source)
    if text is not None:
        return ProgramSource(
            str(source), program_text.normalize(text, str(source)), path.parent if path.suffix else Path()
        )
    if not is_file(path) and path.suffix == "" and len(path.parts) == 1:
        path = algorithms.FOLDER / f"{source}.rlg"
        if not is_file(path):
            known = [file.stem for file in algorithms.FOLDER.glob("*.rlg")]
            message = f"`{source}` is neither a file nor an algorithm of the package"
            raise Fault(Diagnostic("missing-file", message, help=nearest(str(source), known)))
        return ProgramSource(path.name, program_text.read(path, path.name), path.parent)
    return ProgramSource(str(source), program_text.read(path, str(source)), path.parent)


def _unpack_built(source: object) -> tuple[ast.File, str | None]:
    """Return the syntax tree of a program built in Python, and the name of its deploy.

    The name is None if the program is not a deploy. The name is necessary because a deploy that extends another deploy
    is in the same tree as the other deploy.
    """
    from ..builder import Deploy, Program

    if not isinstance(source, Program):
        raise Fault(Diagnostic("bad-value", f"a program is a path or built in Python, not {kind_of(source)}"))
    return source.tree(), source.name if isinstance(source, Deploy) else None


def importer(folder: Path) -> Callable[[str, bool, Span], ast.File]:
    """Return a function that parses each imported file once.

    Paths are relative to the importing file, or to `folder` if the importing program is not a file.
    """
    return partial(_import_file, folder, {})


def _import_file(folder: Path, read: dict[Path, ast.File], target: str, of_file: bool, span: Span) -> ast.File:
    """Parse an imported file, or an imported algorithm that msrl_graph provides.

    The path of a file is relative to the file that imports it. `read` caches the syntax trees by path. `of_file` is
    whether `target` is the path of a file.
    """
    importing_folder = Path(span.file).parent if is_file(Path(span.file)) else folder
    path = importing_folder / target if of_file else algorithms.FOLDER / f"{target}.rlg"
    # Each file has one name, so that a file that imports itself is detected.
    path = Path(os.path.normpath(path))
    if not of_file and not is_file(path):
        known = [file.stem for file in algorithms.FOLDER.glob("*.rlg")]
        is_beside = is_file(importing_folder / f"{target}.rlg")
        help = f'for the file next to this one, write `import "{target}.rlg"`' if is_beside else nearest(target, known)
        raise Fault(Diagnostic("unknown-name", f"no algorithm of the package is called `{target}`", span, help))
    if path not in read:
        read[path] = parse(program_text.read(path, target, span), str(path))
    return read[path]


def collect_texts(source: ProgramSource | None, diagnostics: Sequence[Diagnostic]) -> Mapping[str, str]:
    """Return the texts that the spans of diagnostics point into, by file name.

    The texts are the source, the files that it imports, and flags of the command line.
    """
    contents = {} if source is None else {source.name: source.text}
    for name in {
        span.file
        for diagnostic in diagnostics
        for span in (diagnostic.span, *(related_span for related_span, _ in diagnostic.related))
    } - contents.keys():
        if (flag := flag_text(name)) is not None:
            contents[name] = flag
            continue
        path = Path(name)
        if is_file(path):
            contents[name] = path.read_text(encoding="utf-8-sig", errors="replace")
        elif lines := linecache.getlines(name):
            contents[name] = "".join(lines)  # a cell of a notebook
    return contents
