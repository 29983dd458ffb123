"""Lowering of a `cluster` from the syntax tree to a ClusterSpec.

Invariant: a figure that the file states, such as a bandwidth, replaces the figure of the device preset, or the figure
that was measured on this machine.
"""

from __future__ import annotations

from dataclasses import replace

from ..diagnostics import nearest
from ..hardware import calibration
from ..hardware.cluster import NETWORK, ClusterSpec, Figure
from ..hardware.device_presets import DEVICES, find_preset, normalize_name
from ..hardware.other_devices import EXAMPLE, describe_other_device
from ..ir.options import ClusterOptions
from . import ast
from .attributes import read_attributes
from .expressions import Names, Problems


def lower_cluster(cluster: ast.ClusterDecl, problems: Problems) -> ClusterSpec | None:
    """Lower a cluster; return None if it has a mistake.

    Figures that the file states replace the figures of the device preset.
    """
    attributes = read_attributes(cluster.attrs, "cluster", ClusterOptions.kinds(), Names({}), problems)
    if "device" not in attributes:
        if not any(attr.key.text in ("device", "devices") for attr in cluster.attrs):  # else reported as misspelt
            example = ClusterOptions.declared()["device"].must
            help = f"add `device = {example}`; devices are " + ", ".join(
                f"`{device_name}`" for device_name in sorted(DEVICES)
            )
            problems.report("bad-value", f"the cluster `{cluster.name.text}` has no device", cluster.name.span, help)
        return None
    target = attributes["device"]
    preset = find_preset(str(target.value))
    if not preset:
        help = describe_other_device(normalize_name(str(target.value))) or nearest(str(target.value).lower(), DEVICES)
        if help.startswith("did"):
            help = f"{help} Or, {EXAMPLE}"
        elif not help.startswith("it has no preset"):
            help = f"the presets are {', '.join(f'`{device_name}`' for device_name in DEVICES)}; {EXAMPLE}"
        problems.report("unknown-device", f"no device is called `{target.value}`", target.span, help)
        return None
    stated = {
        key: Figure(float(value.value), "stated", "the program")
        for key, value in attributes.items()
        if isinstance(value.value, int | float)
    }
    options = ClusterOptions.of_stated(attributes)
    device = DEVICES[preset]
    if device.name == "here":
        peaks = device.peaks
        device, warnings = calibration.preset_of_this_machine(device.name, options.devices_per_node, target.span)
        # Measured figures are achieved values; a stated figure that replaces one is a peak if the preset's was.
        device = replace(device, peaks=tuple(peak for peak in peaks if peak in device.peaks or peak in stated))
        problems.diagnostics += warnings
    flops = {
        **device.flops,
        **{key.removeprefix("flops_"): figure for key, figure in stated.items() if key.startswith("flops_")},
    }
    figures = {key: figure for key, figure in stated.items() if hasattr(device, key)}
    curves = {key: curve for key, curve in device.curves.items() if key not in stated and f"flops_{key}" not in stated}
    return ClusterSpec(
        name=cluster.name.text,
        device=replace(device, flops=flops, curves=curves, **figures),  # type: ignore[arg-type]
        nodes=options.nodes,
        devices_per_node=options.devices_per_node,
        network=stated.get("network", NETWORK),
        span=cluster.span,
        interface=options.interface,
    )
