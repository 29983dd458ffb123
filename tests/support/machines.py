"""Machines that are none: files, what commands print, packages and an environment, as dictionaries.

What the commands print has the columns of the real ones (runtime/doctor/output_parsers.py says where these were seen),
with figures of its own. `a2`, `a3`, `h100` and `cpu` are healthy; a test breaks one thing of them.
"""

import sys
from fnmatch import fnmatch

from msrl_graph.runtime.doctor import ascend, cuda
from msrl_graph.runtime.doctor.examine import question
from msrl_graph.runtime.doctor.findings import ExaminedHost
from msrl_graph.runtime.doctor.machine import ABSENT, PYTHON, CommandOutput, Machine, look

GIB = 1 << 30
KIB = 1 << 10
CANN = "/usr/local/Ascend/cann-9.1.0"
NNAL = "/usr/local/Ascend/nnal/atb"
DRIVER = "/usr/local/Ascend/driver/version.info"
INFO = "npu-smi info"
TRY_NPU = f"{PYTHON} -c {ascend.CODE}"
QUERY, APPS, TOPOLOGY, LOG = (" ".join(w) for w in (cuda.QUERY, cuda.APPS, cuda.TOPOLOGY, cuda.LOG))
TRY_GPU = f"{PYTHON} -c {cuda.CODE}"
RUN = dict.fromkeys(("ray", "transformers", "tokenizers", "safetensors", "numpy", "tensordict", "psutil"), "2.60.0")
RUN |= {"torch": "2.13.0+cpu", "pyarrow": "26.0.1", "msgspec": "0.22.0", "msrl-graph": "0.1.0 0a1b2c3d"}


class Fake(Machine):
    """`files` are texts by path, those of modules too; `said` is what a command prints, with its status where that is
    not 0; what is not among these is not there."""

    def __init__(self, files, said, packages, environment, **facts):
        self.files = files
        self.said = said
        self.packages = packages
        self.environment = environment
        self.room_of = facts.pop("rooms", {"/dev/shm": (64 * GIB, 64 * GIB)})
        self.sizes = facts.pop("sizes", {})
        self.marks = facts.pop("marks", "7 7")
        self.given = {
            "name": "node-a",
            "system": "Linux 5.10.0",
            "processor": "aarch64",
            "python": "3.11.7",
            "root": True,
            "contained": False,
            "descriptors": (65536, 1048576),
            "cores": 192,
        } | facts

    @property
    def variables(self):
        return self.environment

    def facts(self):
        return self.given

    def names(self, pattern):
        parts = pattern.split("/")
        alike = (p for p in self.files if p.count("/") == len(parts) - 1)
        return sorted(p for p in alike if all(map(fnmatch, p.split("/"), parts)))

    def text(self, path):
        return self.files.get(path, "")

    source = text

    def size(self, path):
        return self.sizes.get(path, -1)

    def mark(self, path):
        return self.marks

    def room(self, folder):
        return self.room_of.get(folder, (0, 0))

    def version(self, package):
        return self.packages.get(package, "")

    def run(self, words, folders, seconds):
        assert seconds > 0
        said = self.said.get(" ".join(PYTHON if word == sys.executable else word for word in words), (ABSENT, ""))
        return (
            CommandOutput(status=0, text=said) if isinstance(said, str) else CommandOutput(status=said[0], text=said[1])
        )

    def host(self, plan=None, address="", resources=None, **more):
        return ExaminedHost(look(self, question(plan)), address, resources, **more)


def meminfo(free=1200 * GIB, total=1500 * GIB):
    return f"MemTotal:       {total // KIB} kB\nMemFree:        1024 kB\nMemAvailable:   {free // KIB} kB\n"


def npu_smi(dies, version="25.5.2", held=()):
    """`dies` as (npu, chip, number on the host or "", name, health, MB used, MB there), `held` as (npu, chip, process,
    name, MB)."""
    line = "+---------------------------+---------------+" + "-" * 52 + "+\n"
    thick = "+===========================+"
    thick += "===============+" + "=" * 52 + "+\n"
    text = "+" + "-" * 96 + "+\n" + f"| npu-smi {version:<24} Version: {version:<53}|\n" + line
    text += "| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|\n"
    text += (
        "| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |\n" + thick
    )
    for i, (npu, chip, number, name, health, used, total) in enumerate(dies):
        text += f"| {npu:<5} {name:<19} | {health:<13} | 97.5        41                0    / 0             |\n"
        text += (
            f"| {chip:<5} {number:<19} | 0000:C{i % 8}:00.0  | 0           0    / 0          {used:<5}/ {total:<13}|\n"
        )
        text += thick
    text += (
        line + "| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |\n"
    )
    text += thick
    for npu in dict.fromkeys(d[0] for d in dies):
        theirs = [h for h in held if h[0] == npu]
        for _, chip, pid, name, used in theirs:
            text += f"| {npu:<7} {chip:<17} | {pid:<13} | {name:<24} | {used:<23} |\n"
        text += "" if theirs else f"| No running processes found in NPU {npu:<62}|\n"
        text += thick
    return text


