"""Installed versions of the packages that engines need.

Invariant: finding out a version does not import the package.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution, metadata
from importlib.metadata import version as installed_version
from urllib.parse import unquote, urlsplit

from ..hardware.adaptors import Adaptor
from ..hardware.device_kinds import DEVICE_KINDS, DeviceKind
from ..hardware.version_pairs import VersionPair
from . import ENGINES
from .spec import EngineSpec


def version(*names: str) -> str:
    """Return the installed version of a package, or "" if it is not installed.

    The result is the version of the first of several names of the package that is installed.
    """
    for name in names:
        try:
            return installed_version(name)
        except PackageNotFoundError:
            continue
    return ""


def missing_packages(spec: EngineSpec, kind: DeviceKind) -> list[str]:
    """Return the packages of an engine that are missing for a kind of devices."""
    return [package for package in spec.packages.on(kind) if not version(*spec.packages.names(package))]


def list_adaptors(kind: DeviceKind) -> list[Adaptor]:
    """Return the adaptors to a kind of devices that engines state."""
    return [adaptor for spec in ENGINES.values() for adaptor in spec.packages.adaptors.get(kind.name, ())]


def list_version_pairs() -> list[VersionPair]:
    """Return the compatible versions that engines state."""
    return [pair for spec in ENGINES.values() for pair in spec.packages.pairs]


def make_install_hint(engine: str, missing: Iterable[str], device: str = "") -> str:
    """Return a command or a hint to install an engine's missing packages.

    The command installs an extra (a set of optional dependencies of msrl-graph): the extra for the device kind, or else
    the extra for the engine. If msrl-graph has neither extra, the command installs the missing packages by name. Some
    device kinds need packages that adapt other packages to the kind. For these device kinds no single command is
    enough, so the result is a hint.
    """
    if device in DEVICE_KINDS and DEVICE_KINDS[device].adaptors:
        return f"install {', '.join(missing)} as described at the top of constraints/{device}.txt, or run msrl-doctor"
    extras = metadata("msrl-graph").get_all("Provides-Extra") or ()
    extra = next((name for name in (device, engine) if name in extras), "")
    return make_extra_command(extra) if extra else f"pip install {' '.join(missing)}"


def make_extra_command(extra: str) -> str:
    """Return a command that installs an extra of msrl-graph.

    The command installs from the folder or wheel from which msrl-graph was installed. pip records this location (PEP
    610), unless pip installed msrl-graph from a package index. In that case the returned command installs from the
    package index.
    """
    place = json.loads(distribution("msrl-graph").read_text("direct_url.json") or "{}")
    url = place.get("url", "")
    if place.get("dir_info", {}).get("editable"):
        return f"pip install --editable {shlex.quote(f'{unquote(urlsplit(url).path)}[{extra}]')}"
    return f"pip install {shlex.quote(f'msrl-graph[{extra}]' + (f' @ {url}' if url else ''))}"
