"""The files that a run took when it began: in the run's temporary folder on each host, found by the path that they have
where the run is driven.

Invariant: who asks for a path gets what was taken, whatever lies at that path now and on this host, and where nothing
was taken the path itself; whatever is told of such a file names the user's own path, and shows the line as it was.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import FileFinder, SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from itertools import count
from pathlib import Path
from types import ModuleType

from ...files import private
from .processes import hold, lent, sweep

FILES = "files"


@dataclass(frozen=True)
class ShippedFile:
    """What a file held, and when it had last been changed (nanoseconds)."""

    content: bytes
    changed: int


_here = Path()  # where the files lie of the run that this process is of; nowhere at first
_modules: dict[str, tuple[bytes, ModuleType]] = {}  # by path, with what the file held


def lay_in(folder: Path, files: Mapping[str, ShippedFile]) -> None:
    """Lays files, by absolute path, into a run's temporary folder; each copy says when its file was last changed."""
    for path, file in files.items():
        target = _below(folder / FILES, Path(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.content)
        os.utime(target, ns=(file.changed, file.changed))


def laid(folder: Path) -> dict[str, ShippedFile]:
    """The files in a run's temporary folder, as they were laid."""
    found = {}
    for copy in (folder / FILES).rglob("*"):
        if copy.is_file():
            path = str(Path("/") / copy.relative_to(folder / FILES))
            found[path] = ShippedFile(copy.read_bytes(), copy.stat().st_mtime_ns)
    return found


def edited(path: str, file: ShippedFile) -> bool:
    """Whether the user's file is not what it was when the run took it. It is read only where it was written since."""
    try:
        status = Path(path).stat()
        if (status.st_mtime_ns, status.st_size) == (file.changed, len(file.content)):
            return False
        return Path(path).read_bytes() != file.content
    except OSError:
        return True


def lay(files: Mapping[str, ShippedFile]) -> Path:
    """Lays files, by absolute path, into a temporary folder that goes with the last process that uses it, beginning
    with this one. Those of runs of which every process here was killed, as with the host, go first."""
    sweep()
    folder = lent()
    lay_in(folder, files)
    return folder


def use(folder: str) -> None:
    """This process finds what lies in the folder."""
    global _here
    if (Path(folder) / FILES).is_dir():
        private.check_folder(Path(folder))
        _here = Path(folder) / FILES
        hold(Path(folder))
        sys.path_hooks.insert(0, _finder)
        sys.path[:] = [place for entry in sys.path for place in _places(Path(entry or ".").absolute(), entry)]


def folder() -> str:
    """The temporary folder in which files were shipped to this host, for processes that this one starts; "" where none
    were."""
    return str(_here.parent) if _here != Path() else ""


def found(path: str | Path) -> Path:
    """Where a file or a folder of the user's is to be read."""
    copy = _below(_here, Path(path)) if _here != Path() else Path(path)
    return copy if copy.exists() else Path(path)


def module(path: str) -> ModuleType:
    """The module of a user's file, which may import what lies beside it. It is the one that Python would import under
    its name, in its package where its folder is one, so that what it defines can be pickled. Where the name is that of
    another module, it has another one."""
    place = found(path)
    content = place.read_bytes()
    if path in _modules and _modules[path][0] == content:
        return _modules[path][1]
    names = [place.stem]
    top = place.parent
    while (top / "__init__.py").is_file():
        names.insert(0, top.name)
        top = top.parent
    # First what was taken; a file that was not, as one whose name is computed, is imported from where it lies.
    folders = dict.fromkeys(
        str(folder)
        for beside in (place.parent, Path(path).absolute().parent)
        for folder in (beside, beside.parents[len(names) - 2] if len(names) > 1 else beside)
    )
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]
    known = sys.modules.get(".".join(names))
    if path not in _modules and getattr(known, "__file__", None) in (str(Path(path).absolute()), str(place)):
        assert known is not None  # another file of the user's has imported it
        _modules[path] = content, known
        return known
    name = _free(".".join(names), path)
    if "." in name:
        import_module(name.rpartition(".")[0])
    loader = _Loader(name, str(place)) if place != Path(path) else SourceFileLoader(name, path)
    spec = spec_from_file_location(name, place, loader=loader)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = made = module_from_spec(spec)
    try:
        spec.loader.exec_module(made)
    except BaseException:
        del sys.modules[name]
        raise
    _modules[path] = content, made
    return made


def _free(name: str, path: str) -> str:
    """A name under which no other module is known than one of this file."""
    head, _, last = name.rpartition(".")
    mine = {made.__name__ for of, (_, made) in _modules.items() if of == path}
    for number in count(1):
        found = f"{head}.{last}" if head else last
        found += f"_{number}" * (number > 1)
        if found in mine or (found not in sys.modules and found not in sys.stdlib_module_names):
            return found
    raise AssertionError


def _places(folder: Path, entry: str) -> list[str]:
    """Where modules are looked for in place of a folder of `sys.path`: first among what was taken of it."""
    copy = _below(_here, folder)
    return [str(copy), entry] if copy.is_dir() else [entry]


def _below(folder: Path, path: Path) -> Path:
    """Return the place of a path's copy, which is inside the folder for any number of `..`."""
    return folder / os.path.relpath(os.path.normpath(path.absolute()), "/")


def _finder(folder: str) -> FileFinder:
    """What Python looks for modules in a folder with, where that was shipped."""
    if not Path(folder).is_relative_to(_here):
        raise ImportError
    return FileFinder(folder, (_Loader, [".py"]))


class _Loader(SourceFileLoader):
    """Loads a shipped module, which says that it is the user's own file."""

    def __init__(self, name: str, path: str) -> None:
        self.copy = Path(path)
        super().__init__(name, str(Path("/") / self.copy.relative_to(_here)))

    def get_data(self, path: str) -> bytes:
        return self.copy.read_bytes()

    def path_stats(self, path: str) -> Mapping[str, int]:
        raise OSError  # of its bytecode nothing is kept

    def exec_module(self, module: ModuleType) -> None:
        # What a traceback shows must be the lines that run, though another file may lie at the path here.
        text = self.copy.read_text(encoding="utf-8-sig", errors="replace")
        linecache.cache[self.path] = (len(text), None, text.splitlines(keepends=True), self.path)
        module.__file__ = self.path
        if hasattr(module, "__path__"):  # what a package has beside its Python files: libraries in C
            module.__path__.append(str(Path(self.path).parent))
        super().exec_module(module)


__all__ = ["ShippedFile", "edited", "folder", "found", "laid", "lay", "lay_in", "module", "use"]
