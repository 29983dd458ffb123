"""What drivers, toolkits and their commands print, taken apart.

Invariant: pure; text that is not of a form that is known here gives nothing, and raises nothing.

Where the forms were seen, none of it on a device of this project:
- `npu-smi info` of Atlas A2 (npu-smi 23.0 to 25.5) and A3 (24.1 to 26.0): reports in vllm-project/vllm-ascend, 834,
  1130, 2534, 12980; A3 has a column more, the number of the die on the host, and 26.0 one more of processes.
- `hccn_tool -i 0 -link -g`: MindCluster, ascend-faultdiag, its user guide, and ascend-common, devmanager/hccn.
- ascend_toolkit_install.info: vllm-project/vllm-ascend, 834; ascend_ops_install.info: of a CANN 9.1.0, where its
  operators are installed by their own .run; version.cfg, nnal/atb/latest/version.info, driver/version.info: READMEs of
  models for Ascend, of CANN 8.0 and 8.2.
- `nvidia-smi --query-gpu`, `--query-compute-apps`, `topo -m`: nvidia-smi(1); Xid in dmesg: NVIDIA, Xid Errors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

MIB = 1 << 20


@dataclass(frozen=True)
class Holder:
    """A process that holds memory of a device: bytes."""

    pid: str
    name: str
    bytes: int


@dataclass(frozen=True)
class DeviceEntry:
    """A device as processes count them. `label` is what its own command calls it, `card` the number that it takes."""

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
    """Lines of `name=value`, or `name : value`."""
    found = (re.match(r"\s*([\w .-]+?)\s*[=:]\s*(.*?)\s*$", line) for line in text.splitlines())
    return {m[1]: m[2] for m in found if m}


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "nothing"


def first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "nothing")


def npu_dies(text: str) -> list[DeviceEntry]:
    """The dies that `npu-smi info` lists."""
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in text.splitlines() if "|" in line]
    held: dict[tuple[str, str], list[Holder]] = {}
    for row in rows:
        where = row[0].split()
        if len(row) in (4, 5) and len(where) == 2 and where[0].isdigit() and row[1].isdigit() and row[3].isdigit():
            held.setdefault((where[0], where[1]), []).append(Holder(row[1], row[2], int(row[3]) * MIB))
    dies: list[DeviceEntry] = []
    for first, second in pairwise(rows):
        # The second line of a die has its place on the bus, and at its end what of its memory is used.
        named = first[0].split()
        memory = re.findall(r"(\d+)\s*/\s*(\d+)", second[-1])
        bus = len(second) == 3 and re.fullmatch(r"[0-9A-Fa-f]{4}:[0-9A-Fa-f:.]+", second[1])
        if not (bus and len(named) == 2 and memory):
            continue
        numbers, (used, total) = second[0].split(), memory[-1]
        chip = f" chip {numbers[0]}" if len(numbers) > 1 else ""
        holders = tuple(held.get((named[0], numbers[0]), ()))
        size = int(used) * MIB, int(total) * MIB
        dies.append(DeviceEntry(f"NPU {named[0]}{chip}", named[0], named[1], *size, first[1], holders))
    return dies


def npu_driver(text: str) -> str:
    """The driver's version, in the head of `npu-smi info`."""
    found = re.search(r"npu-smi \S+\s+Version: (\S+)", text)
    return found[1] if found else ""


def npu_link(text: str) -> str:
    """UP or DOWN, as hccn_tool has it of a port; "" where it says neither."""
    found = re.search(r"link status:\s*(UP|DOWN)", text)
    return found[1] if found else ""


def cann(text: str) -> str:
    """The version in a file of CANN's or NNAL's: an install.info, a version.cfg, or a version.info."""
    found = fields(text)
    for name in ("toolkit_running_version", "toolkit_installed_version"):
        if name in found:
            return found[name].strip("[]").rpartition(":")[2]
    return found.get("version") or found.get("Version") or found.get("Ascend-cann-atb") or ""


def gpus(text: str, apps: str) -> list[DeviceEntry]:
    """The devices that `nvidia-smi` lists by QUERY, with who holds their memory."""
    held: dict[str, list[Holder]] = {}
    for row in _table(apps, 4):
        used = int(row[-1]) * MIB if row[-1].isdigit() else 0  # a container is not told
        held.setdefault(row[0], []).append(Holder(row[1], row[2].rpartition("/")[2], used))
    return [
        DeviceEntry(
            f"GPU {row[0]}", row[0], row[2], int(row[5]) * MIB, int(row[4]) * MIB, holders=tuple(held.get(row[1], ()))
        )
        for row in _table(text, len(GPU))
        if row[4].isdigit() and row[5].isdigit()
    ]


GPU = ("index", "uuid", "name", "driver_version", "memory.total", "memory.used", "persistence_mode",
       "ecc.errors.uncorrected.volatile.total")  # fmt: skip


def gpu_fields(text: str) -> list[dict[str, str]]:
    return [dict(zip(GPU, row, strict=True)) for row in _table(text, len(GPU))]


def links(text: str) -> dict[tuple[str, str], str]:
    """How each two devices are connected, as `nvidia-smi topo -m` has it: NV18, or by PCIe."""
    rows = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line.strip()]
    names = [word for word in rows[0] if re.fullmatch(r"GPU\d+", word)] if rows else []
    cells = {row[0]: row[1:] for row in rows[1:] if row[0] in names and len(row) > len(names)}
    return {(a, b): cells[a][j] for a in cells for j, b in enumerate(names) if a < b}


def xids(text: str) -> list[str]:
    """The numbers of the faults that the driver told the kernel's log, each once."""
    return list(dict.fromkeys(re.findall(r"NVRM: Xid \([^)]*\): (\d+)", text)))


def torch_cuda(text: str) -> str:
    """The CUDA that torch/version.py says torch is built for; "" of another build."""
    found = re.search(r"^cuda(?::[^=]*)? = '([\d.]+)'", text, re.MULTILINE)
    return found[1] if found else ""


def memory(meminfo: str, most: str, used: str) -> tuple[int, int]:
    """Bytes that are free and that there are, of the machine or of the container that this is one of."""
    said = {name: int(value.split()[0]) << 10 for name, value in fields(meminfo).items() if value[:1].isdigit()}
    free = said.get("MemAvailable", 0)
    total = said.get("MemTotal", 0)
    if most.strip().isdigit() and used.strip().isdigit():
        return min(free, int(most) - int(used)), min(total, int(most))
    return free, total


def cards(text: str) -> set[str]:
    """What /proc/bus/pci/devices lists: makers and models, as lspci -n has them, of each card's first function."""
    rows = [line.split() for line in text.splitlines()]
    return {row[1].lower() for row in rows if len(row) > 1 and len(row[1]) == 8 and int(row[0], 16) % 8 == 0}


def _table(text: str, columns: int) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [row for row in rows if len(row) == columns]
