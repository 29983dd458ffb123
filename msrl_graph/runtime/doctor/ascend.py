"""Rules for Ascend machines: driver, CANN, torch's plug-in, links, dies.

A *die* is one chip of an NPU; torch sees each die as a device.

Invariant: findings are ordered from the lowest layer of the software to the highest. So the first finding that reports
a problem is the first to fix, and a finding that only follows from another finding is not reported. The rules cover
Atlas A2 and A3. No rule has been tried on an NPU; output_parsers.py lists the sources of the output formats.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...backends.packages import list_adaptors
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
ADAPTORS = list_adaptors(ASCEND)
INFO = "npu-smi info"
RENAMED = (8, 5)  # the first CANN whose kernels are called ops
# The toolkit's image has a stub of the kernels.
STUBS = ("ops_oam", "config")
CODE = f"import torch, {ASCEND.plugin}; print(torch.{ASCEND.torch}.device_count())"


def _command(words: list[str], repeat_for: str = "", seconds: float = DEADLINE) -> Command:
    return Command(words=words, each=repeat_for, where=DEVICES, seconds=seconds)


WANTS = asking(
    texts=[
        DRIVER,
        f"{NNAL}/latest/version.info",
        *(
            f"{home}/{file}"
            for home in (f"${HOME}", *HOMES)
            for file in ("*-linux/ascend_*_install.info", "version.cfg")
        ),
    ],
    paths=[DEVICES, f"{NNAL}/set_env.sh", *(f"{home}/{KERNELS}/ascend910*/*" for home in (f"${HOME}", *HOMES))],
    variables=[ASCEND.visible, HOME, "ATB_HOME_PATH", "LD_LIBRARY_PATH", "HOME"],
    packages={PLUGIN: [PLUGIN]},
    commands=[
        _command(INFO.split()),
        _command(["hccn_tool", "-i", "{}", "-link", "-g"], repeat_for=DEVICES),
        _command([PYTHON, "-c", CODE], seconds=LONG),
    ],
    folders=["/usr/local/sbin", "/usr/local/bin", "/usr/local/Ascend/driver/tools"],
)


class Toolkit(NamedTuple):
    """An installed CANN toolkit.

    `home` is the folder of the toolkit, with the user's home folder in place of `$HOME`. `version` is the toolkit's
    version.
    """

    home: str
    version: str


def toolkit(host: ExaminedHost, home: str) -> Toolkit | None:
    """Return the CANN toolkit in the folder `home`, or None if there is no toolkit."""
    path = home.replace("$HOME", host.variables.get("HOME", "$HOME"))
    names = (f"{path}/{cpu}-linux/ascend_toolkit_install.info" for cpu in ("aarch64", "x86_64"))
    version = output_parsers.cann(host.text(*names, f"{path}/version.cfg"))
    return Toolkit(path, version) if version else None


def cann(host: ExaminedHost) -> Toolkit | None:
    """Return the CANN toolkit that a host's environment variables name.

    If the variables name no installed toolkit, the result is a toolkit in one of the usual folders, or None.
    """
    homes = [host.variables[HOME]] if host.variables.get(HOME) else []
    return next((kit for home in (*homes, *HOMES) if (kit := toolkit(host, home))), None)


def driver_version(host: ExaminedHost) -> str:
    """Return the Ascend driver's version, from the driver's version file or `npu-smi`.

    The output of `npu-smi` is used if the version file is not in the usual folder of the driver.
    """
    return output_parsers.fields(host.text(DRIVER)).get("Version") or output_parsers.npu_driver(host.said(INFO)["text"])


def dies(host: ExaminedHost) -> list[output_parsers.DeviceEntry]:
    return output_parsers.npu_dies(host.said(INFO)["text"])


def driver(host: ExaminedHost) -> Iterator[Finding]:
    count = host.devices(ASCEND)
    output = host.said(INFO)
    if not count and host.seen["contained"]:
        devices_options = (
            "--device=/dev/davinci0 --device=/dev/davinci_manager --device=/dev/devmm_svm --device=/dev/hisi_hdc"
        )
        volumes = (
            "-v /usr/local/Ascend/driver:/usr/local/Ascend/driver -v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi"
        )
        message = "the machine has NPUs, but this container has none: /dev has no davinci*"
        yield Finding("driver", message, "wrong", f"docker run {devices_options} {volumes} ...")
    elif not count:
        install = "sudo bash Ascend-hdk-*-npu-driver_*_linux-$(uname -m).run --full --install-for-all"
        message = "there are NPUs on the PCI bus, but no driver: /dev has no davinci*"
        yield Finding("driver", message, "wrong", f"{install}; then the firmware's .run, and restart the host")
    elif output["status"] == ABSENT:
        mount = "mount it into the container: -v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi"
        reinstall = "install the driver again: it contains npu-smi, in /usr/local/sbin"
        yield Finding("driver", "`npu-smi` is missing", "wrong", mount if host.seen["contained"] else reinstall)
    elif failure := failed(output, INFO, DEADLINE):
        join = "sudo usermod -aG HwHiAiUser $USER; then log in again"
        look = "see the driver's kernel messages: dmesg | tail -n 50; then restart the host"
        yield Finding("driver", failure, "wrong", look if host.seen["root"] or output["status"] == HUNG else join)
    else:
        names = ", ".join(dict.fromkeys(die.name for die in dies(host)))
        yield Finding("driver", f"{driver_version(host) or 'installed'}, {count} NPU ({names})")


def environment(host: ExaminedHost) -> Iterator[Finding]:
    """Check that a CANN toolkit is installed, and that environment variables name it."""
    home = host.variables.get(HOME, "")
    chosen = cann(host)
    if chosen is None:
        install = "bash Ascend-cann-toolkit_*_linux-$(uname -m).run --install"
        message = "CANN is not installed: there is no toolkit in /usr/local/Ascend"
        yield Finding("cann", message, "wrong", f"{install}; then source /usr/local/Ascend/cann/set_env.sh")
        return
    source = host.anew(f"source {chosen.home.removesuffix('/latest')}/set_env.sh")
    libraries = [folder for folder in host.variables.get("LD_LIBRARY_PATH", "").split(":") if folder]
    loaded = any(folder == home or folder.startswith(f"{home}/") for folder in libraries)
    kits = [
        kit
        for folder_of_kit in HOMES
        if (kit := toolkit(host, folder_of_kit)) and any(folder.startswith(f"{kit.home}/") for folder in libraries)
    ]
    if not home:
        message = f"toolkit {chosen.version} is in {chosen.home}, but not in the environment: {HOME} is not set"
    elif chosen.home != home:
        message = f"{HOME} is {home}, which has no toolkit; toolkit {chosen.version} is in {chosen.home}"
    elif not loaded and not kits:
        message = f"toolkit {chosen.version} is only partly in the environment: LD_LIBRARY_PATH has no folder of {home}"
    elif not loaded and kits[0].version != chosen.version:
        message = f"{HOME} has toolkit {chosen.version}, but LD_LIBRARY_PATH has {kits[0].version}, in {kits[0].home}"
    else:
        yield Finding("cann", chosen.version)
        return
    yield Finding("cann", message, "wrong", source)


def kernels(host: ExaminedHost) -> Iterator[Finding]:
    """Check that the package with CANN's operators is installed.

    This package is separate from the toolkit.
    """
    if (kit := cann(host)) is None:
        return
    infos = (f"{kit.home}/{cpu}-linux/ascend_ops_install.info" for cpu in ("aarch64", "x86_64"))
    version = output_parsers.cann(host.text(*infos))
    kernel_files = [
        path for path in host.paths(f"{kit.home}/{KERNELS}/ascend910*/*") if path.rpartition("/")[2] not in STUBS
    ]
    named = "*-ops" if numbers(kit.version) >= RENAMED else "kernels-*"
    install = f"bash Ascend-cann-{named}_{kit.version}_linux-$(uname -m).run --install"
    if not version and not kernel_files:
        yield Finding("kernels", f"CANN {kit.version} has no NPU operators installed", "wrong", install)
    elif version and version != kit.version:
        message = f"CANN's operators have version {version}, but its toolkit has {kit.version}"
        yield Finding("kernels", message, "wrong", install)
    else:
        yield Finding("kernels", version or "installed")


def nnal(host: ExaminedHost) -> Iterator[Finding]:
    """Check the version of NNAL, and the environment variable that NNAL needs.

    NNAL is a library with fused operators. The check runs only if NNAL, or a package that needs it, is installed.
    """
    kit = cann(host)
    version = output_parsers.cann(host.text(f"{NNAL}/latest/version.info"))
    users = [adaptor.name for adaptor in ADAPTORS if "NNAL" in adaptor.libraries and adaptor.name in host.packages]
    if kit is None or not (users or version):
        return
    install = f"bash Ascend-cann-nnal_{kit.version}_linux-$(uname -m).run --install; then source {NNAL}/set_env.sh"
    if not version:
        yield Finding("nnal", f"{devices.listed(users)} needs NNAL, which is not installed", "wrong", install)
    elif version != kit.version:
        yield Finding("nnal", f"NNAL has version {version}, but CANN has {kit.version}", "wrong", install)
    elif not host.variables.get("ATB_HOME_PATH"):
        message = f"NNAL {version} is not in the environment: ATB_HOME_PATH is not set"
        yield Finding("nnal", message, "wrong", host.anew(f"source {NNAL}/set_env.sh"))
    else:
        yield Finding("nnal", version)


def plugins(host: ExaminedHost) -> Iterator[Finding]:
    """Check the packages that torch and the packages of engines need for an NPU."""
    packages = host.packages
    if (torch := packages.get("torch")) and PLUGIN not in packages:
        plain = torch.partition("+")[0]
        message = f"torch {torch} cannot use an NPU without {PLUGIN}, which is not installed"
        yield Finding("plugin", message, "wrong", f"pip install '{PLUGIN}=={plain}.*'")
    elif torch and "+cu" in torch:
        message = f"torch {torch} is built for CUDA, but {PLUGIN} needs the build for CPUs"
        other = f"pip install --force-reinstall 'torch=={torch.partition('+')[0]}+cpu'"
        yield Finding("plugin", message, "warning", f"from PyTorch's own index of builds for CPUs: {other}")
    elif torch:
        yield Finding("plugin", f"{PLUGIN} {packages[PLUGIN]}, with torch {torch}")
    for adaptor in ADAPTORS:
        version = packages.get(adaptor.package, "")
        title = adaptor.title or adaptor.name
        if version and adaptor.name not in packages:
            message = f"{adaptor.package} {version} cannot use an NPU without {title}, which is not installed"
            yield Finding("plugin", message, "wrong" if adaptor.required else "warning", adaptor.install(version))
        elif adaptor.name in packages and not version and adaptor.required:
            own_version = packages[adaptor.name]
            install = f"pip install '{adaptor.package}=={'.'.join(map(str, numbers(own_version)))}'"
            yield Finding("plugin", f"{title} {own_version} is installed without {adaptor.package}", "wrong", install)


def health(host: ExaminedHost) -> Iterator[Finding]:
    entries = dies(host)
    for state in dict.fromkeys(die.health for die in entries if die.health != "OK"):
        unhealthy = [die for die in entries if die.health == state]
        message = f"{devices.listed([die.label for die in unhealthy])}: health is {state}"
        is_serious = state in ("Alarm", "Critical")
        yield Finding(
            "health", message, "wrong" if is_serious else "warning", f"npu-smi info -t health -i {unhealthy[0].card}"
        )
    if entries and len(entries) < host.devices(ASCEND):
        message = f"npu-smi lists {len(entries)} NPU, but /dev has {host.devices(ASCEND)}"
        yield Finding("health", message, "wrong", "see which is missing: npu-smi info -l; dmesg | tail -n 50")


def links(host: ExaminedHost) -> Iterator[Finding]:
    """Check the network ports that HCCL uses; each die has one port.

    HCCL does not need these ports within a host, nor within an A3's super node.
    """
    commands = {name: output for name, output in host.seen["said"].items() if name.startswith("hccn_tool")}
    states = {name.split()[2]: output_parsers.npu_link(output["text"]) for name, output in commands.items()}
    down = [f"port {name}" for name, state in states.items() if state == "DOWN"]
    unreported = [f"port {name}" for name, state in states.items() if not state]
    between = host.others > 0
    if down:
        message = f"{devices.listed(down)} of {len(states)}: link is DOWN"
        message += "" if between else "; HCCL does not need it within a host"
        is_serious = between and len(dies(host)) == len({die.card for die in dies(host)})
        first = down[0].removeprefix("port ")
        ask = f"hccn_tool -i {first}"
        look = f"see cable, module and switch port: {ask} -optical -g; {ask} -link_stat -g"
        yield Finding("links", message, "wrong" if is_serious else "warning", look)
    elif unreported and between:
        message = f"{devices.listed(unreported)} of {len(states)}: hccn_tool does not report whether the link is up"
        tool = "/usr/local/Ascend/driver/tools/hccn_tool"
        look = f"on the host, as root: {tool} -i {unreported[0].removeprefix('port ')} -link -g"
        yield Finding("links", message, "warning", look)
    elif states and not unreported:
        yield Finding("links", f"{len(states)} up")


def stray(host: ExaminedHost) -> Iterator[Finding]:
    """Warn if torch's NPU plug-in is installed, but there is neither an NPU nor CANN."""
    if PLUGIN in host.packages and ASCEND not in host.kinds and cann(host) is None:
        message = f"{PLUGIN} {host.packages[PLUGIN]} is installed, but there is neither an NPU nor CANN: "
        message += "torch loads it and fails"
        yield Finding("plugin", message, "wrong", f"pip uninstall {PLUGIN}")


def mask(host: ExaminedHost) -> Iterator[Finding]:
    return devices.mask(host, ASCEND)


def counted(host: ExaminedHost) -> Iterator[Finding]:
    return devices.counted(host, ASCEND)


def memory(host: ExaminedHost) -> Iterator[Finding]:
    return devices.held(host, dies(host), INFO)


def _for_kind(rule: Rule) -> Rule:
    """Restrict a rule to machines that have Ascend devices, with or without a driver."""
    return lambda host: rule(host) if ASCEND in host.kinds else ()


def _with_driver(rule: Rule) -> Rule:
    """Restrict a rule to machines that have the Ascend driver."""
    return lambda host: rule(host) if host.devices(ASCEND) else ()


BELOW: tuple[Rule, ...] = (*map(_for_kind, (driver, environment, kernels, nnal, plugins)), stray)
ABOVE: tuple[Rule, ...] = tuple(map(_with_driver, (health, links, memory, mask, counted)))
