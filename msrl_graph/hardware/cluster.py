"""Figures of devices, hosts and links, with the source of each figure.

Invariant: every figure has a `source` (measured, derived, datasheet, assumed or stated) and a `basis`, a text that says
where the figure comes from. A figure of a device is a peak if `Device.peaks` lists its name, otherwise a rate that is
reached. For a peak, plans assume that only a fraction (SHARES) is reached.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from ..diagnostics import NOWHERE, Span
from .device_kinds import DEVICE_KINDS, DeviceKind

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
    # Of 450 GB/s, NCCL reaches 370 (NVIDIA/nccl-tests, issue 212). DeepEP reaches 153 GB/s of 200 on an H800.
    "device_link": Figure(0.75, "assumed", "75 % of a link"),
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
    fraction that is reached. `resource` is Ray's name for one device. If a host has no switch for its devices, `mesh`
    is the number of a device's links, one to each other device, and `device_link` is their sum.

    `curves` has rates measured at several sizes:

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
    mesh: int = 0  # links of a device to others of its host
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

    def collective(self, kind: str, ranks: int = 0) -> Collective:
        """Return the time of a collective of `ranks` devices of a host; 0: all devices.

        Without a switch, a device reaches each other device by a link of its own, so fewer ranks use fewer links.
        """
        if known := self.collectives.get(kind):
            return known
        if not self.mesh or not 1 < ranks <= self.mesh:
            return Collective(self.latency, self.links)
        used = ranks - 1
        basis = f"{used} of {self.mesh} links; {self.links.basis}"
        return Collective(self.latency, replace(self.links, value=self.links.value * used / self.mesh, basis=basis))


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


NETWORK = Figure(300e6, "assumed", "arXiv:2507.19017 measured 300 MB/s between servers; state `network` for yours")
