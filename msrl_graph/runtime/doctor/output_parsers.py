"""Parsers for the output of drivers, toolkits and their commands.

Invariant: parsers are pure functions. Text in an unknown format gives an empty result and raises no error.

The formats are taken from the following sources. They were not compared with the output of a real device.

- `npu-smi info` of Atlas A2 (npu-smi 23.0 to 25.5) and A3 (24.1 to 26.0): reports 834, 1130, 2534 and 12980 in
  vllm-project/vllm-ascend. A3 has an additional column: the number of the die on the host. Version 26.0 has one more
  column in the table of processes.
- `hccn_tool -i 0 -link -g`: the code of MindCluster, in ascend-faultdiag (also its user guide) and in ascend-common
  (devmanager/hccn).
- ascend_toolkit_install.info: report 834 in vllm-project/vllm-ascend.
- ascend_ops_install.info: CANN 9.1.0, if the operators of CANN are installed by their own .run file.
- version.cfg, nnal/atb/latest/version.info, driver/version.info: READMEs of models for Ascend, for CANN 8.0 and 8.2.
- `nvidia-smi --query-gpu`, `--query-compute-apps`, `topo -m`: nvidia-smi(1).
- Xid in dmesg: NVIDIA, Xid Errors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

MIB = 1 << 20


@dataclass(frozen=True)
class Holder:
    """A process that uses memory of a device.

    `bytes` is the amount of this memory.
    """

    pid: str
    name: str
    bytes: int


@dataclass(frozen=True)
class DeviceEntry:
    """A device that a process can use: a die of an NPU, or a GPU.

    `label` is the name of the device in the output of `npu-smi` or `nvidia-smi`. `card` is the number by which this
    command addresses the device. `used` and `total` are bytes of memory.
    """

    label: str
    card: str
    name: str
    used: int
    total: int
    health: str = "OK"
    holders: tuple[Holder, ...] = ()

    @property
    def free(self) -> int:
        return self.total - self.used


def fields(text: str) -> dict[str, str]:
    """Parse lines of `name=value` or `name : value`."""
    matches = (re.match(r"\s*([\w .-]+?)\s*[=:]\s*(.*?)\s*$", line) for line in text.splitlines())
    return {match[1]: match[2] for match in matches if match}


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "nothing"


def first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "nothing")


def npu_dies(text: str) -> list[DeviceEntry]:
    """Parse the dies that `npu-smi info` lists."""
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in text.splitlines() if "|" in line]
    holders_by_die: dict[tuple[str, str], list[Holder]] = {}
    for row in rows:
        position = row[0].split()
        if (
            len(row) in (4, 5)
            and len(position) == 2
            and position[0].isdecimal()
            and row[1].isdecimal()
            and row[3].isdecimal()
        ):
            holders_by_die.setdefault((position[0], position[1]), []).append(Holder(row[1], row[2], int(row[3]) * MIB))
    dies: list[DeviceEntry] = []
    for first, second in pairwise(rows):
        # The second line of a die has its address on the bus and, at its end, its used memory.
        named = first[0].split()
        memory = re.findall(r"(\d+)\s*/\s*(\d+)", second[-1])
        bus = len(second) == 3 and re.fullmatch(r"[0-9A-Fa-f]{4}:[0-9A-Fa-f:.]+", second[1])
        numbers = second[0].split()
        if not (bus and len(named) == 2 and len(first) > 1 and memory and numbers):
            continue
        used, total = memory[-1]
        chip = f" chip {numbers[0]}" if len(numbers) > 1 else ""
        holders = tuple(holders_by_die.get((named[0], numbers[0]), ()))
        size = int(used) * MIB, int(total) * MIB
        dies.append(DeviceEntry(f"NPU {named[0]}{chip}", named[0], named[1], *size, first[1], holders))
    return dies


def npu_driver(text: str) -> str:
    """Parse the driver's version in the head of `npu-smi info`."""
    match = re.search(r"npu-smi \S+\s+Version: (\S+)", text)
    return match[1] if match else ""


def npu_link(text: str) -> str:
    """Parse the state of a port in hccn_tool's output: UP, DOWN, or "" if unknown."""
    match = re.search(r"link status:\s*(UP|DOWN)", text)
    return match[1] if match else ""


