"""What a run ships to its hosts: files in the run's temporary folder there, found by the path that they have where the
run is driven.

Invariant: who asks for a path gets what was shipped, whatever else lies at that path on the host, and where nothing was
shipped the path itself; whatever is told of a shipped file names the user's own path.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Mapping
from importlib.machinery import FileFinder, SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from .processes import hold, lent, sweep

FILES = "files"
_here = Path()  # where the files lie of the run that this process is of; nowhere at first


def lay(files: Mapping[str, bytes]) -> Path:
    """Lays files, by absolute path, into a temporary folder that goes with the last process that uses it, beginning
    with this one. Those of runs of which every process here was killed, as with the host, go first."""
    sweep()
    folder = lent()
    for path, data in files.items():
        target = _below(folder / FILES, Path(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return folder


def use(folder: str) -> None:
    """This process finds what lies in the folder."""
    global _here
    if (Path(folder) / FILES).is_dir():
        _here = Path(folder) / FILES
        hold(Path(folder))
        sys.path_hooks.insert(0, _finder)


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
    if str(place.parent) not in sys.path:
        sys.path.insert(0, str(place.parent))
    name = place.stem
    loader = _Loader(name, str(place)) if place != Path(path) else SourceFileLoader(name, path)
    spec = spec_from_file_location(name, place, loader=loader)
    assert spec is not None and spec.loader is not None
    made = module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


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
        super().exec_module(module)


__all__ = ["folder", "found", "lay", "module", "use"]
