"""Stacks (packages installed together for a device kind), and version conflicts.

Invariant: what the project knows about package versions that work together is data. The releases of the packages that
an engine needs are in the spec of the engine, and everything else is in this module. Nothing is imported to find
versions, and no package index is contacted. constraints/NAME.txt has the complete lock of a stack, written by
constraints/resolve.py from this data.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product

from .device_kinds import ASCEND, CUDA, HOST
from .version_pairs import PYTHON


@dataclass(frozen=True)
class Stack:
    """Packages that are installed together.

    - `kinds`: the device kinds that the stack is for.
    - `pythons`: the versions of Python that the stack is locked for.
    - `platform`: the platform of the stack's wheels.
    - `pins`: the chosen version of each package.
    - `extras`: the extras of this project that are also installed.
    - `lowest`: if True, dependencies have the lowest allowed versions; if False, the newest.
    - `elsewhere`: packages that belong to the stack but are not in the package index, each with where to get it.
    - `source`: where the pins come from.

    The lock of the stack is computed from these fields.
    """

    name: str
    kinds: tuple[str, ...]
    pythons: tuple[str, ...]
    platform: str
    pins: Mapping[str, str]
    source: str
    extras: tuple[str, ...] = ("run",)
    lowest: bool = False
    elsewhere: Mapping[str, str] = field(default_factory=dict)


HOSTS = "x86_64-manylinux_2_28"  # of PCs
BOARDS = "aarch64-manylinux_2_28"  # of Kunpeng CPUs in hosts with Ascend devices
BUILT = "the CPU build of PyTorch: from PyTorch's own index, or a wheel at hand"
STACKS = {
    stack.name: stack
    for stack in (
        Stack(
            name=HOST.name,
            kinds=(HOST.name,),
            pythons=("3.11", "3.12", "3.13"),
            platform=HOSTS,
            pins={"torch": "2.13.0", "ray": "2.60.0", "transformers": "5.23.0", "tensordict": "0.15.3"},
            extras=("run", "dev", "track"),
            source="make test, make test-python",
            elsewhere={"torch": BUILT},
        ),
        Stack(
            name="torch210",
            kinds=(HOST.name,),
            pythons=("3.11",),
            platform=HOSTS,
            pins={"torch": "2.10.0", "transformers": "5.5.4", "tensordict": "0.11.0"},
            extras=("run", "dev"),
            lowest=True,
            source="make test-torch210",
            elsewhere={"torch": BUILT},
        ),
        Stack(
            name=CUDA.name,
            kinds=(CUDA.name,),
            pythons=("3.11", "3.12"),
            platform=HOSTS,
            pins={
                "torch": "2.13.0",
                "vllm": "0.32.0",
                "megatron-core": "0.16.1",
                "transformers": "5.19.0",
                "tensordict": "0.15.3",
                "ray": "2.60.0",
                "setuptools": "80.10.2",
            },
            source="vllm 0.32.0, requirements; the versions that make test-engines runs on CPUs",
        ),
        Stack(
            name=ASCEND.name,
            kinds=(ASCEND.name,),
            pythons=("3.11", "3.12"),
            platform=BOARDS,
            pins={
                "torch": "2.10.0",
                "torch-npu": "2.10.0.post4",
                "vllm": "0.23.0",
                "vllm-ascend": "0.23.0",
                "megatron-core": "0.16.1",
                "transformers": "5.5.4",
                "tensordict": "0.11.0",
                "setuptools": "80.10.2",
            },
            source="vllm-ascend 0.23.0, requirements.txt and docs/source/community/versioning_policy.md",
            elsewhere={
                "triton-ascend": "3.2.2 from Ascend's own index, as vllm-ascend's installation says; PyPI has 3.2.0",
                "mindspeed": "the branch core_r0.16.0 of its repository, with --no-deps: it asks for numpy <= 1.26.0",
                "cann": "9.1.0, which is no package of Python",
            },
        ),
        Stack(
            name="site",
            kinds=(),  # the stack builds the documentation and runs nothing
            pythons=("3.11", "3.12"),
            platform=HOSTS,
            pins={"mkdocs-material": "9.8.2", "pygments": "2.21.0"},
            extras=("site",),
            source="make site",
        ),
    )
}


@dataclass(frozen=True)
class Release:
    """A package's release, and the versions of Python and other packages it needs.

    `wants` has a version specifier (PEP 440) for each package. `source` says where these needs are documented.
    """

    package: str
    version: str
    wants: Mapping[str, str]
    source: str


# The releases of packages that no engine needs; an engine's spec has those of its packages. The newest is last.
RELEASES = (
    Release(
        "msrl-graph",
        "0.1",
        {
            PYTHON: ">= 3.11",
            "torch": ">= 2.10",
            "ray": ">= 2.52",
            "transformers": ">= 5.5.4",
            "numpy": ">= 2.0",
            "tensordict": ">= 0.11",
        },
        "pyproject.toml",
    ),
    Release("ray-ascend", "0.1", {PYTHON: ">= 3.10, < 3.12", "ray": ">= 2.55"}, "ray-ascend, README"),
)


@dataclass(frozen=True)
class VersionConflict:
    """Two releases that need incompatible versions of a third package, or of Python.

    `package` is the third package.
    """

    first: Release
    second: Release
    package: str

    def __str__(self) -> str:
        needs = (
            f"{release.package} {release.version} wants {release.wants[self.package]} ({release.source})"
            for release in (self.first, self.second)
        )
        return f"{self.package}: {' and '.join(needs)}"


def find_conflict(packages: Collection[str], of_engines: Sequence[Release] = ()) -> VersionConflict | None:
    """Return a conflict between packages that cannot be in one environment, or None.

    `of_engines` are the releases that engines state. The result is None if some combination of known releases of the
    packages is compatible. Otherwise the conflict is
    between the newest releases.
    """
    known = (*RELEASES, *of_engines)
    release_lists = (
        [release for release in known if release.package == package] for package in dict.fromkeys(packages)
    )
    conflict: VersionConflict | None = None
    for combination in product(*(releases for releases in release_lists if releases)):
        conflict = next(
            (conflict_of_pair for pair in combinations(combination, 2) if (conflict_of_pair := _find_conflict(*pair))),
            None,
        )
        if conflict is None:
            break
    return conflict


def _find_conflict(first: Release, second: Release) -> VersionConflict | None:
    both = (package for package in first.wants if package in second.wants)
    return next(
        (
            VersionConflict(first, second, package)
            for package in both
            if not _is_satisfiable(f"{first.wants[package]}, {second.wants[package]}")
        ),
        None,
    )


def _is_satisfiable(text: str) -> bool:
    """Return whether some version fits version specifiers.

    If any does, then also version 0, a stated version, or the first one after a stated version. (Packaging 26.1 can
    tell, but other packages bound it below 26.)
    """
    from packaging.specifiers import SpecifierSet  # later, because most plans need no comparison

    specifiers = SpecifierSet(text)
    stated = [specifier.version.removesuffix(".*") for specifier in specifiers]
    versions = ("0", *stated, *(f"{version}.0.1" for version in stated))
    return any(specifiers.contains(version, prereleases=True) for version in versions)
