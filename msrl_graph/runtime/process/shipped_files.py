"""Copies of the user's files, which a run makes at its start.

The copies are in the run's temporary folder on each host. They are found by their *original path*: the path of the
user's file on the host where the run was started.

Invariant: an original path leads to the copy, even if this host has another file at the same path. A path without a
copy leads to the file at the path itself. If a message is about a copied file, the message has the original path, and
shows the lines of the copy.
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
from .processes import hold_folder, make_shared_folder, sweep

FILES = "files"


@dataclass(frozen=True)
class ShippedFile:
    """The content of a user's file, and the time of its last change in nanoseconds."""

    content: bytes
    changed: int


_copies = Path()  # the folder of the files of this process's run; not set at first
_modules: dict[str, tuple[bytes, ModuleType]] = {}  # by path, with the file's content at its import


def write_files(folder: Path, files: Mapping[str, ShippedFile]) -> None:
    """Write copies of the user's files into a run's temporary folder.

    The keys of `files` are the absolute paths of the originals. Each copy gets the modification time that the original
    had.
    """
    for path, file in files.items():
        target = _copy_path(folder / FILES, Path(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.content)
        os.utime(target, ns=(file.changed, file.changed))


def read_shipped(folder: Path) -> dict[str, ShippedFile]:
    """Return the files that `write_files` has written into a run's temporary folder."""
    files = {}
    for copy in (folder / FILES).rglob("*"):
        if copy.is_file():
            path = str(Path("/") / copy.relative_to(folder / FILES))
            files[path] = ShippedFile(copy.read_bytes(), copy.stat().st_mtime_ns)
    return files


def is_edited(path: str, file: ShippedFile) -> bool:
    """Return whether the user's file at `path` has changed since the run copied it.

    `file` is the copy. If the user's file and the copy have the same size and the same time of the last change, the
    user's file is not read and counts as unchanged.
    """
    try:
        status = Path(path).stat()
        if (status.st_mtime_ns, status.st_size) == (file.changed, len(file.content)):
            return False
        return Path(path).read_bytes() != file.content
    except OSError:
        return True


def ship_files(files: Mapping[str, ShippedFile]) -> Path:
    """Write copies of files into a new temporary folder, and return the folder.

    The keys of `files` are the absolute paths of the originals. The folder is removed after the last process that uses
    it has ended; this process is the first user. Before the function writes files, it removes the folders of dead runs:
    runs whose processes on this host were all killed, for example because the host failed.
    """
    sweep()
    folder = make_shared_folder()
    write_files(folder, files)
    return folder


def use_folder(folder: str) -> None:
    """Make this process find the shipped files in a run's temporary folder.

    If the user's code imports a module from a folder that was copied, the copy is imported.
    """
    global _copies
    if (Path(folder) / FILES).is_dir():
        private.check_folder(Path(folder))
        _copies = Path(folder) / FILES
        hold_folder(Path(folder))
        sys.path_hooks.insert(0, _finder)
        sys.path[:] = [place for entry in sys.path for place in _search_paths(Path(entry or ".").absolute(), entry)]


def shipped_folder() -> str:
    """Return the temporary folder with the files that were shipped to this host.

    This process passes the result to each process that it starts. Returns "" if no files were shipped.
    """
    return str(_copies.parent) if _copies != Path() else ""


def find_copy(path: str | Path) -> Path:
    """Return the path from which to read a file or folder of the user.

    The result is the path of the copy, or `path` itself if there is no copy.
    """
    copy = _copy_path(_copies, Path(path)) if _copies != Path() else Path(path)
    return copy if copy.exists() else Path(path)


def import_file(path: str) -> ModuleType:
    """Import a Python file of the user, and return the module.

    The file may import files from its own folder. The module gets the name that a normal import would give it. If the
    file is in a package, this name includes the package. So objects that the module defines can be pickled. If another
    module already has this name, the module gets a different name.
    """
    path = str(Path(path).absolute())  # the file's packages are among the folders above
    place = find_copy(path)
    content = place.read_bytes()
    if path in _modules and _modules[path][0] == content:
        return _modules[path][1]
    names = [place.stem]
    top = place.parent
    while top.name and (top / "__init__.py").is_file():
        names.insert(0, top.name)
        top = top.parent
    # Copies first. A file that was not copied, such as one whose name is computed, is imported from its own place.
    folders = dict.fromkeys(
        str(folder)
        for parent in (place.parent, Path(path).parent)
        for folder in (parent, parent.parents[len(names) - 2] if len(names) > 1 else parent)
    )
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]
    known = sys.modules.get(".".join(names))
    if path not in _modules and getattr(known, "__file__", None) in (path, str(place)):
        assert known is not None  # another file of the user's has imported it
        _modules[path] = content, known
        return known
    name = _find_free_name(".".join(names), path)
    if "." in name:
        import_module(name.rpartition(".")[0])
    loader = _ShippedLoader(name, str(place)) if place != Path(path) else _SourceLoader(name, path)
    spec = spec_from_file_location(name, place, loader=loader)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = loaded = module_from_spec(spec)
    try:
        spec.loader.exec_module(loaded)
    except BaseException:
        del sys.modules[name]
        raise
    _modules[path] = content, loaded
    return loaded


