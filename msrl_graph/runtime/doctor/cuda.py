"""Rules of machines with NVIDIA's devices: driver, torch's build, whose memory it is, faults, links.

Invariant: told from the bottom up, as of Ascend machines. None of this has run beside such a device; the forms are
those of output_parsers.py.
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
# Faults after which a device works on once the process that met it is gone; they are of programs, not of machines.
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
    """The CUDA that torch is built for."""
    return output_parsers.torch_cuda(host.text(SOURCE))


def dies(host: ExaminedHost) -> list[output_parsers.DeviceEntry]:
    return output_parsers.gpus(host.said(QUERY)["text"], host.said(APPS)["text"])


def driver(host: ExaminedHost) -> Iterator[Finding]:
    there = host.devices(CUDA)
    said = host.said(QUERY)
    why = failed(said, SMI, DEADLINE, output_parsers.first_line)
    if not there and host.seen["contained"]:
        told = "the machine has NVIDIA devices, and this container was given none: /dev has no nvidia*"
        yield Finding("driver", told, "wrong", "docker run --gpus all ... (with nvidia-container-toolkit on the host)")
    elif not there:
        told = "there is an NVIDIA device on the PCI bus, and no driver: /dev has no nvidia*"
        yield Finding("driver", told, "wrong", "Ubuntu: sudo ubuntu-drivers install --gpgpu; then restart the host")
    elif said["status"] == ABSENT:
        give = "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility ..."
        again = "Ubuntu: sudo apt install nvidia-utils-SERIES, of the driver's series: cat /proc/driver/nvidia/version"
        yield Finding("driver", f"`{SMI}` is not there", "wrong", give if host.seen["contained"] else again)
    elif "library version mismatch" in said["text"]:
        yield Finding("driver", why, "wrong", "the driver was renewed and the old one is loaded: restart the host")
    elif said["status"] == HUNG:
        look = "see what the driver told the kernel: dmesg | tail -n 50; then restart the host"
        yield Finding("driver", why, "wrong", look)
    elif why:
        load = "sudo modprobe nvidia; and if that does not help, see why: dmesg | tail -n 50"
        yield Finding("driver", why, "wrong", load)
    else:
        names = ", ".join(dict.fromkeys(die.name for die in dies(host)))
        yield Finding("driver", f"{driver_version(host)}, {there} GPU ({names})")


def build(host: ExaminedHost) -> Iterator[Finding]:
    """Whether torch is built for CUDA."""
    if not (torch := host.packages.get("torch")):
        return
    if not (found := toolkit(host)):
        plain = torch.partition("+")[0]
        told = f"torch {torch} is built for CPUs: it sees no GPU"
        yield Finding("plugin", told, "wrong", f"pip uninstall torch; pip install 'torch=={plain}'")
    else:
        yield Finding("plugin", f"torch {torch}, built for CUDA {found}")


def persistence(host: ExaminedHost) -> Iterator[Finding]:
    gpus = output_parsers.gpu_fields(host.said(QUERY)["text"])
    off = [f"GPU {gpu['index']}" for gpu in gpus if gpu["persistence_mode"] == "Disabled"]
    if off:
        told = f"{devices.listed(off)}: the driver is unloaded where no process has it, and starts take seconds more"
        yield Finding("persistence", told, "warning", "sudo nvidia-smi -pm 1")


def faults(host: ExaminedHost) -> Iterator[Finding]:
    """Errors of memory, and what the driver told the kernel's log, where that may be read."""
    gpus = output_parsers.gpu_fields(host.said(QUERY)["text"])
    ill = [gpu for gpu in gpus if gpu[output_parsers.GPU[-1]].isdigit() and int(gpu[output_parsers.GPU[-1]])]
    if ill:
        cards = [f"GPU {gpu['index']}" for gpu in ill]
        told = f"{devices.listed(cards)}: errors of memory that ECC cannot correct"
        yield Finding(
            "health",
            told,
            "wrong",
            f"nvidia-smi -q -d ECC,ROW_REMAPPER -i {ill[0]['index']}; then reset it or restart the host",
        )
    if found := [x for x in output_parsers.xids(host.said(LOG)["text"]) if x not in PROGRAMS]:
        told = f"the driver told the kernel of faults since it started: Xid {devices.listed(found)}"
        yield Finding(
            "health", told, "warning", "sudo dmesg | grep Xid, and what NVIDIA's table of Xid errors says of them"
        )
    if gpus and len(gpus) < host.devices(CUDA):
        told = f"nvidia-smi lists {len(gpus)} GPU, and /dev has {host.devices(CUDA)}"
        yield Finding("health", told, "wrong", "see which is lost: nvidia-smi -L; dmesg | grep -i nvrm | tail")


def links(host: ExaminedHost) -> Iterator[Finding]:
    """How devices of a host meet: over NVLink, all of them, or over PCIe."""
    found = output_parsers.links(host.said(TOPOLOGY)["text"])
    by = [pair for pair, how in found.items() if how.startswith("NV")]
    without = [" and ".join(pair) for pair in found if pair not in by]
    if by and without and len(found) > 1 and _switched(found):
        told = f"{devices.listed(without)} are not connected by NVLink, and others of the host are"
        yield Finding("links", told, "warning", "nvidia-smi nvlink --status; nvidia-smi topo -m")
    elif found:
        yield Finding("links", "NVLink between all" if not without else "NVLink between some" if by else "PCIe")


def _switched(found: dict[tuple[str, str], str]) -> bool:
    """Whether most pairs are connected, as by a switch: bridges connect two devices each."""
    return sum(how.startswith("NV") for how in found.values()) * 2 > len(found)


def mask(host: ExaminedHost) -> Iterator[Finding]:
    return devices.mask(host, CUDA)


def counted(host: ExaminedHost) -> Iterator[Finding]:
    return devices.counted(host, CUDA)


def memory(host: ExaminedHost) -> Iterator[Finding]:
    return devices.held(host, dies(host), SMI)


def _of_kind(rule: Rule) -> Rule:
    return lambda host: rule(host) if CUDA in host.kinds else ()


BELOW: tuple[Rule, ...] = tuple(map(_of_kind, (driver, build)))
ABOVE: tuple[Rule, ...] = tuple(map(_of_kind, (persistence, faults, links, memory, mask, counted)))
