"""Stacks: the packages that are installed beside each other for a kind of device, and which cannot be.

Invariant: what the project knows of versions that go together stands here once, as data; nothing is imported or asked
of an index. constraints/NAME.txt has the whole closure of a stack; constraints/resolve.py writes it from here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import combinations, product

from .device_kinds import ASCEND, CUDA, HOST
from .version_pairs import PYTHON, numbers


@dataclass(frozen=True)
class Stack:
    """`kinds` are the devices that it is for, `pythons` the versions of Python that it is locked for, `platform` the
    wheels that it takes. `pins` are the versions that are chosen, `extras` those of this package whose needs come
    beside them, the `lowest` that they allow or the newest; the rest of the lock follows. `elsewhere` are packages that
    belong to it and that the index has not, each with where it comes from. `source` says who pins these versions."""

    name: str
    kinds: tuple[str, ...]
    pythons: tuple[str, ...]
    platform: str
    pins: Mapping[str, str]
    source: str
    extras: tuple[str, ...] = ("run",)
    lowest: bool = False
    elsewhere: Mapping[str, str] = field(default_factory=dict)


HOSTS, BOARDS = "x86_64-manylinux_2_28", "aarch64-manylinux_2_28"  # of PCs; of Kunpeng, beside Ascend devices
BUILT = "the CPU build of PyTorch: from PyTorch's own index, or a wheel at hand"
STACKS = {
    stack.name: stack
    for stack in (
        Stack(
            name=HOST.name,
            kinds=(HOST.name,),
            pythons=("3.11", "3.12"),
            platform=HOSTS,
            pins={"torch": "2.13.0", "ray": "2.60.0", "transformers": "5.23.0", "tensordict": "0.15.3"},
            extras=("run", "dev"),
            source="make test, make test-python312",
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
    )
}


@dataclass(frozen=True)
class VersionRange:
    """Versions from `least` on, and `below` another; "" is no bound."""

    least: str = ""
    below: str = ""

    def __str__(self) -> str:
        bounds = (f">= {self.least}" * bool(self.least), f"< {self.below}" * bool(self.below))
        return ", ".join(b for b in bounds if b)

    def meets(self, other: VersionRange) -> bool:
        """Whether a version can be in both."""
        least = max(numbers(self.least), numbers(other.least))
        return all(least < numbers(r.below) for r in (self, other) if r.below)


def _exactly(version: str) -> VersionRange:
    *parts, last = version.split(".")
    return VersionRange(version, ".".join((*parts, str(int(last) + 1))))


@dataclass(frozen=True)
class Release:
    """What a release of a package wants of Python and of the packages beside it, as its `source` says."""

    package: str
    version: str
    wants: Mapping[str, VersionRange]
    source: str


# The newest of a package last.
RELEASES = (
    Release(
        "msrl-graph",
        "0.1",
        {
            PYTHON: VersionRange("3.11"),
            "torch": VersionRange("2.10"),
            "ray": VersionRange("2.52"),
            "transformers": VersionRange("5.5.4"),
            "numpy": VersionRange("2.0"),
            "tensordict": VersionRange("0.11"),
        },
        "pyproject.toml",
    ),
    Release(
        "vllm-ascend",
        "0.23.0",
        {PYTHON: VersionRange("3.10", "3.13"), "torch": _exactly("2.10.0"), "transformers": _exactly("5.5.4")},
        STACKS[ASCEND.name].source,
    ),
    Release(
        "ray-ascend", "0.1", {PYTHON: VersionRange("3.10", "3.12"), "ray": VersionRange("2.55")}, "ray-ascend, README"
    ),
    Release(
        "megatron-bridge",
        "0.3.1",
        {"transformers": VersionRange(below="5.0"), "torch": VersionRange("2.6")},
        "its metadata on PyPI",
    ),
    Release(
        "megatron-bridge", "0.6.0", {PYTHON: VersionRange("3.12", "3.13")}, "Megatron-Bridge 0.6.0, pyproject.toml"
    ),
    Release(
        "mindspeed",
        "26.1.0_core_r0.12.1",
        {
            PYTHON: _exactly("3.10"),
            "torch": _exactly("2.7.1"),
            "megatron-core": _exactly("0.12.1"),
            "numpy": VersionRange(below="1.26.1"),
        },
        "MindSpeed 26.1.0, docs/zh/release_notes_core.md and requirements.txt",
    ),
    # Its README has Python 3.10 and torch 2.7.1, too; verl runs it with Python 3.12 and torch 2.10.
    Release(
        "mindspeed", "core_r0.16.0", {"megatron-core": VersionRange("0.16", "0.17")}, "verl, ascend_tutorial/get_start"
    ),
)


@dataclass(frozen=True)
class VersionConflict:
    """Two releases that want of a `package` (or of Python) what no version of it is."""

    first: Release
    second: Release
    package: str

    def __str__(self) -> str:
        told = (
            f"{r.package} {r.version} wants {r.wants[self.package]} ({r.source})" for r in (self.first, self.second)
        )
        return f"of {self.package} {' and '.join(told)}"


def clash(packages: Collection[str]) -> VersionConflict | None:
    """Why packages cannot be in one environment, by the newest releases of each; None where releases of all of them go
    together, as far as is known."""
    known = ([r for r in RELEASES if r.package == p] for p in dict.fromkeys(packages))
    found: VersionConflict | None = None
    for chosen in product(*(releases for releases in known if releases)):
        found = next((c for pair in combinations(chosen, 2) if (c := _between(*pair))), None)
        if found is None:
            break
    return found


def _between(first: Release, second: Release) -> VersionConflict | None:
    both = (p for p in first.wants if p in second.wants)
    return next((VersionConflict(first, second, p) for p in both if not first.wants[p].meets(second.wants[p])), None)