def a2_dies(used=3379, health="OK", **changed):
    return [(n, 0, "", "910B3", *changed.get(f"n{n}", (health, used)), 65536) for n in range(8)]


def a3_dies(used=2886):
    return [(n // 2, n % 2, n, "Ascend910", "OK", used, 65536) for n in range(16)]


def installed(home, version, ops=None):
    """A CANN in a folder, with its operators."""
    ops = version if ops is None else ops
    named = {"toolkit": ("Ascend-cann-toolkit", version), "ops": ("Ascend-cann-910b-ops", ops)}
    return {
        f"{home}/aarch64-linux/ascend_{what}_install.info": (
            f"package_name={package}\nversion={found}\ninnerversion=V100R001C11B063\n"
            "compatible_version=[V100R001C19],[V100R001C23]\narch=aarch64\nos=linux\n"
            f"path={home}/aarch64-linux\n"
        )
        for what, (package, found) in named.items()
        if found
    }


def npus(count, listed, **changed):
    files = {
        **{f"/dev/davinci{i}": "" for i in range(count)},
        DRIVER: "Version=25.5.2\nascendhal_version=7.35.23\naicpu_version=1.0\npackage_version=25.5.2\n",
        "/proc/meminfo": meminfo(),
        "/proc/bus/pci/devices": "0000\t80860d57\t0\nc100\t19e5d802\t0\n",
        **installed(CANN, "9.1.0"),
        f"{NNAL}/latest/version.info": "    Ascend-cann-atb : 9.1.0\n    Ascend-cann-atb Version : 9.1.0.B063\n",
        f"{NNAL}/set_env.sh": "",
    }
    links = {f"hccn_tool -i {i} -link -g": "link status: UP\n" for i in range(count)}
    packages = RUN | {"torch": "2.10.0+cpu", "torch-npu": "2.10.0.post4", "vllm": "0.23.0+empty"}
    packages |= {"vllm-ascend": "0.23.0", "megatron-core": "0.16.1", "mindspeed": "0.16.0"}
    environment = {
        "HOME": "/root",
        "ASCEND_HOME_PATH": CANN,
        "LD_LIBRARY_PATH": f"{CANN}/lib64:{NNAL}/latest/atb/cxx_abi_0/lib",
        "ATB_HOME_PATH": f"{NNAL}/latest/atb/cxx_abi_0",
    }
    machine = Fake(files, {INFO: listed, TRY_NPU: f"{count}\n"} | links, packages, environment)
    return broken(machine, **changed)


def broken(machine, files=None, said=None, packages=None, environment=None, **facts):
    """A machine of which these are other, or where they are None not there."""
    for held, other in (
        (machine.files, files),
        (machine.said, said),
        (machine.packages, packages),
        (machine.environment, environment),
    ):
        for name, value in (other or {}).items():
            held[name] = value
            if value is None:
                del held[name]
    machine.room_of = facts.pop("rooms", machine.room_of)
    machine.sizes = facts.pop("sizes", machine.sizes)
    machine.marks = facts.pop("marks", machine.marks)
    machine.given |= facts
    return machine


def a2(**changed):
    return npus(8, npu_smi(a2_dies()), **changed)


def a3(**changed):
    return npus(16, npu_smi(a3_dies(), "26.0.rc1"), **changed)


def gpu(index, used=4, persistence="Enabled", errors="0", name="NVIDIA H100 80GB HBM3", driver="580.95.05"):
    return f"{index}, GPU-0000000{index}, {name}, {driver}, 81559, {used}, {persistence}, {errors}\n"


def topology(count, how=lambda a, b: "NV18"):
    names = [f"GPU{i}" for i in range(count)]
    text = "\t" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    for a in range(count):
        cells = [" X " if a == b else how(a, b) for b in range(count)]
        text += f"{names[a]}\t" + "\t".join(cells) + "\t0-47\t0\t\tN/A\n"
    return text + "\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"


def h100(**changed):
    files = {
        **{f"/dev/nvidia{i}": "" for i in range(8)},
        "/proc/meminfo": meminfo(),
        "/proc/bus/pci/devices": "0300\t10de2330\t0\n",
        "torch/version.py": "__version__ = '2.13.0+cu130'\ndebug = False\ncuda: Optional[str] = '13.0'\n",
    }
    said = {QUERY: "".join(map(gpu, range(8))), APPS: "", TOPOLOGY: topology(8), LOG: "", TRY_GPU: "8\n"}
    packages = RUN | {"torch": "2.13.0", "vllm": "0.28.0", "megatron-core": "0.16.1"}
    return broken(Fake(files, said, packages, {"HOME": "/root"}, processor="x86_64"), **changed)


def cpu(**changed):
    files = {"/proc/meminfo": meminfo(16 * GIB, 32 * GIB), "torch/version.py": "cuda: Optional[str] = None\n"}
    return broken(Fake(files, {}, dict(RUN), {"HOME": "/home/me"}, processor="x86_64", cores=8), **changed)
