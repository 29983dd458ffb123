"""The Python files of the user's that the functions of a program are made of.

Invariant: nothing is imported to find them. They are the files that a program calls and what these import, by a name
that stands in the text, from their own folder or from other folders of the user's that Python looks in (PYTHONPATH,
editable installs); never from the standard library, from installed packages or from this one.
"""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from ...ir.plan import Plan
from ..process.cluster_join import called

_INSTALLED = ("site-packages", "dist-packages")
_OURS = __name__.partition(".")[0]
_BY_NAME = ("import_module", "__import__")


def of_plan(plan: Plan) -> dict[Path, Path]:
    """The Python files of a plan's functions, each with the file that the program names for whose sake it is there."""
    found: dict[Path, Path] = {}
    for path, _, _ in called(plan):
        found |= {file: Path(path) for file in modules(Path(path).absolute()) if file not in found}
    return found


def modules(path: Path) -> Iterator[Path]:
    """A Python file, and what it imports from the user's folders, file or package, with what that imports."""
    beside = path.parent
    others = _folders_of_user()
    left = [path, *_packages(path)]
    seen = {*left}
    while left:
        yield (file := left.pop())
        near: list[Path] = []
        for name, folder in _imported(file):
            if folder is not None:
                near += _found(name, folder)
                continue
            # A package beside the file goes whole: what it imports by a name that it computes is part of it too.
            own = _found(name, beside, whole=True)
            head = name.partition(".")[0]
            known = head in sys.stdlib_module_names or head == _OURS
            near += own or ([] if known else next(filter(None, (_found(name, folder) for folder in others)), []))
        left += [other for other in dict.fromkeys(near) if other not in seen]
        seen |= {*near}


def _packages(path: Path) -> Iterator[Path]:
    """What is run first where a file is part of a package: the beginnings of the package and of those that it is in."""
    for folder in path.parents:
        if not (folder / "__init__.py").is_file():
            return
        yield folder / "__init__.py"


def _found(name: str, folder: Path, whole: bool = False) -> list[Path]:
    """The files that a dotted name leads to from a folder; of a package all of them, if it is to be `whole`."""
    head, _, rest = name.partition(".")
    package = folder / head
    if (package / "__init__.py").is_file():
        if whole:
            return sorted(package.rglob("*.py"))
        return [package / "__init__.py", *(_found(rest, package) if rest else [])]
    if (package.with_name(f"{head}.py")).is_file():
        return [package.with_name(f"{head}.py")]
    return _found(rest, package, whole) if rest and package.is_dir() else []


def _imported(file: Path) -> Iterator[tuple[str, Path | None]]:
    """The modules that a file names in its imports, wherever they stand; of relative ones the folder that they are
    looked for in."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # who imports it will tell
    for item in ast.walk(tree):
        if isinstance(item, ast.Import):
            yield from ((alias.name, None) for alias in item.names)
        elif isinstance(item, ast.ImportFrom):
            folder = file.parents[item.level - 1] if 0 < item.level <= len(file.parents) else None
            head = f"{item.module}." if item.module else ""
            yield from ((f"{head}{alias.name}", folder) for alias in item.names)
        elif isinstance(item, ast.Call) and item.args:
            called_so = getattr(item.func, "attr", getattr(item.func, "id", ""))
            name = item.args[0]
            if called_so in _BY_NAME and isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield name.value.lstrip("."), file.parent if name.value.startswith(".") else None


def _folders_of_user() -> list[Path]:
    """The folders in which Python looks for modules, without those of the library and of installed packages."""
    library = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    found = []
    for entry in dict.fromkeys(filter(None, sys.path)):  # no process looks in the folder in which a run is started
        folder = Path(entry).absolute()
        installed = any(part in _INSTALLED for part in folder.parts)
        if folder.is_dir() and not installed and not any(folder.is_relative_to(place) for place in library):
            found.append(folder)
    return found


__all__ = ["modules", "of_plan"]
