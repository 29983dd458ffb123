"""Figures of devices, hosts and links, with the source of each figure.

Invariant: every figure has a `source` (measured, derived, datasheet, assumed or stated) and a `basis`, a text that says
where the figure comes from. A figure of a device is a peak if `Device.peaks` lists its name, otherwise a rate that is
reached. For a peak, plans assume that only a fraction (SHARES) is reached.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Literal

from ..diagnostics import NOWHERE, Span
from ..files.plugins import PlugInTable
from .device_kinds import ASCEND, CUDA, DEVICE_KINDS, HOST, DeviceKind

Source = Literal["measured", "derived", "datasheet", "assumed", "stated"]
# Sources in ascending order of trust. A derived figure is as good as its weakest input.
TRUST: tuple[Source, ...] = ("assumed", "datasheet", "stated", "measured", "derived")


@dataclass(frozen=True)
class Figure:
    """A number, its source, and a text that says where the number comes from."""

    value: float
    source: Source
    basis: str = ""


def weakest(*figures: Figure) -> Source:
    return min((figure.source for figure in figures), key=TRUST.index)


# The share of a device's peak figure that is reached.
SHARES = {
    "flops_bf16": Figure(0.4, "assumed", "40 % of peak FLOP/s"),
    "flops_f32": Figure(0.4, "assumed", "40 % of peak FLOP/s"),
    "memory_bandwidth": Figure(0.7, "assumed", "70 % of peak memory bandwidth"),
    "host_link": Figure(0.8, "assumed", "80 % of a link to the host"),
    "device_link": Figure(0.6, "assumed", "60 % of a link"),
    "fabric": Figure(0.6, "assumed", "60 % of a link"),
}


# Rates at several sizes of an operation, in ascending order of size.
Curve = tuple[tuple[float, float], ...]


def rate_at(curve: Curve, size: float) -> float:
    """Return the rate at a size, from a curve of measured rates.

    Between two sizes of the curve, the rate is interpolated linearly on logarithmic scales. Below the curve's smallest
    size and above its largest size, the rate is constant. So in these ranges the time, size / rate, is proportional to
    the size.
    """
    before = [point for point in curve if point[0] <= size] or [curve[0]]
    after = [point for point in curve if point[0] >= size] or [curve[-1]]
    low, slow = before[-1]
    high, fast = after[0]
    if not low < size < high:
        return slow
    part = math.log(size / low) / math.log(high / low)
    return float(math.exp((1 - part) * math.log(slow) + part * math.log(fast)))


@dataclass(frozen=True)
class Collective:
    """The time of a collective among the devices of a host.

    The time is `least` + b / `rate` seconds, where b is the number of bytes that a device receives (`rate`: bytes/s).
    """

    least: Figure
    rate: Figure


@dataclass(frozen=True)
class Overheads:
    """The seconds that the runtime takes in addition to computing and moving data."""

    turn: Figure  # to begin and end an iteration
    handover: Figure  # until the next node has a node's rows, through the dock
    # CPU time of the dock's processes for each share of rows that a data-parallel group of a node gets and returns
    share: Figure
    row: Figure  # to convert a row into tensors and back
    function: Figure  # to call a Python function with a row, without the function's own time


@dataclass(frozen=True)
class Device:
    """A type of device, such as `h100`, with its figures.

    Figures are in bytes, bytes/s and FLOP/s, as a program states them. For a peak, methods and properties return the
    fraction that is reached. `resource` is Ray's name for one device. `curves` has rates measured at several sizes:

    - `f32`, `bf16`: FLOP/s of a matrix product in this dtype. The size is the product's FLOP.
    - `attention`: FLOP/s of attention. The size is the FLOP of one head of a row.
    - `memory_bandwidth`, `layer`: bytes/s of the memory. The size is the bytes that an operation moves. The memory is
      accessed as a stream (`memory_bandwidth`), or in the order in which an eager layer accesses it (`layer`).
    """

    name: str
    backend: str  # of DEVICE_KINDS
    resource: str
    memory: Figure
    flops: dict[str, Figure]  # by dtype
    memory_bandwidth: Figure
    host_link: Figure  # one way, per device
    device_link: Figure  # within a host, per device
    host_memory: Figure
    launch: Figure  # minimum seconds of a kernel
    latency: Figure  # minimum seconds of a collective
    overheads: Overheads
    peaks: tuple[str, ...]  # the figures in SHARES that are peaks
    dies: int = 1  # dies per device; each process has one die
    host_dies: int = 0  # dies per host; 0: any number
    fabric: Figure | None = None  # between hosts, per device, for collectives; None: the hosts' network
    collectives: dict[str, Collective] = field(default_factory=dict)  # by kind, if measured
    curves: dict[str, Curve] = field(default_factory=dict)

    @property
    def kind(self) -> DeviceKind:
        return DEVICE_KINDS[self.backend]

    def rate(self, operation: str, size: float) -> Figure:
        """Return the rate that an operation of the given size reaches.

        `operation` is `f32`, `bf16` or `attention` (FLOP/s), or `memory_bandwidth` or `layer` (bytes/s); see `curves`.
        """
        name = (
            "memory_bandwidth"
            if operation in ("memory_bandwidth", "layer")
            else f"flops_{operation if operation in self.flops else next(iter(self.flops))}"
        )
        reached = self._reached[name]
        curve = self.curves.get(operation)
        return Figure(rate_at(curve, size), "measured", reached.basis) if curve and size > 0 else reached

    def figure(self, name: str) -> Figure | None:
        """Return the figure of the cluster attribute `name`, such as `flops_bf16`."""
        figure = self.flops.get(name.removeprefix("flops_")) if name.startswith("flops_") else getattr(self, name)
        assert figure is None or isinstance(figure, Figure)
        return figure

    def share(self, name: str) -> float:
        """Return the fraction of a figure that is reached: 1 if the figure is not a peak."""
        return SHARES[name].value if name in self.peaks else 1.0

    @cached_property
    def _reached(self) -> dict[str, Figure]:
        """The rates that are reached; the keys are the names of figures in SHARES."""
        reached = {name: figure for name in SHARES if (figure := self.figure(name)) is not None}
        for name in reached.keys() & {*self.peaks}:
            figure = reached[name]
            share = SHARES[name]
            reached[name] = Figure(figure.value * share.value, weakest(figure, share), f"{share.basis}; {figure.basis}")
        return reached

    @property
    def copies(self) -> Figure:
        """Bytes/s that a copy to or from the host's memory reaches."""
        return self._reached["host_link"]

    @property
    def links(self) -> Figure:
        """Bytes/s that collectives reach within a host."""
        return self._reached["device_link"]

    @property
    def far_links(self) -> Figure:
        """Bytes/s per device in collectives between hosts; KeyError if `fabric` is None."""
        return self._reached["fabric"]

    def collective(self, kind: str) -> Collective:
        return self.collectives.get(kind) or Collective(self.latency, self.links)


