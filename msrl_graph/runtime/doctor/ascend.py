"""Rules of Ascend machines: driver, CANN and whether it is in the environment, the plug-in of torch, links, dies.

Invariant: told from the bottom up, so that the first that is wrong is the first to mend, and nothing is told that only
follows from it. Atlas A2 and A3 are known; none of this has run on an NPU, the forms are those of output_parsers.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...hardware.device_kinds import ASCEND
from ...hardware.version_pairs import numbers
from . import devices, output_parsers
from .findings import ExaminedHost, Finding, Rule, asking, failed
from .machine import ABSENT, DEADLINE, HUNG, LONG, PYTHON, Command

HOMES = (
    "/usr/local/Ascend/cann",
    "/usr/local/Ascend/ascend-toolkit/latest",
    "$HOME/Ascend/cann",
    "$HOME/Ascend/ascend-toolkit/latest",
)
HOME = "ASCEND_HOME_PATH"
KERNELS = "opp/built-in/op_impl/ai_core/tbe/kernel"
NNAL = "/usr/local/Ascend/nnal/atb"
DRIVER = "/usr/local/Ascend/driver/version.info"
DEVICES = f"/dev/{ASCEND.files}"
PLUGIN = "torch-npu"
INFO = "npu-smi info"
RENAMED = (8, 5)  # from which CANN on its kernels are called ops
# A stub of the kernels comes with the toolkit's image.
STUBS = ("ops_oam", "config")
CODE = f"import torch, {ASCEND.plugin}; print(torch.{ASCEND.torch}.device_count())"


def _command(words: list[str], each: str = "", seconds: float = DEADLINE) -> Command:
    return Command(words=words, each=each, where=DEVICES, seconds=seconds)


WANTS = asking(
    texts=[
        DRIVER,
        f"{NNAL}/latest/version.info",
        *(f"{h}/{f}" for h in (f"${HOME}", *HOMES) for f in ("*-linux/ascend_*_install.info", "version.cfg")),
    ],
    paths=[DEVICES, f"{NNAL}/set_env.sh", *(f"{h}/{KERNELS}/ascend910*/*" for h in (f"${HOME}", *HOMES))],
    variables=[ASCEND.visible, HOME, "ATB_HOME_PATH", "LD_LIBRARY_PATH", "HOME"],
    packages={name: [name] for name in (PLUGIN, "vllm-ascend", "mindspeed", "megatron-core")},
    commands=[
        _command(INFO.split()),
        _command(["hccn_tool", "-i", "{}", "-link", "-g"], each=DEVICES),
        _command([PYTHON, "-c", CODE], seconds=LONG),
    ],
    folders=["/usr/local/sbin", "/usr/local/bin", "/usr/local/Ascend/driver/tools"],
)


class Toolkit(NamedTuple):
    """A CANN toolkit: its folder as its files are named, and its version."""

    home: str
    version: str


def toolkit(host: ExaminedHost, home: str) -> Toolkit | None:
    """The toolkit in a folder."""
    path = home.replace("$HOME", host.variables.get("HOME", "$HOME"))
    names = (f"{path}/{cpu}-linux/ascend_toolkit_install.info" for cpu in ("aarch64", "x86_64"))
    version = output_parsers.cann(host.text(*names, f"{path}/version.cfg"))
    return Toolkit(path, version) if version else None


def cann(host: ExaminedHost) -> Toolkit | None:
    """The toolkit of the environment, else one that is installed."""
    homes = [host.variables[HOME]] if host.variables.get(HOME) else []
    return next((found for home in (*homes, *HOMES) if (found := toolkit(host, home))), None)


def driver_version(host: ExaminedHost) -> str:
    """By its own file, else, where it is installed in another folder, by its command."""
    return output_parsers.fields(host.text(DRIVER)).get("Version") or output_parsers.npu_driver(host.said(INFO)["text"])


def dies(host: ExaminedHost) -> list[output_parsers.DeviceEntry]:
    return output_parsers.npu_dies(host.said(INFO)["text"])


def driver(host: ExaminedHost) -> Iterator[Finding]:
    there = host.devices(ASCEND)
    said = host.said(INFO)
    if not there and host.seen["contained"]:
        gives = "--device=/dev/davinci0 --device=/dev/davinci_manager --device=/dev/devmm_svm --device=/dev/hisi_hdc"
        binds = "-v /usr/local/Ascend/driver:/usr/local/Ascend/driver -v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi"
        told = "the machine has NPUs, and this container was given none: /dev has no davinci*"
        yield Finding("driver", told, "wrong", f"docker run {gives} {binds} ...")
    elif not there:
        install = "sudo bash Ascend-hdk-*-npu-driver_*_linux-$(uname -m).run --full --install-for-all"
        told = "there are NPUs on the PCI bus, and no driver: /dev has no davinci*"
        yield Finding("driver", told, "wrong", f"{install}; then the firmware's .run, and restart the host")
    elif said["status"] == ABSENT:
        give = "give the container it: -v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi"
        again = "install the driver again: it comes with it, in /usr/local/sbin"
        yield Finding("driver", "`npu-smi` is not there", "wrong", give if host.seen["contained"] else again)
    elif why := failed(said, INFO, DEADLINE):
        join = "sudo usermod -aG HwHiAiUser $USER; then log in again"
        look = "see what the driver told the kernel: dmesg | tail -n 50; then restart the host"
        yield Finding("driver", why, "wrong", look if host.seen["root"] or said["status"] == HUNG else join)
    else:
        names = ", ".join(dict.fromkeys(die.name for die in dies(host)))
        yield Finding("driver", f"{driver_version(host) or 'there'}, {there} NPU ({names})")


def environment(host: ExaminedHost) -> Iterator[Finding]:
    """CANN's toolkit, and whether it is in the environment."""
    home = host.variables.get(HOME, "")
    found = cann(host)
    if found is None:
        install = "bash Ascend-cann-toolkit_*_linux-$(uname -m).run --install"
        told = "CANN is not installed: there is no toolkit in /usr/local/Ascend"
        yield Finding("cann", told, "wrong", f"{install}; then source /usr/local/Ascend/cann/set_env.sh")
        return
    source = host.anew(f"source {found.home.removesuffix('/latest')}/set_env.sh")
    libraries = [p for p in host.variables.get("LD_LIBRARY_PATH", "").split(":") if p]
    loaded = any(p == home or p.startswith(f"{home}/") for p in libraries)
    kits = [kit for h in HOMES if (kit := toolkit(host, h)) and any(p.startswith(f"{kit.home}/") for p in libraries)]
    if not home:
        told = f"toolkit {found.version} is in {found.home}, and not in the environment: {HOME} is not set"
    elif found.home != home:
        told = f"{HOME} is {home}, where no toolkit is; toolkit {found.version} is in {found.home}"
    elif not loaded and not kits:
        told = f"toolkit {found.version} is half in the environment: LD_LIBRARY_PATH has no folder of {home}"
    elif not loaded and kits[0].version != found.version:
        told = f"{HOME} has toolkit {found.version}, and LD_LIBRARY_PATH {kits[0].version}, in {kits[0].home}"
    else:
        yield Finding("cann", found.version)
        return
    yield Finding("cann", told, "wrong", source)


