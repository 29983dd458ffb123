"""The packages of Megatron-Core, and what their releases need."""

from __future__ import annotations

from ...hardware.adaptors import Adaptor
from ...hardware.device_kinds import ASCEND
from ...hardware.stacks import Release
from ...hardware.version_pairs import PYTHON, VersionPair
from ..spec import EnginePackages


def _clone(_: str, version: str) -> str:
    """Return how to install MindSpeed, which is on no package index."""
    return f"in a clone of MindSpeed: git checkout core_r{'.'.join(version.split('.')[:2])}.0; pip install -e ."


PACKAGES = EnginePackages(
    needs=("megatron-core",),
    adaptors={
        ASCEND.name: (Adaptor("megatron-core", "mindspeed", title="MindSpeed", required=False, how_to_install=_clone),)
    },
    pairs=(
        VersionPair(
            "megatron-core", "mindspeed", "MindSpeed, docs: a branch core_rX.Y.Z is for Megatron-Core X.Y", same=2
        ),
    ),
    releases=(
        Release(
            "megatron-bridge",
            "0.3.1",
            {"transformers": "< 5.0", "torch": ">= 2.6"},
            "its metadata on PyPI",
        ),
        Release("megatron-bridge", "0.6.0", {PYTHON: ">= 3.12, < 3.13"}, "Megatron-Bridge 0.6.0, pyproject.toml"),
        Release(
            "mindspeed",
            "26.1.0_core_r0.12.1",
            {
                PYTHON: "== 3.10.*",
                "torch": "== 2.7.1.*",
                "megatron-core": "== 0.12.1.*",
                "numpy": "< 1.26.1",
            },
            "MindSpeed 26.1.0, docs/zh/release_notes_core.md and requirements.txt",
        ),
        # Its README names Python 3.10 and torch 2.7.1 too; verl runs it with Python 3.12 and torch 2.10.
        Release("mindspeed", "core_r0.16.0", {"megatron-core": ">= 0.16, < 0.17"}, "verl, ascend_tutorial/get_start"),
    ),
)