def cann(text: str) -> str:
    """Parse the version in a file of CANN or NNAL.

    The file is an install.info, a version.cfg, or a version.info.
    """
    entries = fields(text)
    for name in ("toolkit_running_version", "toolkit_installed_version"):
        if name in entries:
            return entries[name].strip("[]").rpartition(":")[2]
    return entries.get("version") or entries.get("Version") or entries.get("Ascend-cann-atb") or ""


def gpus(text: str, apps: str) -> list[DeviceEntry]:
    """Parse the list of devices in the output of `nvidia-smi --query-gpu`.

    `apps` is the output of `nvidia-smi --query-compute-apps`, which lists the processes that use the devices' memory.
    """
    holders_by_gpu: dict[str, list[Holder]] = {}
    for line in apps.splitlines():
        row = [cell.strip() for cell in line.split(",")]
        if len(row) < 4:
            continue
        row[2:-1] = [",".join(row[2:-1])]  # the name of a process may contain commas
        used = int(row[-1]) * MIB if row[-1].isdecimal() else 0  # hidden inside a container
        holders_by_gpu.setdefault(row[0], []).append(Holder(row[1], row[2].rpartition("/")[2], used))
    return [
        DeviceEntry(
            f"GPU {row[0]}",
            row[0],
            row[2],
            int(row[5]) * MIB,
            int(row[4]) * MIB,
            holders=tuple(holders_by_gpu.get(row[1], ())),
        )
        for row in _table(text, len(GPU))
        if row[4].isdecimal() and row[5].isdecimal()
    ]


GPU = ("index", "uuid", "name", "driver_version", "memory.total", "memory.used", "persistence_mode",
       "ecc.errors.uncorrected.volatile.total")  # fmt: skip


def gpu_fields(text: str) -> list[dict[str, str]]:
    return [dict(zip(GPU, row, strict=True)) for row in _table(text, len(GPU))]


def links(text: str) -> dict[tuple[str, str], str]:
    """Parse the connection of each pair of devices in `nvidia-smi topo -m`.

    A connection is `NV` with the number of NVLinks, such as `NV18`, or the name of a kind of PCIe connection.
    """
    rows = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line.strip()]
    names = [word for word in rows[0] if re.fullmatch(r"GPU\d+", word)] if rows else []
    cells = {row[0]: row[1:] for row in rows[1:] if row[0] in names and len(row) > len(names)}
    return {
        (first, second): cells[first][column]
        for first in cells
        for column, second in enumerate(names)
        if first < second
    }


def xids(text: str) -> list[str]:
    """Return the distinct Xid numbers (faults of a GPU) in the kernel's log."""
    return list(dict.fromkeys(re.findall(r"NVRM: Xid \([^)]*\): (\d+)", text)))


def torch_cuda(text: str) -> str:
    """Parse torch's CUDA version from torch/version.py; "" for a build without CUDA."""
    match = re.search(r"^cuda(?::[^=]*)? = '([\d.]+)'", text, re.MULTILINE)
    return match[1] if match else ""


def memory(meminfo: str, most: str, used: str) -> tuple[int, int]:
    """Return the free and the total bytes of the memory that processes can use.

    If the container has a memory limit, the total is at most this limit, and the free bytes are at most the limit minus
    the bytes that the container uses. `meminfo` is the text of /proc/meminfo. `most` is the memory limit of the
    container's cgroup, as text. `used` is the number of bytes that this cgroup uses, as text.
    """
    sizes = {
        name: int(match[0]) << 10 for name, value in fields(meminfo).items() if (match := re.match("[0-9]+", value))
    }
    free = sizes.get("MemAvailable", 0)
    total = sizes.get("MemTotal", 0)
    if most.strip().isdecimal() and used.strip().isdecimal():
        return min(free, int(most) - int(used)), min(total, int(most))
    return free, total


def cards(text: str) -> set[str]:
    """Parse the id of each PCI card from the text of /proc/bus/pci/devices.

    An id is the four hexadecimal digits of the vendor, followed by the four digits of the device. A card that provides
    several PCI functions counts once.
    """
    rows = re.findall(r"^([0-9A-Fa-f]+)\s+([0-9A-Fa-f]{8})\s", text, re.MULTILINE)
    return {card.lower() for function, card in rows if int(function, 16) % 8 == 0}


def _table(text: str, columns: int) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [row for row in rows if len(row) == columns]