def _find_free_name(name: str, path: str) -> str:
    """Return a module name that no module loaded from another file has.

    The result is `name`, or `name` with a number at its end.
    """
    package, _, last = name.rpartition(".")
    mine = {loaded.__name__ for owner, (_, loaded) in _modules.items() if owner == path}
    for number in count(1):
        candidate = f"{package}.{last}" if package else last
        candidate += f"_{number}" * (number > 1)
        if candidate in mine or (candidate not in sys.modules and candidate not in sys.stdlib_module_names):
            return candidate
    raise AssertionError


def _search_paths(folder: Path, entry: str) -> list[str]:
    """Return the folders in which to search for modules, for one entry of `sys.path`.

    `folder` is the folder to which `entry` refers. If the run has copied files from `folder`, the result begins with
    the folder of the copies. `entry` itself follows.
    """
    copy = _copy_path(_copies, folder)
    return [str(copy), entry] if copy.is_dir() else [entry]


def _copy_path(folder: Path, path: Path) -> Path:
    """Return the path that the copy of `path` has inside `folder`.

    The result is inside the folder, however many `..` the path contains.
    """
    return folder / os.path.relpath(os.path.normpath(path.absolute()), "/")


def _finder(folder: str) -> FileFinder:
    """Return the module finder for `folder`, which must be a folder of shipped files.

    Raises ImportError for any other folder, as a hook in `sys.path_hooks` must.
    """
    if not Path(folder).is_relative_to(_copies):
        raise ImportError
    return FileFinder(folder, (_ShippedLoader, [".py"]))


class _SourceLoader(SourceFileLoader):
    """A loader that always compiles the source.

    Python's bytecode files cannot distinguish two versions of a file that have the same size and were written in the
    same second.
    """

    def path_stats(self, path: str) -> Mapping[str, int]:
        raise OSError  # its bytecode is not cached


class _ShippedLoader(_SourceLoader):
    """A loader of shipped modules, which sets `__file__` to the original path."""

    def __init__(self, name: str, path: str) -> None:
        self.copy = Path(path)
        super().__init__(name, str(Path("/") / self.copy.relative_to(_copies)))

    def get_data(self, path: str) -> bytes:
        return self.copy.read_bytes()

    def exec_module(self, module: ModuleType) -> None:
        # A traceback must show the lines that run, though a different file may be at the path on this host.
        text = self.copy.read_text(encoding="utf-8-sig", errors="replace")
        linecache.cache[self.path] = (len(text), None, text.splitlines(keepends=True), self.path)
        module.__file__ = self.path
        if hasattr(module, "__path__"):  # a package's other files: libraries in C
            module.__path__.append(str(Path(self.path).parent))
        super().exec_module(module)


__all__ = [
    "ShippedFile",
    "find_copy",
    "import_file",
    "is_edited",
    "read_shipped",
    "ship_files",
    "shipped_folder",
    "use_folder",
    "write_files",
]
