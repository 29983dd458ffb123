"""Compatible versions of drivers, toolkits, torch and its plug-ins, and engines.

Invariant: everything that msrl_graph knows about such versions is data: pairs, each with its source. The pairs of an
engine's packages are in the spec of the engine, and all other pairs are in this module. The caller provides the
versions; this module does not look for them. Constants of this module are the names of drivers,
CUDA, CANN and Python. All other packages have the names that `pip list` prints.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

CANN = "CANN"
CANN_DRIVER = "Ascend driver"
CUDA = "CUDA"
CUDA_DRIVER = "NVIDIA driver"
PYTHON = "Python"


@dataclass(frozen=True)
class VersionPair:
    """The versions of `other` that are compatible with releases of `package`.

    The rule applies to the releases of `package` whose version begins with `release`. Exactly one of three fields is
    set, and says which versions of `other` are compatible:

    - `same`: versions whose first `same` numbers equal the first `same` numbers of the version of `package`.
    - `exact`: versions that begin with `exact`.
    - `least`: versions that are at least `least`, and lower than `below` if `below` is set.
    """

    package: str
    other: str
    source: str
    release: str = ""
    same: int = 0
    exact: str = ""
    least: str = ""
    below: str = ""

    def wanted(self, version: str) -> str:
        """Describe the versions of the second package that fit `version` of the first."""
        if self.least:
            return f"{self.least} or later" + (f", below {self.below}" if self.below else "")
        return self.exact or ".".join(map(str, numbers(version)[: self.same]))

    def holds(self, version: str, other: str) -> bool:
        parts = numbers(other)
        if self.least:
            return parts >= numbers(self.least) and not (self.below and parts >= numbers(self.below))
        wanted = numbers(self.wanted(version))
        return parts[: len(wanted)] == wanted


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version.

    For example, `2.10.0.post4`, `2.10.0rc1` and `2.10.0+cpu` all give (2, 10, 0). The package `packaging` rejects some
    versions of drivers and CANN, such as `25.0.rc1.1` and `8.0.RC3.alpha001`.
    """
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


_PLUGIN = "github.com/Ascend/pytorch, README: the first three numbers are those of torch"
_CANN = "CANN 9.1.0, Release Notes: CANN and Ascend HDK Version Compatibility"
_CUDA = "docs.nvidia.com/deploy/cuda-compatibility, minor version compatibility"
DRIVER_PAIRS = (
    VersionPair(CANN, CANN_DRIVER, _CANN, "9.1", least="25.2"),
    VersionPair(CANN, CANN_DRIVER, _CANN, "9.0", least="25.0"),
    VersionPair(CANN, CANN_DRIVER, _CANN, "8.5", least="25.0"),
    VersionPair(CUDA, CUDA_DRIVER, _CUDA, "13", least="580"),
    VersionPair(CUDA, CUDA_DRIVER, _CUDA, "12", least="525"),
    VersionPair(CUDA, CUDA_DRIVER, _CUDA, "11", least="450"),
)
TORCH_PAIRS = (VersionPair("torch-npu", "torch", _PLUGIN, same=3),)


def find_broken_pairs(versions: Mapping[str, str], of_engines: Iterable[VersionPair] = ()) -> Iterator[VersionPair]:
    """Yield the pairs with incompatible versions, in the order in which to fix them.

    `versions` has the version of each installed package. `of_engines` are the pairs that engines state. A pair is
    skipped if one of its packages is not in `versions`. A pair is also skipped if an earlier pair requires another
    version of one of its packages.
    """
    changed: set[str] = set()
    for pair in (*DRIVER_PAIRS, *of_engines, *TORCH_PAIRS):
        version = versions.get(pair.package, "")
        other = versions.get(pair.other, "")
        applies = version and other and not {pair.package, pair.other} & changed
        if applies and version.startswith(pair.release) and not pair.holds(version, other):
            changed.add(pair.other)
            yield pair
