"""Presets of devices: names as people write them, and figures with their sources.

Invariant: FLOP/s are without sparsity and with sums in float32, as in training. A device whose figures are not known
for certain has no preset: other_devices.py says how to state it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from ..files.plugins import PlugInTable
from .cluster import SHARES, Device, Figure, Overheads
from .device_kinds import ASCEND, CUDA, HOST


def _datasheet(value: float, basis: str) -> Figure:
    return Figure(value, "datasheet", basis)


def _assumed(value: float, basis: str) -> Figure:
    return Figure(value, "assumed", basis)


_PAPER_LINK = Figure(50e9, "measured", "H2D and D2H, arXiv:2507.19017, experiment setup")
_CM384 = "arXiv:2506.12708, CloudMatrix384"
_AS_A_DIE = f"as one die of the 910C ({_CM384}): no datasheet of the 910B is public"
_LAUNCH = _assumed(10e-6, "a kernel launch takes 5-20 us on current accelerators")
_LATENCY = _assumed(20e-6, "a small collective within a host takes 10-50 us")
OVERHEADS = Overheads(
    turn=_assumed(5e-3, "some calls between processes of Ray"),
    handover=_assumed(4e-3, "four calls between processes of Ray"),
    share=_assumed(4e-3, "six messages between processes of Ray"),
    row=_assumed(10e-6, "some numpy operations"),
    function=_assumed(20e-6, "a call of Python and the check of its result"),
)


def _ascend_910c(name: str, dies: int) -> Device:
    package = "one package of two dies" if dies == 2 else "one die of two"
    return Device(
        name=name,
        backend=ASCEND.name,
        resource=ASCEND.resource,
        memory=_datasheet(64e9 * dies, f"{_CM384}; {package}"),
        flops={
            "bf16": _datasheet(376e12 * dies, f"{_CM384}; {package}"),
            "f32": _assumed(94e12 * dies, "a quarter of bf16"),
        },
        memory_bandwidth=_datasheet(1.6e12 * dies, f"{_CM384}; {package}"),
        host_link=_PAPER_LINK,
        device_link=_datasheet(196e9 * dies, f"{_CM384}, unified bus, one way; {package}"),
        host_memory=_assumed(1.5e12, "a host of 8 packages"),
        launch=_LAUNCH,
        latency=_LATENCY,
        overheads=OVERHEADS,
        peaks=tuple(name for name in SHARES if name != "host_link"),
        dies=dies,
        host_dies=16,
        fabric=_datasheet(196e9 * dies, f"{_CM384}, unified bus, one way, to any device of its 48 hosts; {package}"),
    )


def _nvidia(
    name: str,
    sheet: str,
    memory: float,
    bandwidth: float,
    flops: tuple[float, float],
    pcie: int,
    link: Figure | None = None,
    fabric: Figure | None = None,
) -> Device:
    """Build the preset of an NVIDIA device.

    `sheet` is the source of all figures except `link` and `fabric`. `flops` is two FLOP/s: (bfloat16 without sparsity,
    float32 without tensor cores). `link` is the rate over NVLink; without `link`, the devices of a host are connected
    by PCIe.
    """
    host = _datasheet({4: 32e9, 5: 64e9}[pcie], f"{sheet}, PCIe {pcie} x16 one way")
    host_memory = _assumed(2e12, "a host of 8 devices") if link else _assumed(512e9, "a host of 8 devices on PCIe")
    return Device(
        name=name,
        backend=CUDA.name,
        resource=CUDA.resource,
        memory=_datasheet(memory, sheet),
        flops={
            "bf16": _datasheet(flops[0], f"{sheet}, dense"),
            "f32": _datasheet(flops[1], f"{sheet}, no tensor cores"),
        },
        memory_bandwidth=_datasheet(bandwidth, sheet),
        host_link=host,
        device_link=link or _assumed(host.value, "no NVLink: PCIe, as to the host"),
        host_memory=host_memory,
        launch=_LAUNCH,
        latency=_LATENCY,
        overheads=OVERHEADS,
        peaks=tuple(SHARES),
        fabric=fabric,
    )


def _nvidia_devices() -> Iterator[Device]:
    a100, a800, h100, h200, h20, b200 = (
        f"NVIDIA {model} datasheet" for model in ("A100 SXM", "A800 SXM", "H100 SXM", "H200 SXM", "H20", "HGX B200")
    )

    def nvlink(sheet: str, value: float) -> Figure:
        return _datasheet(value, f"{sheet}, NVLink one way")

    def fabric(rate: float, sheet: str, card: str) -> Figure:
        return _datasheet(rate, f"{sheet}: one {rate * 8 / 1e9:.0f} Gb/s {card} a device")

    hdr = fabric(25e9, "NVIDIA DGX A100 datasheet", "ConnectX-6")
    ndr = fabric(50e9, "NVIDIA DGX H100 datasheet", "ConnectX-7")
    ampere = (312e12, 19.5e12)
    hopper = (989e12, 67e12)
    yield _nvidia("a100", a100, 80e9, 2.039e12, ampere, 4, nvlink(a100, 300e9), hdr)
    yield _nvidia("a100-40gb", a100, 40e9, 1.555e12, ampere, 4, nvlink(a100, 300e9), hdr)
    yield _nvidia("a800", a800, 80e9, 2.039e12, ampere, 4, nvlink(a800, 200e9), hdr)
    yield _nvidia("h100", h100, 80e9, 3.35e12, hopper, 5, nvlink(h100, 450e9), ndr)
    yield _nvidia("h200", h200, 141e9, 4.8e12, hopper, 5, nvlink(h200, 450e9), ndr)
    # An H100 with narrower links (arXiv:2505.09343, section 2).
    narrow = _datasheet(200e9, "arXiv:2505.09343: NVLink of 400 GB/s, half of it one way")
    yield _nvidia("h800", h100, 80e9, 3.35e12, hopper, 5, narrow, fabric(50e9, "arXiv:2505.09343", "ConnectX-7"))
    port = _assumed(50e9, "one 400 Gb/s port a device, as beside an H100")
    yield _nvidia("h20", f"{h20}, as its sellers print it", 96e9, 4e12, (148e12, 44e12), 5, nvlink(h20, 450e9), port)
    dgx = fabric(50e9, "NVIDIA DGX B200 datasheet", "ConnectX-7")
    yield _nvidia("b200", b200, 180e9, 8e12, (2250e12, 75e12), 5, nvlink(b200, 900e9), dgx)
    # A rack joins 18 hosts of 4 devices by NVLink.
    nvl72 = "NVIDIA GB200 NVL72 datasheet, a 72nd of the rack"
    rack = _datasheet(900e9, f"{nvl72}: NVLink one way, to any device of its 18 hosts")
    chip = _assumed(225e9, "NVLink-C2C of 900 GB/s both ways, shared by the two devices of a superchip")
    gb200 = _nvidia("gb200", nvl72, 186e9, 8e12, (2500e12, 80e12), 5, nvlink(nvl72, 900e9), rack)
    yield replace(gb200, host_link=chip, host_memory=_datasheet(960e9, f"{nvl72}: two Grace CPUs"), host_dies=4)
    yield from _nvidia_cards()


def _nvidia_cards() -> Iterator[Device]:
    """Yield devices without NVLink between all devices of a host.

    Bridges of NVLink join two or four of some of them; a plan counts PCIe. Hosts are connected by their `network`.
    """
    a100, a800, h100, h800 = (f"NVIDIA {name} PCIe datasheet" for name in ("A100", "A800", "H100", "H800"))
    yield _nvidia("a100-pcie", a100, 80e9, 1.935e12, (312e12, 19.5e12), 4)
    yield _nvidia("a100-pcie-40gb", a100, 40e9, 1.555e12, (312e12, 19.5e12), 4)
    yield _nvidia("a800-pcie", a800, 80e9, 1.935e12, (312e12, 19.5e12), 4)
    yield _nvidia("h100-pcie", h100, 80e9, 2e12, (756e12, 51e12), 5)
    yield _nvidia("h800-pcie", h800, 80e9, 2e12, (756e12, 51e12), 5)
    yield _nvidia("h100-nvl", "NVIDIA H100 NVL datasheet", 94e9, 3.9e12, (835e12, 60e12), 5)
    yield _nvidia("h200-nvl", "NVIDIA H200 NVL datasheet", 141e9, 4.8e12, (835e12, 60e12), 5)
    yield _nvidia("l4", "NVIDIA L4 datasheet", 24e9, 300e9, (121e12, 30.3e12), 4)
    yield _nvidia("l20", "NVIDIA L20 datasheet, as its sellers print it", 48e9, 864e9, (119.5e12, 59.8e12), 4)
    yield _nvidia("l40", "NVIDIA L40 datasheet", 48e9, 864e9, (181e12, 90.5e12), 4)
    yield _nvidia("l40s", "NVIDIA L40S datasheet", 48e9, 864e9, (362e12, 91.6e12), 4)
    yield _nvidia("a10", "NVIDIA A10 datasheet", 24e9, 600e9, (125e12, 31.2e12), 4)
    yield _nvidia("a30", "NVIDIA A30 datasheet", 24e9, 933e9, (165e12, 10.3e12), 4)
    yield _nvidia("a40", "NVIDIA A40 datasheet", 48e9, 696e9, (149.7e12, 37.4e12), 4)
    yield _nvidia("rtx-a6000", "NVIDIA GA102 whitepaper, RTX A6000", 48e9, 768e9, (154.8e12, 38.7e12), 4)
    ada = "NVIDIA RTX 6000 Ada datasheet; bf16 is a quarter of its 1457 TFLOP/s in fp8 with sparsity"
    yield _nvidia("rtx-6000-ada", ada, 48e9, 960e9, (364e12, 91.1e12), 4)
    pro = "NVIDIA RTX PRO 6000 Blackwell Workstation datasheet; bf16 is an eighth of its 4000 TOPS in fp4 with sparsity"
    yield _nvidia("rtx-pro-6000", pro, 96e9, 1.792e12, (500e12, 125e12), 5)
    yield _nvidia("rtx3090", "NVIDIA GA102 whitepaper, RTX 3090", 24e9, 936e9, (71e12, 35.6e12), 4)
    yield _nvidia("rtx4090", "NVIDIA Ada whitepaper, RTX 4090", 24e9, 1.008e12, (165e12, 82.6e12), 4)
    yield _nvidia("rtx5090", "NVIDIA RTX Blackwell whitepaper, RTX 5090", 32e9, 1.792e12, (209e12, 104.8e12), 5)


def _cpu(name: str) -> Device:
    """Build the preset of a CPU: a device is one rank process with one core.

    The memory is this machine's memory, if the operating system reports its size.
    """
    try:
        size = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        memory = Figure(size, "measured", "this machine's memory, shared by its ranks")
    except (ValueError, OSError, AttributeError):
        memory = _assumed(8e9, "no figure from the system")
    return Device(
        name=name,
        backend=HOST.name,
        resource=HOST.resource,
        memory=memory,
        flops={
            "f32": _assumed(9.6e10, "one core of 3 GHz, two 8-wide fused multiply-adds a cycle"),
            "bf16": _assumed(4.8e10, "one core, half of f32"),
        },
        memory_bandwidth=_assumed(8e9, "one core"),
        host_link=_assumed(5e9, "a memory copy on one core"),
        device_link=_assumed(1e9, "gloo between two processes"),
        host_memory=memory,
        launch=_assumed(12e-6, "an eager torch operator on a CPU"),
        latency=_assumed(200e-6, "gloo between two processes"),
        overheads=OVERHEADS,
        peaks=("flops_bf16", "flops_f32"),
    )


def _presets() -> dict[str, Device]:
    return {
        device.name: device
        for device in (
            _ascend_910c("ascend-910c", 2),
            _ascend_910c("ascend-910c-die", 1),
            Device(
                name="ascend-910b",
                backend=ASCEND.name,
                resource=ASCEND.resource,
                memory=_datasheet(64e9, "Atlas A2: 64 GB a device"),
                flops={"bf16": _assumed(376e12, _AS_A_DIE), "f32": _assumed(94e12, "a quarter of bf16")},
                memory_bandwidth=_assumed(1.6e12, _AS_A_DIE),
                host_link=_PAPER_LINK,
                device_link=_assumed(196e9, "HCCS, one way: seven links of 28 GB/s, one to each other device"),
                mesh=7,
                host_memory=_assumed(1.5e12, "a host of 8 devices"),
                launch=_LAUNCH,
                latency=_LATENCY,
                overheads=OVERHEADS,
                peaks=tuple(name for name in SHARES if name != "host_link"),
                fabric=_datasheet(25e9, "Atlas 800T A2: one 200 Gb/s RoCE port a device"),
            ),
            *_nvidia_devices(),
            _cpu("cpu"),
            _cpu("here"),
        )
    }


DEVICES = PlugInTable("msrl_graph.devices", Device, _presets())
# Other names of devices: servers, short names, and names that tools print.
_ALIASES = {
    "ascend-910b": (
        *("a2", "atlas a2", "atlas 800t a2", "atlas 900 a2", "atlas 900 a2 pod"),
        *("910b1", "910b2", "910b2c", "910b3"),
    ),
    "ascend-910c": ("a3", "atlas a3", "atlas 800t a3", "atlas 900 a3", "atlas 900 a3 superpod", "cloudmatrix384"),
    "ascend-910c-die": ("910_9391", "910_9392"),
    "a100-pcie": ("a100-pcie-80gb", "a100-80gb-pcie"),
    "a100-pcie-40gb": ("a100-40gb-pcie",),
    "a800-pcie": ("a800-80gb-pcie",),
    "h100-pcie": ("h100-80gb-pcie",),
    "h800-pcie": ("h800-80gb-pcie",),
    "b200": ("b200-192gb",),  # of which 180 GB are usable
    "gb200": ("gb200 nvl72",),
    "rtx-a6000": ("a6000",),
    "rtx-6000-ada": ("6000 ada",),
    "rtx-pro-6000": ("pro 6000", "rtx pro 6000 workstation"),
    **{f"rtx{number}": (str(number),) for number in (3090, 4090, 5090)},
}
# Words of makers, by the kind of their devices; "" for makers of other kinds.
_MAKERS = {CUDA.name: "nvidia|geforce|tesla|hgx|dgx", ASCEND.name: "huawei|ascend", "": "amd|instinct|intel|google|aws"}
# Words that do not tell devices apart.
_WORDS = re.compile("|".join((*_MAKERS.values(), "sxm[2-6]?|hbm[23]e?|blackwell|generation|edition")))


def find_preset(name: str) -> str:
    """Return the preset that a name means; "" if there is none.

    Case, punctuation, the manufacturer, and the memory size of the preset's device are ignored: `NVIDIA A100-SXM4-80GB`
    is `a100`. A name with a manufacturer is no device of another one: `A2` is `ascend-910b`, but `NVIDIA A2` is not.
    """
    letters = normalize_name(name)
    makers = {kind for kind, words in _MAKERS.items() if re.search(words, _letters(name))}
    for device in chain(DEVICES.built_in.values(), DEVICES.values()):
        if makers and device.backend in _MAKERS.keys() - makers:
            continue
        calls = {normalize_name(alias) for alias in (device.name, *_ALIASES.get(device.name, ()))}
        if letters in calls | {f"{call}{device.memory.value / 1e9:.0f}gb" for call in calls}:
            return device.name
    return ""


def normalize_name(name: str) -> str:
    """Return a device's name in lower case, without punctuation and makers."""
    return _WORDS.sub("", _letters(name))


def _letters(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())
