"""What `msrl-doctor --calibrate` measured of this machine: its file, and the device that it makes.

Invariant: a file that is missing where nobody named it is no news; any other that cannot be used is told in one
warning, and the assumed figures stand in for it. The measuring itself is in runtime/calibrate/measure.py.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..diagnostics import NOWHERE, Diagnostic, Span
from .cluster import DEVICES, ClusterSpec, Collective, Curve, Device, Figure, Overheads, rate_at

VERSION = 1
CURVES = ("f32", "bf16", "memory_bandwidth", "layer", "attention")


@dataclass(frozen=True)
class MachineIdentity:
    """What makes a machine another one."""

    processor: str
    cores: int
    memory: int  # bytes

    @property
    def words(self) -> str:
        return f"{self.processor}, {self.cores} core{'s' * (self.cores > 1)}"


@dataclass(frozen=True)
class BusyRates:
    """What each of so many processes of one machine can do while all are busy: figures as Device has them, collectives
    as (seconds at least, bytes/s)."""

    threads: int
    launch: float
    row: float
    copy: float  # bytes/s into fresh memory
    curves: dict[str, Curve]
    collectives: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Calibration:
    """`busy` by the number of processes. `noise` is the median relative spread of what was measured several times."""

    version: int
    date: str
    seconds: float  # that measuring took
    machine: MachineIdentity
    versions: dict[str, str]
    noise: float
    turn: float
    handover: float
    share: float
    function: float
    busy: dict[int, BusyRates]

    def of(self, ranks: int) -> BusyRates:
        """For so many ranks; more than were measured together share what the most of them had."""
        known = sorted(self.busy)
        near = next((n for n in known if n >= ranks), known[-1])
        found = self.busy[near]
        if ranks <= near:
            return found
        less = near / ranks
        return replace(
            found,
            launch=found.launch / less,
            row=found.row / less,
            copy=found.copy * less,
            curves={k: tuple((s, r * less) for s, r in c) for k, c in found.curves.items()},
            collectives={k: (s / less, r * less) for k, (s, r) in found.collectives.items()},
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
    """Where the file is looked for, and whether that was stated: MSRL_HERE (empty: nowhere), else a file among the
    user's settings."""
    stated = os.environ.get("MSRL_HERE")
    if stated is not None:
        return (Path(stated) if stated else None), True
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "msrl_graph" / "here.json", False


def write(found: Calibration, path: Path) -> None:
    """Raises OSError."""
    import msgspec

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    partial.rename(path)


def read(path: Path, span: Span = NOWHERE) -> Calibration | Diagnostic:
    """What a file holds, or a warning that says why it is not used."""
    import msgspec

    again = "measure this machine with `msrl-doctor --calibrate`"

    def warning(message: str) -> Diagnostic:
        return Diagnostic("calibration", f"{message}; assumed figures stand in for it", span, again, "warning")

    try:
        content = path.read_bytes()
    except OSError as error:
        return warning(f"`{path}` cannot be read: {(error.strerror or str(error)).lower()}")
    try:
        version = msgspec.json.decode(content, type=dict).get("version")
        if version != VERSION:
            return warning(f"`{path}` is of version {version}, this is version {VERSION}")
        found = msgspec.json.decode(content, type=Calibration)
    except (msgspec.DecodeError, ValueError) as error:
        return warning(f"`{path}` holds no calibration: {str(error).splitlines()[0].lower()}")
    if what := _unsound(found):
        return warning(f"`{path}` holds no calibration: {what}")
    here = this_machine()
    if (found.machine.processor, found.machine.cores) != (here.processor, here.cores):
        return warning(f"`{path}` is of another machine ({found.machine.words}; this one is {here.words})")
    return found


def _unsound(found: Calibration) -> str:
    """What no measuring can have given."""
    if not found.busy:
        return "nothing was measured"
    if any(not 0 < x < float("inf") for x in (found.turn, found.handover, found.share, found.function)):
        return "a figure of the runtime is not a positive number"
    for ranks, busy in found.busy.items():
        numbers = [
            busy.launch,
            *(x for c in busy.curves.values() for p in c for x in p),
            *(x for c in busy.collectives.values() for x in c),
        ]
        if ranks < 1 or any(not 0 < x < float("inf") for x in numbers):
            return f"a figure of {ranks} ranks is not a positive number"
        if {*CURVES} - {k for k, c in busy.curves.items() if c}:
            return f"figures of {ranks} ranks are missing"
        if any([p[0] for p in c] != sorted({p[0] for p in c}) for c in busy.curves.values()):
            return f"the sizes of a curve of {ranks} ranks do not rise"
    return ""


def here(name: str, ranks: int, span: Span = NOWHERE) -> tuple[Device, list[Diagnostic]]:
    """The CPU preset `name` for a host of so many ranks, with what was measured of this machine, and what there is to
    tell of that."""
    path, stated = location()
    if path is None or not (stated or path.is_file()):
        return DEVICES[name], []
    found = read(path, span)
    return (DEVICES[name], [found]) if isinstance(found, Diagnostic) else (device(found, name, ranks), [])


def applied(cluster: ClusterSpec) -> tuple[ClusterSpec, list[Diagnostic]]:
    """A cluster of CPUs with what was measured of this machine, where the program states no figure of its own."""
    if not cluster.device.kind.is_host:
        return cluster, []
    found, told = here(cluster.device.name, cluster.devices_per_node, cluster.span)
    stated: dict[str, Any] = {f.name: getattr(cluster.device, f.name) for f in fields(cluster.device)}
    stated = {name: value for name, value in stated.items() if isinstance(value, Figure) and value.source == "stated"}
    flops = {k: f for k, f in cluster.device.flops.items() if f.source == "stated"}
    curves = {k: c for k, c in found.curves.items() if k not in {*stated, *flops}}
    peaks = tuple(p for p in cluster.device.peaks if p in {*found.peaks, *stated, *(f"flops_{k}" for k in flops)})
    return replace(
        cluster, device=replace(found, **stated, flops={**found.flops, **flops}, curves=curves, peaks=peaks)
    ), told


def device(found: Calibration, name: str, ranks: int) -> Device:
    """The CPU preset `name` as it was measured with so many ranks on the machine."""
    basis = f"this machine, {found.date}, {ranks} rank{'s' * (ranks > 1)} busy"

    def measured(value: float) -> Figure:
        return Figure(value, "measured", basis)

    busy = found.of(ranks)
    preset = DEVICES[name]
    large = {k: measured(rate_at(c, float("inf"))) for k, c in busy.curves.items()}
    collectives = {k: Collective(measured(s), measured(r)) for k, (s, r) in busy.collectives.items()}
    gather = collectives.get("all_gather")
    return replace(
        preset,
        peaks=(),
        flops={k: large.get(k, f) for k, f in preset.flops.items()},
        memory_bandwidth=large["memory_bandwidth"],
        host_link=measured(busy.copy),
        device_link=gather.rate if gather else preset.device_link,
        latency=gather.least if gather else preset.latency,
        launch=measured(busy.launch),
        overheads=Overheads(*map(measured, (found.turn, found.handover, found.share, busy.row, found.function))),
        collectives=collectives,
        curves=busy.curves,
    )
