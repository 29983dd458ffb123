"""Devices as people write them: each name is a preset with its data sheet's figures, or a message that helps.

The figures are in GB, TFLOP/s in bfloat16 and GB/s of the memory, without sparsity. The last column says where they are
printed. Many data sheets print twice the rate, with sparsity.
"""

from __future__ import annotations

import re

import pytest

from msrl_graph import ProgramWarning
from msrl_graph.compiler.pipeline import compile
from msrl_graph.diagnostics import Fault
from msrl_graph.hardware.device_presets import DEVICES, find_preset
from msrl_graph.hardware.other_devices import EXAMPLE, OPEN, OTHER_DEVICES

NAMES: dict[tuple[str, ...], tuple[str, float, float, float, str]] = {
    ("910b", "Ascend 910B", "Ascend910B", "910B1", "910B2", "910B3", "Ascend 910B3", "ascend_910b3", "Ascend910B2C"): (
        "ascend-910b",
        64,
        376,
        1600,
        "64 GB: Atlas 800T A2 data sheet; the rest as a die of the 910C",
    ),
    ("A2", "Atlas A2", "Atlas 800T A2", "Atlas 900 A2 PoD"): (
        "ascend-910b",
        64,
        376,
        1600,
        "64 GB: Atlas 800T A2 data sheet; the rest as a die of the 910C",
    ),
    ("910C", "Ascend 910C", "A3", "Atlas 800T A3", "Atlas 900 A3 SuperPoD", "CloudMatrix384"): (
        "ascend-910c",
        128,
        752,
        3200,
        "arXiv:2506.12708, two dies",
    ),
    ("Ascend910_9391", "ascend-910c-die"): ("ascend-910c-die", 64, 376, 1600, "arXiv:2506.12708, section 3.3"),
    ("A100", "a100-80gb", "A100_SXM4", "NVIDIA A100-SXM4-80GB", "A100 SXM 80 GB"): (
        "a100",
        80,
        312,
        2039,
        "A100 data sheet, SXM column",
    ),
    ("A100-40GB", "NVIDIA A100-SXM4-40GB"): ("a100-40gb", 40, 312, 1555, "A100 data sheet of 2020"),
    ("A100 PCIe", "NVIDIA A100 80GB PCIe", "NVIDIA A100-PCIE-80GB"): (
        "a100-pcie",
        80,
        312,
        1935,
        "A100 data sheet, PCIe column",
    ),
    ("NVIDIA A100-PCIE-40GB",): ("a100-pcie-40gb", 40, 312, 1555, "A100 data sheet of 2020"),
    ("A800", "NVIDIA A800-SXM4-80GB", "A800 80GB"): (
        "a800",
        80,
        312,
        2039,
        "A800 data sheet: as A100, narrower NVLink",
    ),
    ("NVIDIA A800 80GB PCIe",): ("a800-pcie", 80, 312, 1935, "A800 data sheet, PCIe column"),
    ("H100", "nvidia h100", "H100 SXM", "NVIDIA-H100-SXM5-80GB", "NVIDIA H100 80GB HBM3", "DGX H100", "HGX H100"): (
        "h100",
        80,
        989,
        3350,
        "H100 data sheet, SXM column: 1,979 with sparsity",
    ),
    ("H100 PCIe", "NVIDIA H100 PCIe", "h100-pcie-80gb"): (
        "h100-pcie",
        80,
        756,
        2000,
        "H100 PCIe data sheet: 1,513 with sparsity",
    ),
    ("H100 NVL", "NVIDIA H100 NVL", "H100-NVL-94GB"): (
        "h100-nvl",
        94,
        835,
        3900,
        "H100 data sheet, NVL column: 1,671 with sparsity",
    ),
    ("H800", "NVIDIA H800", "H800-SXM5-80GB"): (
        "h800",
        80,
        989,
        3350,
        "arXiv:2505.09343, section 2: an H100 with narrower NVLink",
    ),
    ("H800 PCIe",): ("h800-pcie", 80, 756, 2000, "as the H100 PCIe"),
    ("H20", "NVIDIA H20", "H20-96GB"): ("h20", 96, 148, 4000, "sellers' data sheets: 148 in bfloat16, HBM3"),
    ("H200", "NVIDIA H200", "H200 SXM", "H200-141GB"): (
        "h200",
        141,
        989,
        4800,
        "H200 data sheet, SXM column: 1,979 with sparsity",
    ),
    ("H200 NVL", "NVIDIA H200 NVL"): ("h200-nvl", 141, 835, 4800, "H200 data sheet, NVL column: 1,671 with sparsity"),
    ("B200", "NVIDIA B200", "HGX B200", "DGX B200", "B200-192GB"): (
        "b200",
        180,
        2250,
        8000,
        "DGX B200 data sheet, an eighth of 1,440 GB, 64 TB/s and 36 PFLOP/s with sparsity",
    ),
    ("GB200", "NVIDIA GB200", "GB200 NVL72"): (
        "gb200",
        186,
        2500,
        8000,
        "GB200 NVL72 data sheet, a 72nd of 13.4 TB and 360 PFLOP/s with sparsity",
    ),
    ("L4", "NVIDIA L4"): ("l4", 24, 121, 300, "L4 data sheet: 242 with sparsity"),
    ("L20", "NVIDIA L20"): ("l20", 48, 119.5, 864, "sellers' data sheets"),
    ("L40", "NVIDIA L40"): ("l40", 48, 181, 864, "L40 data sheet: 181.05"),
    ("L40S", "NVIDIA L40S", "l40s-48gb"): ("l40s", 48, 362, 864, "L40S data sheet: 362.05"),
    ("A10", "NVIDIA A10", "A10-24GB"): ("a10", 24, 125, 600, "A10 data sheet"),
    ("A30", "NVIDIA A30"): ("a30", 24, 165, 933, "A30 data sheet"),
    ("A40", "NVIDIA A40"): ("a40", 48, 149.7, 696, "A40 data sheet"),
    ("A6000", "RTX A6000", "NVIDIA RTX A6000"): ("rtx-a6000", 48, 154.8, 768, "GA102 whitepaper, table of RTX A6000"),
    ("RTX 6000 Ada", "NVIDIA RTX 6000 Ada Generation"): (
        "rtx-6000-ada",
        48,
        364,
        960,
        "RTX 6000 Ada data sheet: 1,457 in fp8 with sparsity",
    ),
    ("RTX PRO 6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"): (
        "rtx-pro-6000",
        96,
        500,
        1792,
        "RTX PRO 6000 data sheet: 4,000 in fp4 with sparsity",
    ),
    ("RTX 3090", "3090", "NVIDIA GeForce RTX 3090"): ("rtx3090", 24, 71, 936, "GA102 whitepaper, appendix A"),
    ("RTX-4090", "4090", "NVIDIA GeForce RTX 4090"): ("rtx4090", 24, 165, 1008, "Ada whitepaper, appendix A: 165.2"),
    ("RTX 5090", "5090", "NVIDIA GeForce RTX 5090"): (
        "rtx5090",
        32,
        209,
        1792,
        "RTX Blackwell whitepaper, appendix A: 209.5",
    ),
}
CASES = [(name, *expected) for names, expected in NAMES.items() for name in names]
# Why there is no preset, and a part of what to state.
OTHERS = {
    "910B4": ("does not publish all figures", 'device = "ascend-910b", memory = 32 GB'),
    "Atlas 800I A2": ("does not publish all figures", 'device = "ascend-910b"'),
    "Ascend 910A": ("does not publish all figures", 'device = "ascend-910b"'),
    "Ascend 950": ("does not publish all figures", "memory = 128 GB, memory_bandwidth = 1.6 TB/s"),
    "Ascend 950PR": ("does not publish all figures", "memory = 128 GB, memory_bandwidth = 1.6 TB/s"),
    "Ascend 950DT": ("does not publish all figures", "memory = 144 GB, memory_bandwidth = 4 TB/s"),
    "MI210": ("AMD can be planned only", "memory = 64 GB, memory_bandwidth = 1.6 TB/s, flops_bf16 = 181 TFLOP/s"),
    "MI250": ("AMD can be planned only", "memory = 128 GB, memory_bandwidth = 3.2 TB/s, flops_bf16 = 362.1 TFLOP/s"),
    "AMD MI300A": ("AMD can be planned only", "memory = 128 GB, memory_bandwidth = 5.3 TB/s, flops_bf16 = 980.6"),
    "Gaudi 2": ("Intel can be planned only", "memory = 96 GB, memory_bandwidth = 2.45 TB/s, flops_bf16 = 432 TFLOP/s"),
    "Intel Gaudi3": ("Intel can be planned only", "memory = 128 GB, memory_bandwidth = 3.7 TB/s, flops_bf16 = 1835"),
    "TPU v4": ("Google can be planned only", "memory = 32 GB, memory_bandwidth = 1.2 TB/s, flops_bf16 = 275 TFLOP/s"),
    "TPU v5e": (
        "Google can be planned only",
        "memory = 16 GB, memory_bandwidth = 0.819 TB/s, flops_bf16 = 197 TFLOP/s",
    ),
    "TPU-v5p": (
        "Google can be planned only",
        "memory = 95 GB, memory_bandwidth = 2.765 TB/s, flops_bf16 = 459 TFLOP/s",
    ),
    "TPU v6e": ("Google can be planned only", "memory = 32 GB, memory_bandwidth = 1.64 TB/s, flops_bf16 = 918 TFLOP/s"),
    "Trainium2": ("AWS can be planned only", "memory = 103 GB, memory_bandwidth = 2.9 TB/s, flops_bf16 = 667 TFLOP/s"),
    "NVIDIA B300 SXM6 AC": ("sources disagree", "memory_bandwidth = 8 TB/s"),
    "NVIDIA GH200 120GB": ("does not publish all figures", "memory = 96 GB"),
    "RTX PRO 6000 Max-Q": ("does not publish all figures", "memory = 96 GB, memory_bandwidth = 1.792 TB/s"),
    "MI250X": ("AMD can be planned only", "memory = 128 GB, memory_bandwidth = 3.2 TB/s, flops_bf16 = 383 TFLOP/s"),
    "MI300X": ("AMD can be planned only", "memory = 192 GB, memory_bandwidth = 5.3 TB/s, flops_bf16 = 1307 TFLOP/s"),
    "AMD Instinct MI325X": ("AMD can be planned only", "memory = 256 GB, memory_bandwidth = 6 TB/s"),
    "MI350X": ("AMD can be planned only", "memory = 288 GB, memory_bandwidth = 8 TB/s"),
    "MI355X": ("AMD can be planned only", "memory = 288 GB, memory_bandwidth = 8 TB/s, flops_bf16 = 2500 TFLOP/s"),
    "B300": ("sources disagree", "memory_bandwidth = 8 TB/s"),
    "GB300": ("sources disagree", 'device = "gb200"'),
    "GH200": ("does not publish all figures", "memory = 96 GB"),
    "V100": ("no bfloat16", "memory = 32 GB, memory_bandwidth = 0.9 TB/s"),
    "Tesla V100-SXM2-16GB": ("no bfloat16", "memory = 16 GB"),
    "T4": ("no bfloat16", "memory = 16 GB"),
    "H20-141GB": ("does not publish all figures", "memory = 141 GB"),
    "A10G": ("does not publish all figures", "memory = 24 GB"),
    "RTX 3090 Ti": ("does not publish all figures", "memory = 24 GB"),
    "RTX PRO 6000 Blackwell Server Edition": ("does not publish all figures", "memory = 96 GB"),
}


