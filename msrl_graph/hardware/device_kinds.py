"""The kinds of devices (CPU, CUDA, Ascend): their names in other software.

A kind also has settings, such as the environment variables that its collectives need.

Invariant: everything that msrl_graph knows about a kind is in this file. No other file contains the name of a kind or
of a kind's backend for collectives. The presets in cluster.py are an exception, because programs refer to presets by
name. What torch does with a kind is in backends/devices.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..files.plugins import PlugInTable
from . import visibility_masks
from .adaptors import Adaptor
from .environment_variables import Setting, SettingConditions, Settings, no_settings

# Where an engine computes: on the CPU cores of a host, or on its devices.
Where = Literal["host", "device"]


@dataclass(frozen=True)
class DeviceKind:
    """A kind of device, such as CUDA devices.

    - `name`: the kind's name in a plan.
    - `torch`: the kind's name in PyTorch. PyTorch knows the name after the module `plugin` is imported.
    - `resource`: the name of the Ray resource that counts devices of the kind.
    - `collectives`: the backend of torch.distributed.
    - `interfaces`: environment variables for the network interface of collectives, as `NAME=VALUE` with `{}` for the
      interface's name. NCCL and HCCL take a bare name as a prefix, so the texts have `==`, which means an exact name.
    - `visible`: the environment variable that lists the devices that a process can see (visibility_masks.py).
    - `files`: a pattern that matches the names of the device files in a host's /dev.
    - `cards`: prefixes of the ids of manufacturer and model, as `lspci -n` prints them.
    - `settings`: a function that returns the environment variables that processes on such devices need.
    - `adaptors`: packages that adapt other packages to the kind. The engines state further ones.
    - `kernels`: the module of backends/kernels that computes layers.

    The kind of CPU cores has no `visible`, `files` and `cards`.
    """

    name: str
    torch: str
    resource: str
    collectives: str
    asked_as: str  # the option with which an actor requests such devices from Ray; "": a custom resource
    interfaces: tuple[str, ...]
    visible: str = ""
    rising: bool = False  # the ids in `visible` must rise, and only digits and commas are allowed
    files: str = ""
    cards: tuple[str, ...] = ()
    plugin: str = ""
    kernels: str = "torch_native"
    is_host: bool = False  # a device is a core of its host, which other programs use too
    shares_host_memory: bool = False  # a rank's data is in its host's memory
    runs_ahead: bool = True  # Python continues while operators run
    groups_beside_sleep: bool = True  # process groups can be made while an engine on the device sleeps
    group_bytes: int = 0  # device memory of a process group in addition to tensors, if the makers document it
    adaptors: tuple[Adaptor, ...] = ()
    settings: Settings = no_settings

    @property
    def where(self) -> Where:
        return "host" if self.is_host else "device"

    def backends(self) -> str:
        """Return the backends of a process group, in torch.distributed's format.

        The process group supports tensors of the device and of its host.
        """
        return (
            self.collectives if self.is_host else ",".join(f"{kind.torch}:{kind.collectives}" for kind in (HOST, self))
        )

    def visible_count(self) -> int:
        """Count the devices that this process can see; for CPUs, this machine's cores."""
        if self.is_host:
            return os.cpu_count() or 1
        return len(visibility_masks.visible_ids(self, os.environ.get(self.visible), self.total_count()))

    def total_count(self) -> int:
        """Count the devices of this machine, including those that this process cannot see."""
        return len([*Path("/dev").glob(self.files)]) if self.files else 0

    def packages(self, needs: Iterable[str], adaptors: Iterable[Adaptor] = ()) -> tuple[str, ...]:
        """Return the packages in `needs`, each followed by its adaptor for the kind.

        These packages must be installed on hosts with such devices. `adaptors` are the adaptors that an engine states.
        The result has no duplicates.
        """
        names = {adaptor.package: adaptor.name for adaptor in (*self.adaptors, *adaptors)}
        return tuple(dict.fromkeys(package for need in needs for package in (need, names.get(need, need))))

    def ray(self, number: int = 1) -> dict[str, Any]:
        """Return the options with which an actor requests `number` devices from Ray.

        By default Ray also reserves a CPU core for an actor. The options exclude this core, because the actor's
        placement group has no CPU core.
        """
        return {"num_cpus": 0} | ({self.asked_as: number} if self.asked_as else {"resources": {self.resource: number}})


HOST = DeviceKind(
    name="cpu",
    torch="cpu",
    resource="CPU",
    collectives="gloo",
    asked_as="num_cpus",
    interfaces=("GLOO_SOCKET_IFNAME={}",),
    is_host=True,
    shares_host_memory=True,
    runs_ahead=False,
)
CUDA = DeviceKind(
    name="cuda",
    torch="cuda",
    resource="GPU",
    collectives="nccl",
    asked_as="num_gpus",
    interfaces=("GLOO_SOCKET_IFNAME={}", "NCCL_SOCKET_IFNAME=={}"),
    visible="CUDA_VISIBLE_DEVICES",
    files="nvidia[0-9]*",
    cards=("10de",),
    kernels="cuda",
)


# A communicator has two buffers of HCCL_BUFFSIZE: one to send and one to receive.
HCCL_MIB = 200


def _hccl_settings(wants: SettingConditions) -> Iterator[Setting]:
    reference = "CANN, environment variables"
    waits = f"{wants.deadline + 60:.0f}"
    counted = "in MB: each process group keeps two such buffers in a device's memory"
    yield Setting("HCCL_BUFFSIZE", str(HCCL_MIB), counted, reference)
    # HCCL's default of 120 s to connect suits ranks that connect when they start. Ranks of a run load weights first.
    for phase in ("CONNECT", "EXEC"):
        longer = "longer than the run's deadline, whose report names what is waited for"
        yield Setting(f"HCCL_{phase}_TIMEOUT", waits, longer, reference)
    for end in ("HOST", "NPU"):
        free = "any free port: other processes may use ports of this host too"
        yield Setting(f"HCCL_{end}_SOCKET_PORT_RANGE", "auto", free, "verl, trainer/constants_ppo.py")
    if wants.deterministic:
        same = "a fixed order of sums: a seed gives the same weights"
        yield Setting("HCCL_DETERMINISTIC", "true", same, reference)
        yield Setting("LCCL_DETERMINISTIC", "1", same, "MindSpore Transformers, env_variables")


ASCEND = DeviceKind(
    name="ascend",
    torch="npu",
    resource="NPU",
    collectives="hccl",
    asked_as="",
    interfaces=("GLOO_SOCKET_IFNAME={}", "HCCL_SOCKET_IFNAME=={}"),
    visible="ASCEND_RT_VISIBLE_DEVICES",
    rising=True,
    files="davinci[0-9]*",
    cards=("19e5d801", "19e5d802", "19e5d803"),
    plugin="torch_npu",
    kernels="ascend",
    adaptors=(Adaptor("torch", "torch-npu"),),
    groups_beside_sleep=False,  # github.com/Ascend/pytorch/issues/166
    group_bytes=2 * HCCL_MIB << 20,
    settings=_hccl_settings,
)
DEVICE_KINDS = PlugInTable(
    "msrl_graph.device_kinds",
    DeviceKind,
    {kind.name: kind for kind in (HOST, CUDA, ASCEND)},
)
