"""A device that nobody has, and its kind."""

from dataclasses import replace

from msrl_graph.hardware.cluster import Figure
from msrl_graph.hardware.device_kinds import CUDA
from msrl_graph.hardware.device_presets import DEVICES

KIND = replace(CUDA, name="toy", torch="toy", resource="TOY", asked_as="", collectives="toyccl")
DEVICE = replace(
    DEVICES["h100"],
    name="toy-npu",
    backend="toy",
    resource="TOY",
    memory=Figure(96e9, "datasheet", "the box that it came in"),
)