@pytest.mark.parametrize(("name", "preset", "memory", "bf16", "bandwidth", "source"), CASES)
def test_a_name_is_a_preset_with_the_figures_of_a_data_sheet(
    name: str, preset: str, memory: float, bf16: float, bandwidth: float, source: str
) -> None:
    assert find_preset(name) == preset
    device = DEVICES[preset]
    found = (device.memory.value / 1e9, device.flops["bf16"].value / 1e12, device.memory_bandwidth.value / 1e9)
    assert found == pytest.approx((memory, bf16, bandwidth), rel=1e-9), source
    assert device.memory.basis and device.flops["bf16"].basis and device.memory_bandwidth.basis


def test_the_names_are_many_and_each_preset_has_its_own() -> None:
    assert len(CASES) + len(OTHERS) >= 100 and {preset for preset, *_ in NAMES.values()} == {*DEVICES} - {"cpu", "here"}
    assert all(find_preset(name) == name for name in DEVICES)


def compiled(attributes: str, devices: int = 4) -> None:
    text = f"""import grpo
cluster pod {{ {attributes}, devices_per_node = {devices} }}
deploy grpo on pod {{
  model policy = "tiny"
  data source = "rows.jsonl" {{ prompt = "p", answer = "a" }}
  set prompts = 8
  set response_len = 64
}}
"""
    compile("p.rlg", text=text)


