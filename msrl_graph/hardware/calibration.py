"""The measurements that `msrl-doctor --calibrate` takes on a machine.

Invariant: if the default calibration file does not exist, assumed figures are used without a warning. If a calibration
file that exists, or that the user named, cannot be used, assumed figures are used with one warning. The code that takes
the measurements is in runtime/calibrate/measure.py.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..diagnostics import NOWHERE, Diagnostic, Span
from .cluster import ClusterSpec, Collective, Curve, Device, Figure, Overheads, rate_at
from .device_presets import DEVICES

VERSION = 1
CURVES = ("f32", "bf16", "memory_bandwidth", "layer", "attention")


@dataclass(frozen=True)
class MachineIdentity:
    """The properties by which one machine is distinguished from another."""

    processor: str
    cores: int
    memory: int  # bytes

    @property
    def words(self) -> str:
        return f"{self.processor}, {self.cores} core{'s' * (self.cores > 1)}"


@dataclass(frozen=True)
class BusyRates:
    """The rates that each process of a machine reaches while all processes are busy.

    The rates have the same units as the figures of `Device` (cluster.py). The values of `collectives` are (minimum
    seconds, bytes/s).
    """

    threads: int
    launch: float
    row: float
    copy: float  # bytes/s into fresh memory
    curves: dict[str, Curve]
    collectives: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Calibration:
    """The measurements of a machine.

    The keys of `busy` are numbers of busy processes; the values are the rates of each process. `noise` is the median
    relative spread of repeated measurements. `turn`, `handover`, `share` and `function` are seconds, and have the
    meanings of the fields of `Overheads` with the same names (cluster.py).
    """

    version: int
    date: str
    seconds: float  # duration of the measuring
    machine: MachineIdentity
    versions: dict[str, str]
    noise: float
    turn: float
    handover: float
    share: float
    function: float
    busy: dict[int, BusyRates]

    def rates_for(self, ranks: int) -> BusyRates:
        """Return the rates of each rank when `ranks` ranks are busy.

        The rates were measured with certain numbers of busy processes. If `ranks` exceeds the largest of these numbers,
        n, each rank gets the fraction n / `ranks` of the rates that were measured with n processes.
        """
        measured_counts = sorted(self.busy)
        nearest = next((count for count in measured_counts if count >= ranks), measured_counts[-1])
        rates = self.busy[nearest]
        if ranks <= nearest:
            return rates
        scale = nearest / ranks
        return replace(
            rates,
            launch=rates.launch / scale,
            row=rates.row / scale,
            copy=rates.copy * scale,
            curves={name: tuple((size, rate * scale) for size, rate in curve) for name, curve in rates.curves.items()},
            collectives={kind: (least / scale, rate * scale) for kind, (least, rate) in rates.collectives.items()},
        )


def this_machine() -> MachineIdentity:
    processor = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processor = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), processor)
    except OSError:
        pass
    return MachineIdentity(processor, os.cpu_count() or 1, int(DEVICES["here"].host_memory.value))


def location() -> tuple[Path | None, bool]:
    """Return the path of the calibration file, and whether the user stated the path.

    The environment variable MSRL_HERE states the path; if it is empty, there is no file. Without the variable, the file
    is `msrl_graph/here.json` in XDG_CONFIG_HOME or ~/.config.
    """
    stated = os.environ.get("MSRL_HERE")
    if stated is not None:
        return (Path(stated) if stated else None), True
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "msrl_graph" / "here.json", False


def write(calibration: Calibration, path: Path) -> None:
    """Write a calibration file. Raises OSError."""
    import msgspec

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(calibration)) + b"\n")
    partial.rename(path)


def read(path: Path, span: Span = NOWHERE) -> Calibration | Diagnostic:
    """Read a calibration file; return a warning with the reason if it cannot be used.

    A file of another version, or of another machine, cannot be used.
    """
    import msgspec

    help = "measure this machine with `msrl-doctor --calibrate`"

    def warning(message: str) -> Diagnostic:
        return Diagnostic("calibration", f"{message}; assumed figures are used instead", span, help, "warning")

    try:
        content = path.read_bytes()
    except OSError as error:
        return warning(f"`{path}` cannot be read: {(error.strerror or str(error)).lower()}")
    try:
        version = msgspec.json.decode(content, type=dict).get("version")
        if version != VERSION:
            return warning(f"`{path}` has version {version}, but this program needs version {VERSION}")
        calibration = msgspec.json.decode(content, type=Calibration)
    except (msgspec.DecodeError, ValueError) as error:
        return warning(f"`{path}` holds no calibration: {str(error).splitlines()[0].lower()}")
    if problem := _find_invalid(calibration):
        return warning(f"`{path}` holds no calibration: {problem}")
    machine = this_machine()
    if (calibration.machine.processor, calibration.machine.cores) != (machine.processor, machine.cores):
        return warning(
            f"`{path}` belongs to another machine ({calibration.machine.words}; this one is {machine.words})"
        )
    return calibration


def _find_invalid(calibration: Calibration) -> str:
    """Describe an impossible value in a calibration; "" if all values are possible."""
    if not calibration.busy:
        return "nothing was measured"
    if any(
        not 0 < figure < float("inf")
        for figure in (calibration.turn, calibration.handover, calibration.share, calibration.function)
    ):
        return "a figure of the runtime is not a positive number"
    for ranks, busy in calibration.busy.items():
        numbers = [
            busy.launch,
            *(number for curve in busy.curves.values() for point in curve for number in point),
            *(number for collective in busy.collectives.values() for number in collective),
        ]
        if ranks < 1 or any(not 0 < number < float("inf") for number in numbers):
            return f"a figure of {ranks} ranks is not a positive number"
        if {*CURVES} - {name for name, curve in busy.curves.items() if curve}:
            return f"figures of {ranks} ranks are missing"
        if any(
            [point[0] for point in curve] != sorted({point[0] for point in curve}) for curve in busy.curves.values()
        ):
            return f"the sizes of a curve of {ranks} ranks do not rise"
    return ""


def preset_of_this_machine(name: str, ranks: int, span: Span = NOWHERE) -> tuple[Device, list[Diagnostic]]:
    """Return the CPU preset `name` with measured figures, and a list of warnings.

    The measured figures are in this machine's calibration file. `ranks` is the number of ranks on the host. A warning
    says why the file cannot be used.
    """
    path, stated = location()
    if path is None or not (stated or path.is_file()):
        return DEVICES[name], []
    calibration = read(path, span)
    return (
        (DEVICES[name], [calibration])
        if isinstance(calibration, Diagnostic)
        else (device(calibration, name, ranks), [])
    )


def apply_calibration(cluster: ClusterSpec) -> tuple[ClusterSpec, list[Diagnostic]]:
    """Return a cluster of CPUs with measured figures, and a list of warnings.

    The measured figures are in this machine's calibration file. They do not replace figures that the program states. A
    cluster of other devices is returned unchanged. A warning says why the file cannot be used.
    """
    if not cluster.device.kind.is_host:
        return cluster, []
    measured, warnings = preset_of_this_machine(cluster.device.name, cluster.devices_per_node, cluster.span)
    stated: dict[str, Any] = {item.name: getattr(cluster.device, item.name) for item in fields(cluster.device)}
    stated = {name: value for name, value in stated.items() if isinstance(value, Figure) and value.source == "stated"}
    flops = {dtype: figure for dtype, figure in cluster.device.flops.items() if figure.source == "stated"}
    curves = {kind: curve for kind, curve in measured.curves.items() if kind not in {*stated, *flops}}
    peaks = tuple(
        peak
        for peak in cluster.device.peaks
        if peak in {*measured.peaks, *stated, *(f"flops_{dtype}" for dtype in flops)}
    )
    return replace(
        cluster, device=replace(measured, **stated, flops={**measured.flops, **flops}, curves=curves, peaks=peaks)
    ), warnings


def device(calibration: Calibration, name: str, ranks: int) -> Device:
    """Return the CPU preset `name` with the figures measured for `ranks` busy ranks."""
    basis = f"this machine, {calibration.date}, {ranks} rank{'s' * (ranks > 1)} busy"

    def measured(value: float) -> Figure:
        return Figure(value, "measured", basis)

    busy = calibration.rates_for(ranks)
    preset = DEVICES[name]
    large = {curve_name: measured(rate_at(curve, float("inf"))) for curve_name, curve in busy.curves.items()}
    collectives = {
        kind: Collective(measured(seconds), measured(rate)) for kind, (seconds, rate) in busy.collectives.items()
    }
    gather = collectives.get("all_gather")
    return replace(
        preset,
        peaks=(),
        flops={dtype: large.get(dtype, figure) for dtype, figure in preset.flops.items()},
        memory_bandwidth=large["memory_bandwidth"],
        host_link=measured(busy.copy),
        device_link=gather.rate if gather else preset.device_link,
        latency=gather.least if gather else preset.latency,
        launch=measured(busy.launch),
        overheads=Overheads(
            *map(measured, (calibration.turn, calibration.handover, calibration.share, busy.row, calibration.function))
        ),
        collectives=collectives,
        curves=busy.curves,
    )
