"""`cluster` to Cluster.

Invariant: a figure that the file states is the device's, in place of what the preset or a measurement says.
"""

from __future__ import annotations

from dataclasses import replace

from ..diagnostics import nearest
from ..hardware import calibration
from ..hardware.cluster import DEVICES, NETWORK, ClusterSpec, Figure, named
from ..ir.options import ClusterOptions
from . import ast
from .attributes import read
from .expressions import Names, Problems

IN_FULL = (
    'a device without one takes that of its kind, and states its own figures: `device = "h100", memory = 192 GB, '
    "memory_bandwidth = 5.3 TB/s, flops_bf16 = 1300 TFLOP/s, host_link = 64 GB/s, device_link = 448 GB/s, fabric = 50 "
    "GB/s`"
)


def lower_cluster(cluster: ast.ClusterDecl, problems: Problems) -> ClusterSpec | None:
    """The cluster, its device's figures overridden where the file states them."""
    attributes = read(cluster.attrs, "cluster", ClusterOptions.kinds(), Names({}), problems)
    if "device" not in attributes:
        if not any(a.key.text in ("device", "devices") for a in cluster.attrs):  # told as misspelt
            example = ClusterOptions.declared()["device"].must
            help = f"add `device = {example}`; devices are " + ", ".join(f"`{d}`" for d in sorted(DEVICES))
            problems.tell("bad-value", f"the cluster `{cluster.name.text}` has no device", cluster.name.span, help)
        return None
    target = attributes["device"]
    preset = named(str(target.value))
    if not preset:
        help = nearest(str(target.value).lower(), DEVICES)
        if not help.startswith("did"):
            help = f"the presets are {', '.join(f'`{d}`' for d in DEVICES)}; {IN_FULL}"
        problems.tell("unknown-device", f"no device is called `{target.value}`", target.span, help)
        return None
    stated = {
        k: Figure(float(e.value), "stated", "the program")
        for k, e in attributes.items()
        if isinstance(e.value, int | float)
    }
    said = ClusterOptions.of_stated(attributes)
    device = DEVICES[preset]
    if device.name == "here":
        peaks = device.peaks
        device, told = calibration.here(device.name, said.devices_per_node, target.span)
        # What was measured is reached; what is stated in its place is what it was before.
        device = replace(device, peaks=tuple(p for p in peaks if p in device.peaks or p in stated))
        problems.found += told
    flops = {**device.flops, **{k.removeprefix("flops_"): f for k, f in stated.items() if k.startswith("flops_")}}
    figures = {k: f for k, f in stated.items() if hasattr(device, k)}
    curves = {k: c for k, c in device.curves.items() if k not in stated and f"flops_{k}" not in stated}
    return ClusterSpec(
        name=cluster.name.text,
        device=replace(device, flops=flops, curves=curves, **figures),  # type: ignore[arg-type]
        nodes=said.nodes,
        devices_per_node=said.devices_per_node,
        network=stated.get("network", NETWORK),
        span=cluster.span,
        interface=said.interface,
    )