def kernels(host: ExaminedHost) -> Iterator[Finding]:
    """CANN's operators, which are a package of their own."""
    if (found := cann(host)) is None:
        return
    infos = (f"{found.home}/{cpu}-linux/ascend_ops_install.info" for cpu in ("aarch64", "x86_64"))
    version = output_parsers.cann(host.text(*infos))
    there = [p for p in host.paths(f"{found.home}/{KERNELS}/ascend910*/*") if p.rpartition("/")[2] not in STUBS]
    named = "*-ops" if numbers(found.version) >= RENAMED else "kernels-*"
    install = f"bash Ascend-cann-{named}_{found.version}_linux-$(uname -m).run --install"
    if not version and not there:
        yield Finding("kernels", f"CANN {found.version} has no operators for NPUs installed", "wrong", install)
    elif version and version != found.version:
        told = f"CANN's operators are {version}, and its toolkit {found.version}"
        yield Finding("kernels", told, "wrong", install)
    else:
        yield Finding("kernels", version or "there")


def nnal(host: ExaminedHost) -> Iterator[Finding]:
    """The library that vllm-ascend takes its fused operators from."""
    found = cann(host)
    version = output_parsers.cann(host.text(f"{NNAL}/latest/version.info"))
    if found is None or not ("vllm-ascend" in host.packages or version):
        return
    install = f"bash Ascend-cann-nnal_{found.version}_linux-$(uname -m).run --install; then source {NNAL}/set_env.sh"
    if not version:
        yield Finding("nnal", "vllm-ascend needs NNAL, which is not installed", "wrong", install)
    elif version != found.version:
        yield Finding("nnal", f"NNAL is {version}, and CANN {found.version}", "wrong", install)
    elif not host.variables.get("ATB_HOME_PATH"):
        told = f"NNAL {version} is not in the environment: ATB_HOME_PATH is not set"
        yield Finding("nnal", told, "wrong", host.anew(f"source {NNAL}/set_env.sh"))
    else:
        yield Finding("nnal", version)