@pytest.mark.filterwarnings("ignore::msrl_graph.ProgramWarning")
@pytest.mark.parametrize("name", OTHERS)
def test_a_device_without_a_preset_has_a_message_whose_statement_works(name: str) -> None:
    reason, figures = OTHERS[name]
    assert find_preset(name) == ""
    with pytest.raises(Fault) as caught:
        compiled(f'device = "{name}"')
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "unknown-device" and reason in diagnostic.help and figures in diagnostic.help
    statement = re.search(r"state its figures: `(.*?)`", diagnostic.help)
    assert statement is not None
    assert (f"a number for each `{OPEN}`" in diagnostic.help) == (OPEN in statement[1])
    compiled(statement[1].replace(OPEN, "64"))


def test_other_devices_have_their_message_once() -> None:
    names = [name for device in OTHER_DEVICES for name in device.names]
    assert len({*names}) == len(names) and all(device.like in DEVICES for device in OTHER_DEVICES)
    assert [name for name in names if find_preset(name)] == []


UNKNOWN = ["gpu", "nvidia", "ascend", "", "h100-64gb", "mi9000", "NVIDIA A2", "AMD A100", "RTX 4080", "B100"]


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_name_has_a_message_that_says_how_to_state_a_device(name: str) -> None:
    assert find_preset(name) == ""
    with pytest.raises(Fault) as caught:
        compiled(f'device = "{name}"')
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "unknown-device" and EXAMPLE in diagnostic.help
    statement = re.search(r"state its figures: `(.*?)`", EXAMPLE)
    assert statement is not None
    compiled(statement[1])


def test_a_host_of_a_rack_has_four_devices() -> None:
    with pytest.warns(ProgramWarning, match="hosts have 4 `gb200`, but 8 are stated"):
        compiled('device = "GB200"', 8)