@dataclass(frozen=True)
class ClusterSpec:
    """A cluster of `nodes` equal hosts with `devices_per_node` devices each."""

    name: str
    device: Device
    nodes: int
    devices_per_node: int
    network: Figure  # bytes/s that are reached between two hosts, for the rows
    span: Span = NOWHERE
    interface: str = ""  # network interface between hosts; "": the interface of each host's address in Ray

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    def between(self, devices: int) -> Figure:
        """Return a host's bytes/s to other hosts; `devices` devices communicate at once."""
        if self.device.fabric is None:
            return self.network
        fabric = self.device.far_links
        per_host = min(devices, self.devices_per_node)
        return Figure(per_host * fabric.value, fabric.source, f"{per_host} a host; {fabric.basis}")

    def host(self, device: int) -> int:
        return device // self.devices_per_node


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
    # Hosts with these devices are connected by their `network`. The FLOP/s are with sums in float32, as in training.
    yield _nvidia("l40s", "NVIDIA L40S datasheet", 48e9, 864e9, (362e12, 91.6e12), 4)
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
                device_link=_assumed(56e9, "HCCS, one way"),
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
# Other names of devices: Huawei's servers, and short names.
_ALIASES = {
    "ascend-910b": ("a2", "atlas a2", "atlas 800t a2", "910b1", "910b2", "910b3"),
    "ascend-910c": ("a3", "atlas a3"),
    **{f"rtx{number}": (str(number),) for number in (3090, 4090, 5090)},
}
_MAKERS = re.compile("nvidia|geforce|huawei|ascend|sxm[45]?")


def find_preset(name: str) -> str:
    """Return the preset that a name means; "" if there is none.

    Case, punctuation, the manufacturer, and the memory size of the preset's device are ignored: `NVIDIA A100-SXM4-80GB`
    is `a100`.
    """
    letters = _normalize_name(name)
    for device in chain(DEVICES.built_in.values(), DEVICES.values()):
        calls = {_normalize_name(alias) for alias in (device.name, *_ALIASES.get(device.name, ()))}
        if letters in calls | {f"{call}{device.memory.value / 1e9:.0f}gb" for call in calls}:
            return device.name
    return ""


def _normalize_name(name: str) -> str:
    return _MAKERS.sub("", re.sub("[^a-z0-9]", "", name.lower()))


NETWORK = _assumed(300e6, "arXiv:2507.19017 measured 300 MB/s between servers; state `network` for yours")
