"""The user's Python files that the functions of a program need.

Invariant: the search imports no file. The search starts with the files whose functions a program calls. It also finds
all files that a found file imports by a literal name. The search for imported files covers the folder of the file whose
functions are called, and other user folders that Python searches (PYTHONPATH, editable installs). Files of the standard
library, of installed packages and of msrl_graph itself are never included.
"""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from ...ir.plan import Plan
from ...trackers import is_file
from ..process.cluster_join import files_loaded

_INSTALLED = ("site-packages", "dist-packages")
_OURS = __name__.partition(".")[0]
_BY_NAME = ("import_module", "__import__")


def plan_files(plan: Plan) -> dict[Path, Path]:
    """Return the Python files of a plan's functions.

    The keys are all files that the functions need. The value for a needed file is a file that the program names: the
    needed file itself, or a file that imports the needed file.
    """
    owners: dict[Path, Path] = {}
    for path, _, _ in files_loaded(plan):
        owners |= {file: Path(path) for file in modules(Path(path).absolute()) if file not in owners}
    return owners


def tracker_files(plan: Plan) -> dict[Path, Path]:
    """Return the Python files of the user's trackers, as `plan_files` does.

    They do not affect the result of a run.
    """
    files = [Path(tracker.rpartition(":")[0]).absolute() for tracker in plan.deploy.run.track if is_file(tracker)]
    return {needed: file for file in files for needed in modules(file)}


def modules(path: Path) -> Iterator[Path]:
    """Yield a Python file, and all files of the user that the file imports.

    Imports of the imported files are also followed.
    """
    own_folder = path.parent
    others = _user_folders()
    pending = [path, *_package_inits(path)]
    seen = {*pending}
    while pending:
        yield (file := pending.pop())
        imported: list[Path] = []
        for name, folder in _list_imports(file):
            if folder is not None:
                imported += _resolve(name, folder)
                continue
            # All of a package next to the file is taken: modules that it imports by computed names are part of it too.
            own = _resolve(name, own_folder, complete=True)
            package = name.partition(".")[0]
            known = package in sys.stdlib_module_names or package == _OURS
            imported += own or ([] if known else next(filter(None, (_resolve(name, folder) for folder in others)), []))
        pending += [other for other in dict.fromkeys(imported) if other not in seen]
        seen |= {*imported}


def _package_inits(path: Path) -> Iterator[Path]:
    """Yield the `__init__.py` of each package that contains a file.

    Python runs these files before the file itself.
    """
    for folder in path.parents:
        if not (folder / "__init__.py").is_file():
            return
        yield folder / "__init__.py"


def _resolve(name: str, folder: Path, complete: bool = False) -> list[Path]:
    """Search a folder for the module with the dotted name `name`; return its files.

    With `complete`, the result has all files of the package that contains the module.
    """
    first_name, _, rest = name.partition(".")
    package = folder / first_name
    if (package / "__init__.py").is_file():
        if complete:
            return sorted(package.rglob("*.py"))
        return [package / "__init__.py", *(_resolve(rest, package) if rest else [])]
    if (package.with_name(f"{first_name}.py")).is_file():
        return [package.with_name(f"{first_name}.py")]
    return _resolve(rest, package, complete) if rest and package.is_dir() else []


def _list_imports(file: Path) -> Iterator[tuple[str, Path | None]]:
    """Yield (name, folder) for each module that a file imports, anywhere in its text.

    For a relative import, `folder` is the folder in which the module is searched. For all other imports, `folder` is
    None.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # the import itself will report it
    for item in ast.walk(tree):
        if isinstance(item, ast.Import):
            yield from ((alias.name, None) for alias in item.names)
        elif isinstance(item, ast.ImportFrom):
            folder = file.parents[item.level - 1] if 0 < item.level <= len(file.parents) else None
            prefix = f"{item.module}." if item.module else ""
            yield from ((f"{prefix}{alias.name}", folder) for alias in item.names)
        elif isinstance(item, ast.Call) and item.args:
            function_name = getattr(item.func, "attr", getattr(item.func, "id", ""))
            name = item.args[0]
            if function_name in _BY_NAME and isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield name.value.lstrip("."), file.parent if name.value.startswith(".") else None


def _user_folders() -> list[Path]:
    """Return the folders of `sys.path` that contain files of users.

    The folders of the standard library and of installed packages are left out.
    """
    library = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    folders = []
    for entry in dict.fromkeys(filter(None, sys.path)):  # no process searches the folder in which a run is started
        folder = Path(entry).absolute()
        installed = any(part in _INSTALLED for part in folder.parts)
        if folder.is_dir() and not installed and not any(folder.is_relative_to(place) for place in library):
            folders.append(folder)
    return folders


__all__ = ["modules", "plan_files", "tracker_files"]
