"""Known devices without a preset: why there is none, and how to state them.

Invariant: a figure here is one that the maker publishes. What the maker does not publish is left open, as `…`.
"""

from __future__ import annotations

from dataclasses import dataclass

OPEN = "…"
# For a device of which nothing is known here.
EXAMPLE = (
    'for another device, name the preset of its kind and state its figures: `device = "h100", memory = 192 GB, '
    "memory_bandwidth = 5.3 TB/s, flops_bf16 = 1300 TFLOP/s, host_link = 64 GB/s, device_link = 448 GB/s, fabric = 50 "
    "GB/s`"
)


@dataclass(frozen=True)
class OtherDevice:
    """A device without a preset.

    - `names`: its names, in lower case without punctuation.
    - `reason`: why it has no preset.
    - `like`: the preset of its kind, whose remaining figures count.
    - `figures`: memory in GB, memory bandwidth in TB/s, TFLOP/s in bfloat16 and float32, and the links to the host and
      between devices in GB/s one way. None if the maker does not publish a figure.
    """

    names: tuple[str, ...]
    reason: str
    like: str
    figures: tuple[float | None, float | None, float | None, float | None, float | None, float | None]

    @property
    def statement(self) -> str:
        """The attributes of a cluster that state the device."""
        units = {
            "memory": "GB",
            "memory_bandwidth": "TB/s",
            "flops_bf16": "TFLOP/s",
            "flops_f32": "TFLOP/s",
            "host_link": "GB/s",
            "device_link": "GB/s",
        }
        values = (OPEN if figure is None else f"{figure:g}" for figure in self.figures)
        stated = (f"{name} = {value} {unit}" for (name, unit), value in zip(units.items(), values, strict=True))
        return ", ".join((f'device = "{self.like}"', *stated))


def _planned_only(maker: str) -> str:
    return f"devices of {maker} can be planned only, with figures that you state"


_AMD = _planned_only("AMD")
_INTEL = _planned_only("Intel")
_GOOGLE = _planned_only("Google")
_VOLTA = "it has no bfloat16: computing in it is as fast as in float32"
_OPEN = "its maker does not publish all figures"
_OTHER = "sources disagree on its figures"
OTHER_DEVICES = (
    OtherDevice(("mi210",), _AMD, "a100", (64, 1.6, 181, 22.6, 32, None)),
    OtherDevice(("mi250",), _AMD, "a100", (128, 3.2, 362.1, 45.3, 32, None)),
    OtherDevice(("mi250x",), _AMD, "a100", (128, 3.2, 383, 47.9, 32, None)),
    OtherDevice(("mi300a",), _AMD, "h100", (128, 5.3, 980.6, 122.6, None, None)),
    OtherDevice(("mi300x",), _AMD, "h100", (192, 5.3, 1307, 163.4, 64, 448)),
    OtherDevice(("mi325x",), _AMD, "h100", (256, 6, 1307, 163.4, 64, 448)),
    OtherDevice(("mi350x",), _AMD, "h100", (288, 8, 2300, 144, 64, 537)),
    OtherDevice(("mi355x",), _AMD, "h100", (288, 8, 2500, 157, 64, 537)),
    OtherDevice(("gaudi2", "hl225"), _INTEL, "h100", (96, 2.45, 432, None, 32, None)),
    OtherDevice(("gaudi3", "hl325"), _INTEL, "h100", (128, 3.7, 1835, None, 64, None)),
    OtherDevice(("tpuv4",), _GOOGLE, "h100", (32, 1.2, 275, None, None, None)),
    OtherDevice(("tpuv5e",), _GOOGLE, "h100", (16, 0.819, 197, None, None, None)),
    OtherDevice(("tpuv5p",), _GOOGLE, "h100", (95, 2.765, 459, None, None, None)),
    OtherDevice(("tpuv6e", "trillium"), _GOOGLE, "h100", (32, 1.64, 918, None, None, None)),
    OtherDevice(("trainium2", "trn2"), _planned_only("AWS"), "h100", (103, 2.9, 667, 181, None, None)),  # 96 GiB
    OtherDevice(("v100", "v10032gb"), _VOLTA, "a100", (32, 0.9, 15.7, 15.7, 16, 150)),
    OtherDevice(("v10016gb",), _VOLTA, "a100", (16, 0.9, 15.7, 15.7, 16, 150)),
    OtherDevice(("t4",), _VOLTA, "l4", (16, 0.32, 8.1, 8.1, 16, 16)),
    OtherDevice(("b300", "b300288gb", "b300ac"), _OTHER, "b200", (None, 8, 2250, 75, 64, 900)),
    OtherDevice(("gb300", "gb300nvl72"), _OTHER, "gb200", (None, 8, None, None, None, 900)),
    OtherDevice(("gh200", "gh20096gb", "gh200120gb", "gh200480gb"), _OPEN, "h100", (96, 4, 989, 67, 450, None)),
    OtherDevice(("h20141gb", "h203e"), _OPEN, "h20", (141, None, 148, 44, 64, 450)),
    OtherDevice(("a10g",), _OPEN, "a10", (24, 0.6, None, None, 32, 32)),
    OtherDevice(("910b4", "atlas800ia2"), _OPEN, "ascend-910b", (32, None, None, None, None, None)),
    OtherDevice(("910", "910a", "910prob", "atlas800"), _OPEN, "ascend-910b", (32, None, None, None, None, None)),
    OtherDevice(("950", "950pr"), _OPEN, "ascend-910c-die", (128, 1.6, None, None, None, None)),
    OtherDevice(("950dt",), _OPEN, "ascend-910c-die", (144, 4, None, None, None, None)),
    OtherDevice(("rtx3090ti", "3090ti"), _OPEN, "rtx3090", (24, 1.008, None, 40, 32, 32)),
    OtherDevice(("rtxpro6000maxq", "rtxpro6000maxqworkstation"), _OPEN, "rtx-pro-6000", (96, 1.792, None, 110, 64, 64)),
    OtherDevice(("rtxpro6000server", "pro6000server"), _OPEN, "rtx-pro-6000", (96, 1.6, None, 120, 64, 64)),
)


def describe_other_device(letters: str) -> str:
    """Return how to state a known device without a preset.

    The result is "" if the device is not known. `letters` is the name of the device as `device_presets.normalize_name`
    returns it.
    """
    device = next((other for other in OTHER_DEVICES if letters in other.names), None)
    if device is None:
        return ""
    help = f"it has no preset, because {device.reason}; state its figures: `{device.statement}`"
    return f"{help}, with a number for each `{OPEN}`" if None in device.figures else help
