"""Plug-ins: engines, families, devices and functions of other installed packages.

A package names its plug-ins as entry points (packaging.python.org, "Entry points specification"), in the groups of
GROUPS. Every process of a run finds them by these names, so a package must be installed on every host.

Invariant: a plug-in never replaces something built-in. A package's code is imported only when one of its plug-ins is
used, or when all names are listed.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, TypeVar

from ..diagnostics import Diagnostic, Fault

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

# The groups of entry points, and what an entry point names.
GROUPS = {
    "msrl_graph.engines": "an EngineSpec",
    "msrl_graph.families": "a Family",
    "msrl_graph.device_kinds": "a DeviceKind",
    "msrl_graph.devices": "a Device",
    "msrl_graph.functions": "a module of functions, loss terms and optimizers",
    "msrl_graph.trackers": "a subclass of Tracker",
}
# For each group, what a user can do without its plug-ins.
_INSTEAD = {
    "msrl_graph.engines": "choose another engine",
    "msrl_graph.families": "use a model of another family",
    "msrl_graph.device_kinds": "plan for other devices",
    "msrl_graph.devices": "plan for other devices",
    "msrl_graph.functions": "call another function",
    "msrl_graph.trackers": "use another tracker",
}
T = TypeVar("T")


@dataclass(frozen=True)
class PlugIn:
    """A plug-in that a plan uses.

    - `group`, `name`: the entry point.
    - `package`, `version`: the distribution that provides it.
    """

    group: str
    name: str
    package: str
    version: str


@cache
def find_entry_points(group: str) -> Mapping[str, EntryPoint]:
    """Return the entry points of a group by name.

    If several have the same name, the first one counts.
    """
    from importlib.metadata import entry_points

    return {entry.name: entry for entry in reversed([*entry_points(group=group)])}


def describe(group: str, name: str) -> PlugIn:
    """Return the package that provides a plug-in.

    Raises KeyError if no installed package does.
    """
    entry = find_entry_points(group)[name]
    return PlugIn(group, name, entry.dist.name if entry.dist else "", entry.dist.version if entry.dist else "")


def find_plug_in(group: str, name: str, built_in: Container[str]) -> PlugIn | None:
    """Return the package that provides `name`; None if it is built-in, or unknown."""
    return describe(group, name) if name not in built_in and name in find_entry_points(group) else None


def load(group: str, name: str) -> Any:
    """Import a plug-in.

    Raises KeyError if no installed package provides it, and Fault if it is broken.
    """
    entry = find_entry_points(group)[name]
    try:
        return entry.load()
    except Exception as error:  # the code of somebody else
        source = describe(group, name)
        message = f"the plug-in `{name}` of the package {source.package} {source.version} cannot be loaded: "
        message += f"{type(error).__name__}: {error}"
        help = f"install the package again, or remove it: pip uninstall {source.package}"
        raise Fault(Diagnostic("not-installed", message, help=help)) from error


def load_class(group: str, name: str, base: type[T]) -> type[T]:
    """Import a plug-in that is a subclass of `base`.

    Raises KeyError if no installed package provides it, and Fault if it is broken.
    """
    loaded = load(group, name)
    if isinstance(loaded, type) and issubclass(loaded, base):
        return loaded
    raise _make_fault(group, name, f"is not {GROUPS[group]}")


def _make_fault(group: str, name: str, wrong: str) -> Fault:
    source = describe(group, name)
    message = f"the plug-in `{name}` of the package {source.package} {source.version} {wrong}"
    return Fault(Diagnostic("not-installed", message, help=f"report it to the authors of {source.package}"))


@contextmanager
def blame_plug_ins() -> Iterator[None]:
    """Raise a Fault that names the package, if code of a plug-in fails in the block."""
    try:
        yield
    except Fault:
        raise
    except Exception as error:
        if fault := _find_blame(error):
            raise fault from error
        raise


def _find_blame(error: Exception) -> Fault | None:
    """Return a Fault for an exception of a plug-in's code, None for any other.

    The code of a plug-in is the module that its entry point names, or another module of the same top-level package.
    """
    owners: dict[str, PlugIn] = {}
    for group in GROUPS:
        for name, entry in find_entry_points(group).items():
            for module in (entry.module, entry.module.partition(".")[0]):
                owners.setdefault(module, describe(group, name))
    for frame, line in reversed([*walk_tb(error.__traceback__)]):
        module = frame.f_globals.get("__name__", "")
        if owner := owners.get(module) or owners.get(module.partition(".")[0]):
            where = f"`{frame.f_code.co_qualname}` ({frame.f_code.co_filename}, line {line})"
            source = f"the package {owner.package} {owner.version}"
            message = f"{source} failed in {where}: {type(error).__name__}: {error}"
            help = f"report it to the authors of {owner.package}; until then {_INSTEAD[owner.group]}, or remove the "
            return Fault(Diagnostic("bad-plug-in", message, help=f"{help}package: pip uninstall {owner.package}"))
    return None


class PlugInTable(MutableMapping[str, T]):
    """Objects by name: the built-in ones, and those that installed packages provide.

    - `group`: the group of entry points.
    - `kind`: the class of the objects. Their attribute `name` is the name in the table.
    """

    def __init__(self, group: str, kind: type[T], built_in: Mapping[str, T]) -> None:
        self.group = group
        self.kind = kind
        self.built_in = dict(built_in)
        self._objects = dict(built_in)

    def __getitem__(self, name: str) -> T:
        if name not in self._objects:
            self._objects[name] = self._load(name)
        return self._objects[name]

    def __setitem__(self, name: str, value: T) -> None:
        self._objects[name] = value

    def __delitem__(self, name: str) -> None:
        del self._objects[name]

    def __iter__(self) -> Iterator[str]:
        """Yield the names of built-in objects, then those of plug-ins that can be loaded."""
        for name in find_entry_points(self.group):
            try:
                self[name]
            except Fault:  # reported when a program names it
                continue
        return iter([*self._objects])

    def __len__(self) -> int:
        return len([*iter(self)])

    def find_plug_in(self, name: str) -> PlugIn | None:
        """Return the package that provides an object; None for a built-in object."""
        return find_plug_in(self.group, name, self.built_in)

    def _load(self, name: str) -> T:
        loaded = load(self.group, name)
        wrong = "" if isinstance(loaded, self.kind) else f"is not {GROUPS[self.group]}"
        if not wrong and loaded.name != name:
            wrong = f"calls itself `{loaded.name}`"
        if wrong:
            raise _make_fault(self.group, name, wrong)
        result: T = loaded
        return result
