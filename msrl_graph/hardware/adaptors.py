"""Adaptors: packages that adapt other packages to a kind of devices.

Invariant: each adaptor is declared once. The kind of the devices declares the adaptor of torch (device_kinds.py). An
engine declares the adaptors of the packages that it needs (backends/spec.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def install_same_version(name: str, version: str) -> str:
    """Return the command that installs an adaptor in a version of its package."""
    return f"pip install '{name}=={version.partition('+')[0]}.*'"


@dataclass(frozen=True)
class Adaptor:
    """A package that adapts another package to a kind of devices.

    - `package`: the adapted package. `name`: the adaptor.
    - `title`: the name of the adaptor in sentences; "" if it is `name`.
    - `required`: whether the package certainly cannot use such devices without the adaptor.
    - `libraries`: the libraries from the maker of the devices that the adaptor needs.
    - `how_to_install`: returns a command, for `name` and the version of the adapted package.
    """

    package: str
    name: str
    title: str = ""
    required: bool = True
    libraries: tuple[str, ...] = ()
    how_to_install: Callable[[str, str], str] = install_same_version

    def install(self, version: str) -> str:
        """Return a command that installs the adaptor for a version of the package."""
        return self.how_to_install(self.name, version)
