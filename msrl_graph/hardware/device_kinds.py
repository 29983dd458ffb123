"""The kinds of devices: what each is called by whom, and what sets it apart.

Invariant: what the package knows of a kind stands here once; no other file has the name of one, or of its collectives
(the names of the presets in cluster.py are names of programs). What torch does with a kind is in backends/devices.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from . import visibility_masks
from .environment_variables import Setting, SettingConditions, Settings, nothing

# Where an engine computes: on the cores of a host, or on what is beside them.
Where = Literal["host", "device"]


@dataclass(frozen=True)
class DeviceKind:
    """`name` is a plan's word for it, `torch` PyTorch's, which knows it once `plugin` is imported, `resource` Ray's.
    `collectives` is its backend of torch.distributed, `interfaces` the variables that say by which network interface
    such speak, each with how it is told one by its whole name (NCCL and HCCL take a bare name for a beginning).
    `visible` is the variable that says which devices a process sees (visibility_masks.py), `files` are those of a
    host's devices in /dev, `cards` what the maker and model of one begin with, as `lspci -n` has them; a host's cores
    have none of these. `settings` are the variables that its processes want. `adaptors` are the packages that adapt
    others to it, by these. `kernels` is the file of backends/kernels that layers are computed by."""

    name: str
    torch: str
    resource: str
    collectives: str
    asked_as: str  # the option by which an actor asks Ray for it; "": as a resource of its own
    interfaces: tuple[str, ...]
    visible: str = ""
    rising: bool = False  # what `visible` lists has to rise, and nothing but digits and commas may stand there
    files: str = ""
    cards: tuple[str, ...] = ()
    plugin: str = ""
    kernels: str = "torch_native"
    is_host: bool = False  # a device is a core of its host: what else runs there takes from it
    shares_host_memory: bool = False  # what a rank holds lies in its host's memory
    runs_ahead: bool = True  # Python goes on while operators run
    groups_beside_sleep: bool = True  # process groups can be made while an engine on the device sleeps
    group_bytes: int = 0  # what a process group keeps on a device beside tensors, where the kind's makers say it
    adaptors: tuple[tuple[str, str], ...] = ()
    settings: Settings = nothing

    @property
    def where(self) -> Where:
        return "host" if self.is_host else "device"

    def backends(self) -> str:
        """The backends that a process group is made with: those of the device's tensors, and of its host's."""
        return self.collectives if self.is_host else ",".join(f"{k.torch}:{k.collectives}" for k in (HOST, self))

    def here(self) -> int:
        """How many this machine has: of its cores, or of the devices that this process may see."""
        if self.is_host:
            return os.cpu_count() or 1
        return len(visibility_masks.seen(self, os.environ.get(self.visible), self.there()))

    def there(self) -> int:
        """How many devices this machine has beside its cores, whatever a process may see of them."""
        return len([*Path("/dev").glob(self.files)]) if self.files else 0

    def packages(self, needs: Iterable[str]) -> tuple[str, ...]:
        """What must be installed on its hosts where something needs these packages."""
        adaptors = dict(self.adaptors)
        return tuple(dict.fromkeys(p for need in needs for p in (need, adaptors.get(need, need))))

    def ray(self, number: int = 1) -> dict[str, Any]:
        """How an actor asks Ray for so many, and for no core beside them, which Ray would add: the placement group
        that it is put in has none."""
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
)


# A communicator has two buffers of HCCL_BUFFSIZE, one to send and one to receive.
HCCL_MIB = 200


def _hccl(wants: SettingConditions) -> Iterator[Setting]:
    reference = "CANN, environment variables"
    waits = f"{wants.deadline + 60:.0f}"
    counted = "in MB: each process group keeps two such buffers on a device, and memory has them"
    yield Setting("HCCL_BUFFSIZE", str(HCCL_MIB), counted, reference)
    # HCCL's own 120 s to connect are for ranks that begin at once; these have loaded their weights before.
    for what in ("CONNECT", "EXEC"):
        longer = "longer than the run's deadline, which says who is waited for"
        yield Setting(f"HCCL_{what}_TIMEOUT", waits, longer, reference)
    for where in ("HOST", "NPU"):
        free = "any that is free: other processes may speak from here, too"
        yield Setting(f"HCCL_{where}_SOCKET_PORT_RANGE", "auto", free, "verl, trainer/constants_ppo.py")
    if wants.deterministic:
        same = "sums in one order: a seed gives the same weights"
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
    adaptors=(("torch", "torch-npu"), ("vllm", "vllm-ascend"), ("megatron-core", "mindspeed")),
    groups_beside_sleep=False,  # github.com/Ascend/pytorch/issues/166
    group_bytes=2 * HCCL_MIB << 20,
    settings=_hccl,
)
DEVICE_KINDS = {kind.name: kind for kind in (HOST, CUDA, ASCEND)}
