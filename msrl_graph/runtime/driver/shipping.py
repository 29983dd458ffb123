"""What is shipped to the hosts of a cluster: what is small and lies where the run is driven.

Invariant: of the user's Python files it is those that the program calls and what these import from their own folder, of
a model's folder all but its weights: tokenizer, config, chat template, and nothing that a link in it leads out to. What
is too large to be shipped is refused before anything is sent.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from ...diagnostics import Diagnostic, Fault
from ...emit.words import size
from ...files.contained import open_inside
from ...files.urls import is_url
from ...ir.plan import Plan
from ..process.joining import called
from ..weights.saved import beside

MOST = 256 << 20  # bytes: some tens are usual, and each host keeps them for as long as the run takes


def files(plan: Plan) -> dict[str, bytes]:
    """What is shipped, by absolute path."""
    named = {path: node.span for path, _, node in called(plan)}
    found: dict[Path, Path] = {}  # and for whose sake
    for path in named:
        found |= {file: Path(path) for file in modules(Path(path).absolute())}
    for model in plan.deploy.models.values():
        if model.path and not is_url(model.path):  # of which each host has a copy
            folder = Path(model.path).absolute()
            found |= dict.fromkeys(beside(folder), folder)
    sizes = {file: file.stat().st_size for file in found}
    if sum(sizes.values()) > MOST:
        largest = max(sizes, key=lambda file: sizes[file])
        raise Fault(
            Diagnostic(
                "bad-value",
                f"{size(sum(sizes.values()))} would be shipped to each host, more than {size(MOST)}; the largest file "
                f"is {largest}, of {size(sizes[largest])}, with {found[largest]}",
                named.get(str(found[largest]), plan.deploy.span),
                "what is large is read by its path on each host: leave it out of the folder, or read it from elsewhere",
            )
        )
    folders = {Path(m.path).absolute() for m in plan.deploy.models.values() if m.path and not is_url(m.path)}
    return {str(file): _content(file, of if (of := found[file]) in folders else None) for file in found}


def _content(file: Path, folder: Path | None) -> bytes:
    """Read a user's file, or a file of a model's `folder`."""
    if folder is None:
        return file.read_bytes()
    with open_inside(file, folder) as given:
        return given.read()


def modules(path: Path) -> Iterator[Path]:
    """A Python file, and what it imports that lies beside it, file or package, with what that imports."""
    folder, left, seen = path.parent, [path], {path}
    while left:
        yield (file := left.pop())
        for name in _imported(file):
            head = folder / name.partition(".")[0]
            near = [head.with_suffix(".py")] if head.with_suffix(".py").is_file() else []
            if (head / "__init__.py").is_file():
                near = sorted(head.rglob("*.py"))
            left += [other for other in near if other not in seen]
            seen |= {*near}


def _imported(file: Path) -> Iterator[str]:
    """The modules that a file names in its imports, wherever they stand."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # who imports it will tell
    for item in ast.walk(tree):
        if isinstance(item, ast.Import):
            yield from (alias.name for alias in item.names)
        elif isinstance(item, ast.ImportFrom) and item.module and not item.level:
            yield item.module


__all__ = ["files", "modules"]