def plugins(host: ExaminedHost) -> Iterator[Finding]:
    """What torch, vLLM and Megatron need beside them to know an NPU."""
    packages = host.packages
    if (torch := packages.get("torch")) and PLUGIN not in packages:
        plain = torch.partition("+")[0]
        told = f"torch {torch} knows no NPU without {PLUGIN}, which is not installed"
        yield Finding("plugin", told, "wrong", f"pip install '{PLUGIN}=={plain}.*'")
    elif torch and "+cu" in torch:
        told = f"torch {torch} is built for CUDA, and {PLUGIN} is for the build for CPUs"
        other = f"pip install --force-reinstall 'torch=={torch.partition('+')[0]}+cpu'"
        yield Finding("plugin", told, "warning", f"from torch's own index of builds for CPUs: {other}")
    elif torch:
        yield Finding("plugin", f"{PLUGIN} {packages[PLUGIN]}, with torch {torch}")
    if (vllm := packages.get("vllm")) and "vllm-ascend" not in packages:
        told = f"vllm {vllm} knows no NPU without vllm-ascend, which is not installed"
        yield Finding("plugin", told, "wrong", f"pip install 'vllm-ascend=={vllm.partition('+')[0]}.*'")
    if "vllm-ascend" in packages and not vllm:
        found = packages["vllm-ascend"]
        install = f"pip install 'vllm=={'.'.join(map(str, numbers(found)))}'"
        yield Finding("plugin", f"vllm-ascend {found} is installed without vllm", "wrong", install)
    if (megatron := packages.get("megatron-core")) and "mindspeed" not in packages:
        told = f"megatron-core {megatron} runs on no NPU without MindSpeed, which is not installed"
        yield Finding("plugin", told, "warning", mindspeed(".".join(megatron.split(".")[:2])))


def mindspeed(release: str) -> str:
    """How a MindSpeed is installed, which no package index has."""
    return f"in a clone of MindSpeed: git checkout core_r{release}.0; pip install -e ."


def health(host: ExaminedHost) -> Iterator[Finding]:
    found = dies(host)
    for state in dict.fromkeys(die.health for die in found if die.health != "OK"):
        ill = [die for die in found if die.health == state]
        told = f"{devices.listed([die.label for die in ill])}: health is {state}"
        grave = state in ("Alarm", "Critical")
        yield Finding("health", told, "wrong" if grave else "warning", f"npu-smi info -t health -i {ill[0].card}")
    if found and len(found) < host.devices(ASCEND):
        told = f"npu-smi lists {len(found)} NPU, and /dev has {host.devices(ASCEND)}"
        yield Finding("health", told, "wrong", "see which is lost: npu-smi info -l; dmesg | tail -n 50")


def links(host: ExaminedHost) -> Iterator[Finding]:
    """HCCL's ports, one of each die. Within a host HCCL goes without them, and so it does within an A3's super node."""
    commands = {n: s for n, s in host.seen["said"].items() if n.startswith("hccn_tool")}
    states = {n.split()[2]: output_parsers.npu_link(s["text"]) for n, s in commands.items()}
    down = [f"port {n}" for n, state in states.items() if state == "DOWN"]
    silent = [f"port {n}" for n, state in states.items() if not state]
    between = host.others > 0
    if down:
        told = f"{devices.listed(down)} of {len(states)}: link is DOWN"
        told += "" if between else "; HCCL goes without it within a host"
        grave = between and len(dies(host)) == len({die.card for die in dies(host)})
        first = down[0].removeprefix("port ")
        ask = f"hccn_tool -i {first}"
        look = f"see cable, module and switch port: {ask} -optical -g; {ask} -link_stat -g"
        yield Finding("links", told, "wrong" if grave else "warning", look)
    elif silent and between:
        told = f"{devices.listed(silent)} of {len(states)}: hccn_tool does not say whether the link is up"
        tool = "/usr/local/Ascend/driver/tools/hccn_tool"
        look = f"on the host, as root: {tool} -i {silent[0].removeprefix('port ')} -link -g"
        yield Finding("links", told, "warning", look)
    elif states and not silent:
        yield Finding("links", f"{len(states)} up")


def stray(host: ExaminedHost) -> Iterator[Finding]:
    """The plug-in on a machine that is none for it."""
    if PLUGIN in host.packages and ASCEND not in host.kinds and cann(host) is None:
        told = f"{PLUGIN} {host.packages[PLUGIN]} is installed, and there is neither NPU nor CANN: "
        told += "torch, which loads it, fails"
        yield Finding("plugin", told, "wrong", f"pip uninstall {PLUGIN}")


def mask(host: ExaminedHost) -> Iterator[Finding]:
    return devices.mask(host, ASCEND)


def counted(host: ExaminedHost) -> Iterator[Finding]:
    return devices.counted(host, ASCEND)


def memory(host: ExaminedHost) -> Iterator[Finding]:
    return devices.held(host, dies(host), INFO)


def _of_kind(rule: Rule) -> Rule:
    """A rule of machines that have such devices, with a driver or without."""
    return lambda host: rule(host) if ASCEND in host.kinds else ()


def _on_device(rule: Rule) -> Rule:
    """A rule of machines whose driver is there."""
    return lambda host: rule(host) if host.devices(ASCEND) else ()


BELOW: tuple[Rule, ...] = (*map(_of_kind, (driver, environment, kernels, nnal, plugins)), stray)
ABOVE: tuple[Rule, ...] = tuple(map(_on_device, (health, links, memory, mask, counted)))
