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
from importlib.machinery import FileFinder, SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from ...files import private
from .processes import hold, lent, sweep

FILES = "files"


@dataclass(frozen=True)
class File:
    """What a file held, and when it had last been changed (nanoseconds)."""

    content: bytes
    changed: int


_here = Path()  # where the files lie of the run that this process is of; nowhere at first


def lay_in(folder: Path, files: Mapping[str, File]) -> None:
    """Lays files, by absolute path, into a run's temporary folder; each copy says when its file was last changed."""
    for path, file in files.items():
        target = _below(folder / FILES, Path(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.content)
        os.utime(target, ns=(file.changed, file.changed))


def laid(folder: Path) -> dict[str, File]:
    """The files in a run's temporary folder, as they were laid."""
    found = {}
    for copy in (folder / FILES).rglob("*"):
        if copy.is_file():
            path = str(Path("/") / copy.relative_to(folder / FILES))
            found[path] = File(copy.read_bytes(), copy.stat().st_mtime_ns)
    return found


def edited(path: str, file: File) -> bool:
    """Whether the user's file is not what it was when the run took it. It is read only where it was written since."""
    try:
        status = Path(path).stat()
        if (status.st_mtime_ns, status.st_size) == (file.changed, len(file.content)):
            return False
        return Path(path).read_bytes() != file.content
    except OSError:
        return True


def lay(files: Mapping[str, File]) -> Path:
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
    """The module of a user's file, which may import what lies beside it."""
    place = found(path)
    # First what was taken; a file that was not, as one whose name is computed, is imported from where it lies.
    folders = dict.fromkeys([str(place.parent), str(Path(path).absolute().parent)])
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]
    name = place.stem
    loader = _Loader(name, str(place)) if place != Path(path) else SourceFileLoader(name, path)
    spec = spec_from_file_location(name, place, loader=loader)
    assert spec is not None and spec.loader is not None
    made = module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


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


__all__ = ["File", "edited", "folder", "found", "laid", "lay", "lay_in", "module", "use"]
