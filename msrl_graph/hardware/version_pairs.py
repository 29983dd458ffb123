"""Which versions go together, each pair with who says so: drivers, toolkits, torch and its plug-ins, engines.

Invariant: what the package knows of versions that go together stands here once. Who asks brings the versions, and
nothing is read to find them. Drivers and CANN are called as below; all else is called as `pip list` calls it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

CANN = "CANN"
CANN_DRIVER = "Ascend driver"
CUDA = "CUDA"
CUDA_DRIVER = "NVIDIA driver"
PYTHON = "Python"


@dataclass(frozen=True)
class VersionPair:
    """`package`, in releases that begin with `release`, goes with versions of `other`: those whose first `same` numbers
    are its own, or those that begin with `exact`, or those from `least` on and below `below`."""

    package: str
    other: str
    source: str
    release: str = ""
    same: int = 0
    exact: str = ""
    least: str = ""
    below: str = ""

    def wanted(self, version: str) -> str:
        """What it goes with in a version of its own, in words."""
        if self.least:
            return f"{self.least} or later" + (f", below {self.below}" if self.below else "")
        return self.exact or ".".join(map(str, numbers(version)[: self.same]))

    def holds(self, version: str, other: str) -> bool:
        found = numbers(other)
        if self.least:
            return found >= numbers(self.least) and not (self.below and found >= numbers(self.below))
        wanted = numbers(self.wanted(version))
        return found[: len(wanted)] == wanted


def numbers(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with: (2, 10, 0) of `2.10.0.post4`, `2.10.0rc1` and `2.10.0+cpu`."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


_PLUGIN = "github.com/Ascend/pytorch, README: the first three numbers are those of torch"
_VLLM = "vllm-ascend, docs/source/community/versioning_policy.md"
_CANN = "CANN 9.1.0, Release Notes: CANN and Ascend HDK Version Compatibility"
_CUDA = "docs.nvidia.com/deploy/cuda-compatibility, minor version compatibility"
PAIRS = (
    VersionPair(CANN, CANN_DRIVER, _CANN, "9.1", least="25.2"),
    VersionPair(CANN, CANN_DRIVER, _CANN, "9.0", least="25.0"),
    VersionPair(CANN, CANN_DRIVER, _CANN, "8.5", least="25.0"),
    VersionPair(CUDA, CUDA_DRIVER, _CUDA, "13", least="580"),
    VersionPair(CUDA, CUDA_DRIVER, _CUDA, "12", least="525"),
    VersionPair(CUDA, CUDA_DRIVER, _CUDA, "11", least="450"),
    VersionPair("vllm-ascend", "vllm", _VLLM, same=3),
    VersionPair("vllm-ascend", "torch", _VLLM, "0.23", exact="2.10.0"),
    VersionPair("vllm-ascend", "torch-npu", _VLLM, "0.23", exact="2.10.0"),
    VersionPair("vllm-ascend", CANN, _VLLM, "0.23", exact="9.1"),
    VersionPair("vllm-ascend", PYTHON, _VLLM, "0.23", least="3.10", below="3.13"),
    VersionPair("torch-npu", "torch", _PLUGIN, same=3),
    VersionPair("megatron-core", "mindspeed", "MindSpeed, docs: a branch core_rX.Y.Z is for Megatron-Core X.Y", same=2),
)


def broken(versions: Mapping[str, str]) -> Iterator[VersionPair]:
    """The pairs that do not hold among versions by what they are of, the first that is to be mended first: what has to
    change its version is in no other. Of what has no version nothing is said."""
    changed: set[str] = set()
    for pair in PAIRS:
        version = versions.get(pair.package, "")
        other = versions.get(pair.other, "")
        known = version and other and not {pair.package, pair.other} & changed
        if known and version.startswith(pair.release) and not pair.holds(version, other):
            changed.add(pair.other)
            yield pair
