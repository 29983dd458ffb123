"""Rules for machines with NVIDIA devices: driver, torch, memory, faults, links.

Invariant: findings are ordered from the lowest layer of the software to the highest, as in ascend.py. No rule has been
tried on a machine with an NVIDIA device; output_parsers.py lists the sources of the output formats.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...hardware.device_kinds import CUDA
from . import devices, output_parsers
from .findings import ExaminedHost, Finding, Rule, asking, failed
from .machine import ABSENT, DEADLINE, HUNG, LONG, PYTHON, Command

DEVICES = f"/dev/{CUDA.files}"
SMI = "nvidia-smi"
QUERY = [SMI, f"--query-gpu={','.join(output_parsers.GPU)}", "--format=csv,noheader,nounits"]
APPS = [SMI, "--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv,noheader,nounits"]
TOPOLOGY = [SMI, "topo", "-m"]
LOG = ["dmesg"]
SOURCE = "torch/version.py"
_TORCH = f"torch.{CUDA.torch}"
CODE = f"import torch; {_TORCH}.init(); print({_TORCH}.device_count())"
# Faults that end with the process that caused them: they come from programs, not from machines.
PROGRAMS = ("13", "31", "43", "45")


def _command(words: list[str], seconds: float = DEADLINE) -> Command:
    return Command(words=words, each="", where=DEVICES, seconds=seconds)


WANTS = asking(
    paths=[DEVICES],
    variables=[CUDA.visible],
    sources=[SOURCE],
    commands=[*map(_command, (QUERY, APPS, TOPOLOGY, LOG)), _command([PYTHON, "-c", CODE], LONG)],
    folders=["/usr/local/nvidia/bin", "/usr/sbin", "/sbin"],
)


def driver_version(host: ExaminedHost) -> str:
    return next((gpu["driver_version"] for gpu in output_parsers.gpu_fields(host.said(QUERY)["text"])), "")


def toolkit(host: ExaminedHost) -> str:
    """Return the CUDA version that torch is built for."""
    return output_parsers.torch_cuda(host.text(SOURCE))


def dies(host: ExaminedHost) -> list[output_parsers.DeviceEntry]:
    return output_parsers.gpus(host.said(QUERY)["text"], host.said(APPS)["text"])


def driver(host: ExaminedHost) -> Iterator[Finding]:
    count = host.devices(CUDA)
    output = host.said(QUERY)
    failure = failed(output, SMI, DEADLINE, output_parsers.first_line)
    if not count and host.seen["contained"]:
        message = "the machine has NVIDIA devices, but this container has none: /dev has no nvidia*"
        yield Finding(
            "driver", message, "wrong", "docker run --gpus all ... (with nvidia-container-toolkit on the host)"
        )
    elif not count:
        message = "there is an NVIDIA device on the PCI bus, but no driver: /dev has no nvidia*"
        yield Finding("driver", message, "wrong", "Ubuntu: sudo ubuntu-drivers install --gpgpu; then restart the host")
    elif output["status"] == ABSENT:
        docker_run = "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility ..."
        reinstall = (
            "Ubuntu: sudo apt install nvidia-utils-SERIES, of the driver's series: cat /proc/driver/nvidia/version"
        )
        yield Finding("driver", f"`{SMI}` is missing", "wrong", docker_run if host.seen["contained"] else reinstall)
    elif "library version mismatch" in output["text"]:
        yield Finding(
            "driver", failure, "wrong", "the driver was updated, but the old one is still loaded: restart the host"
        )
    elif output["status"] == HUNG:
        look = "see the driver's kernel messages: dmesg | tail -n 50; then restart the host"
        yield Finding("driver", failure, "wrong", look)
    elif failure:
        load = "sudo modprobe nvidia; and if that does not help, see why: dmesg | tail -n 50"
        yield Finding("driver", failure, "wrong", load)
    else:
        names = ", ".join(dict.fromkeys(die.name for die in dies(host)))
        yield Finding("driver", f"{driver_version(host)}, {count} GPU ({names})")


def build(host: ExaminedHost) -> Iterator[Finding]:
    """Check that torch is built for CUDA."""
    if not (torch := host.packages.get("torch")):
        return
    if not (cuda_version := toolkit(host)):
        plain = torch.partition("+")[0]
        message = f"torch {torch} is built for CPUs: it sees no GPU"
        yield Finding("plugin", message, "wrong", f"pip uninstall torch; pip install 'torch=={plain}'")
    else:
        yield Finding("plugin", f"torch {torch}, built for CUDA {cuda_version}")


def persistence(host: ExaminedHost) -> Iterator[Finding]:
    gpus = output_parsers.gpu_fields(host.said(QUERY)["text"])
    without_persistence = [f"GPU {gpu['index']}" for gpu in gpus if gpu["persistence_mode"] == "Disabled"]
    if without_persistence:
        labels = devices.listed(without_persistence)
        message = f"{labels}: the driver unloads when no process uses it, so starts take seconds longer"
        yield Finding("persistence", message, "warning", "sudo nvidia-smi -pm 1")


def faults(host: ExaminedHost) -> Iterator[Finding]:
    """Check for memory errors, missing devices, and faults in the kernel's log.

    The kernel's log is checked only if it is readable.
    """
    gpus = output_parsers.gpu_fields(host.said(QUERY)["text"])
    faulty = [gpu for gpu in gpus if gpu[output_parsers.GPU[-1]].isdigit() and int(gpu[output_parsers.GPU[-1]])]
    if faulty:
        cards = [f"GPU {gpu['index']}" for gpu in faulty]
        message = f"{devices.listed(cards)}: memory errors that ECC cannot correct"
        yield Finding(
            "health",
            message,
            "wrong",
            f"nvidia-smi -q -d ECC,ROW_REMAPPER -i {faulty[0]['index']}; then reset it or restart the host",
        )
    if xids := [xid for xid in output_parsers.xids(host.said(LOG)["text"]) if xid not in PROGRAMS]:
        message = f"the driver has logged faults since it started: Xid {devices.listed(xids)}"
        yield Finding("health", message, "warning", "sudo dmesg | grep Xid; NVIDIA's table of Xid errors explains them")
    if gpus and len(gpus) < host.devices(CUDA):
        message = f"nvidia-smi lists {len(gpus)} GPU, but /dev has {host.devices(CUDA)}"
        yield Finding("health", message, "wrong", "see which is missing: nvidia-smi -L; dmesg | grep -i nvrm | tail")


def links(host: ExaminedHost) -> Iterator[Finding]:
    """Check whether the devices of a host are connected by NVLink or by PCIe."""
    connections = output_parsers.links(host.said(TOPOLOGY)["text"])
    with_nvlink = [pair for pair, connection in connections.items() if connection.startswith("NV")]
    without = [" and ".join(pair) for pair in connections if pair not in with_nvlink]
    if with_nvlink and without and len(connections) > 1 and _is_switched(connections):
        message = f"{devices.listed(without)} are not connected by NVLink, but others of the host are"
        yield Finding("links", message, "warning", "nvidia-smi nvlink --status; nvidia-smi topo -m")
    elif connections:
        yield Finding(
            "links", "NVLink between all" if not without else "NVLink between some" if with_nvlink else "PCIe"
        )


def _is_switched(connections: dict[tuple[str, str], str]) -> bool:
    """Return whether NVLink connects most pairs of devices, as an NVLink switch does.

    An NVLink bridge connects only two devices.
    """
    return sum(connection.startswith("NV") for connection in connections.values()) * 2 > len(connections)


def mask(host: ExaminedHost) -> Iterator[Finding]:
    return devices.mask(host, CUDA)


def counted(host: ExaminedHost) -> Iterator[Finding]:
    return devices.counted(host, CUDA)


def memory(host: ExaminedHost) -> Iterator[Finding]:
    return devices.held(host, dies(host), SMI)


def _for_kind(rule: Rule) -> Rule:
    return lambda host: rule(host) if CUDA in host.kinds else ()


BELOW: tuple[Rule, ...] = tuple(map(_for_kind, (driver, build)))
ABOVE: tuple[Rule, ...] = tuple(map(_for_kind, (persistence, faults, links, memory, mask, counted)))
