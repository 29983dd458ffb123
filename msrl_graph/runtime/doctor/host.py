"""Rules of any host: packages and their pairs, memory, shared memory, open files; and of hosts against each other.

Invariant: what differs between hosts is held against what most of them have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ...backends import ENGINES, UNTRIED, runs
from ...backends.packages import ALIASES
from ...emit.humanize import many, size
from ...hardware import version_pairs
from ...hardware.device_kinds import ASCEND, DEVICE_KINDS, HOST
from ...hardware.device_kinds import CUDA as NVIDIA
from ...hardware.version_pairs import CANN, CANN_DRIVER, CUDA, CUDA_DRIVER, PYTHON
from ..process.host_facts import APART
from . import ascend, cuda, output_parsers
from .devices import listed
from .findings import CARDS, Comparison, ExaminedHost, Finding, Rule, State, asking
from .machine import OWN

RUN = (
    "torch",
    "ray",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "tensordict",
    "psutil",
    "pyarrow",
    "msgspec",
)
PLUGGED = ("vllm-ascend",)
EXTRAS = (ASCEND.name, NVIDIA.name)  # of this package
LEAST = "3.11"  # of Python; pyproject.toml
SHARED = "/dev/shm"
SMALL = 64 << 20
BESIDE = 1 << 30  # bytes of shared memory that collectives of devices take
DESCRIPTORS, USUAL = 8192, 65536  # a process of Ray has some for each process that it speaks to
FULL = 0.1  # the share of a host's memory below which little is free
MEMINFO = "/proc/meminfo"
MOST = "/sys/fs/cgroup/memory.max"
USED = "/sys/fs/cgroup/memory.current"

WANTS = asking(
    texts=[CARDS, MEMINFO, MOST, USED],
    packages={
        OWN: [OWN],
        **{name: [name] for name in RUN},
        # A plug-in is not what it is plugged into.
        **{p: [n for n in ALIASES.get(p, (p,)) if n not in PLUGGED] for e in ENGINES.values() for p in e.needs},
    },
    rooms=[SHARED],
)


def versions(host: ExaminedHost) -> dict[str, str]:
    """All that versions are known of."""
    kit = ascend.cann(host)
    packages = dict(host.packages)
    if kit is None and ASCEND not in host.kinds:
        packages.pop(ascend.PLUGIN, "")  # it is to go
    return {
        **packages,
        PYTHON: host.seen["python"],
        CANN: kit.version if kit else "",
        CANN_DRIVER: ascend.driver_version(host),
        CUDA: cuda.toolkit(host),
        CUDA_DRIVER: cuda.driver_version(host),
    }


def memory(host: ExaminedHost) -> tuple[int, int]:
    """Bytes that are free and that there are."""
    return output_parsers.memory(host.text(MEMINFO), host.text(MOST), host.text(USED))


def machine(host: ExaminedHost) -> Iterator[Finding]:
    free, total = memory(host)
    cores = f"{many(host.seen['cores'], 'core')} ({host.seen['processor']})"
    told = f"{cores}, {size(free)} of {size(total)} free, {host.seen['system']}"
    if total and free < FULL * total:
        yield Finding(
            "machine",
            f"{size(free)} of {size(total)} of memory is free",
            "warning",
            "see who has it: ps aux --sort=-rss | head",
        )
    else:
        yield Finding("machine", told)


def python(host: ExaminedHost) -> Iterator[Finding]:
    found = host.seen["python"]
    if version_pairs.numbers(found) < version_pairs.numbers(LEAST):
        told = f"Python {found}, and {LEAST} or later is needed"
        yield Finding("python", told, "wrong", f"python{LEAST} -m venv .venv; .venv/bin/pip install '{OWN}[run]'")
    else:
        yield Finding("python", found)


def packages(host: ExaminedHost) -> Iterator[Finding]:
    missing = [name for name in RUN if name not in host.packages]
    extra = next((k.name for k in host.kinds if k.name in EXTRAS), "")
    if missing:
        told = f"{listed(missing)} {'is' if len(missing) == 1 else 'are'} not installed, which a run needs"
        install = f"pip install '{OWN}[{','.join(filter(None, ('run', extra)))}]'"
        yield Finding("packages", told, "wrong", install)
    else:
        needs = (p for spec in ENGINES.values() for p in spec.needs)
        shown = dict.fromkeys(name for name in ("torch", "ray", *needs, *PLUGGED) if name in host.packages)
        yield Finding("packages", ", ".join(f"{name} {host.packages[name]}" for name in shown))


def together(host: ExaminedHost) -> Iterator[Finding]:
    """Versions that do not go together."""
    known = versions(host)
    for pair in version_pairs.broken(known):
        wanted = pair.wanted(known[pair.package])
        told = f"{pair.package} {known[pair.package]} goes with {pair.other} {wanted}, and {known[pair.other]} is here"
        yield Finding("pairs", told, "wrong", _change(pair.other, wanted, host))


def _change(what: str, wanted: str, host: ExaminedHost) -> str:
    return {
        CANN_DRIVER: "sudo bash Ascend-hdk-*-npu-driver_*_linux-$(uname -m).run --upgrade; then restart the host",
        "mindspeed": ascend.mindspeed(wanted),
        CUDA_DRIVER: f"Ubuntu: sudo apt install nvidia-driver-{wanted.split()[0]}-server; then restart the host",
        CANN: f"bash Ascend-cann-toolkit_{wanted}*_linux-$(uname -m).run --install; its ops and NNAL too",
        PYTHON: f"python3.12 -m venv .venv; .venv/bin/pip install '{OWN}[run]'",
    }.get(what, f"pip install '{what}=={wanted}.*'")


def engines(host: ExaminedHost) -> Iterator[Finding]:
    """What of the engines is installed, and runs on the devices that there are."""
    kind = next((k for k in host.kinds if not k.is_host), HOST)
    lacks = {
        name: [p for p in kind.packages(spec.needs) if p not in host.packages]
        for name, spec in ENGINES.items()
        if runs(name)
    }
    there = [name for name, missing in lacks.items() if not missing]
    wanted = [f"{name} needs {', '.join(missing)}" for name, missing in lacks.items() if missing]
    able = " and ".join([", ".join(there[:-1])] * (len(there) > 1) + there[-1:]) or "none"
    how = f"there, and never tried on {kind.resource}" if kind.name in UNTRIED and there else "run here"
    able = f"{able} {'are ' * (how != 'run here')}{how}"
    yield Finding("engines", "; ".join([able, *wanted]))


def shared_memory(host: ExaminedHost) -> Iterator[Finding]:
    free, total = host.seen["rooms"].get(SHARED, (0, 0))
    accelerated = any(not k.is_host for k in host.kinds)
    mend = "sudo mount -o remount,size=16G /dev/shm"
    if host.seen["contained"]:
        mend = "docker run --shm-size=16g ...; of a pod an emptyDir with medium: Memory at /dev/shm"
    state: State = "wrong" if accelerated else "warning"
    if not total:
        told = "there is no /dev/shm: rows go by temporary files" + ", and collectives of devices fail" * accelerated
        yield Finding("shm", told, state, "sudo mount -t tmpfs tmpfs /dev/shm")
    elif free < (BESIDE if accelerated else SMALL):
        told = f"only {size(free)} of {size(total)} free in /dev/shm, by which rows and collectives go"
        yield Finding("shm", told, state, mend)
    else:
        yield Finding("shm", f"{size(free)} free in /dev/shm")


def descriptors(host: ExaminedHost) -> Iterator[Finding]:
    soft, hard = host.seen["descriptors"]
    if 0 <= soft < DESCRIPTORS:
        raised = f"ulimit -n {USUAL if hard < 0 else min(USUAL, hard)}"
        lasting = f"echo '* - nofile {USUAL}' | sudo tee -a /etc/security/limits.conf; then log in again"
        mend = host.anew(raised) if hard < 0 or hard >= DESCRIPTORS else lasting
        yield Finding(
            "descriptors", f"a process may have {soft} files open, and with many ranks Ray needs more", "warning", mend
        )
    else:
        yield Finding("descriptors", f"{soft if soft >= 0 else 'any number of'} files may be open")


def differing(hosts: Sequence[ExaminedHost]) -> Iterator[Finding]:
    """Versions that are not everywhere what they are on most hosts. What only devices need, hosts without any need
    not have."""
    if len(hosts) == 1:
        return
    with_devices = [host for host in hosts if host.kinds] or hosts
    known = {host.title: versions(host) for host in hosts}
    same = True
    for name in dict.fromkeys(n for found in known.values() for n in found):
        those = hosts if name in (OWN, PYTHON, *RUN) else with_devices
        found = [known[host.title].get(name, "") for host in those]
        meant, many_have = Counter(filter(None, found) if any(found) else found).most_common(1)[0]
        mend = f"pip install '{name}=={meant.partition('+')[0]}'"
        if name in (PYTHON, CANN, CANN_DRIVER, CUDA, CUDA_DRIVER, OWN):
            mend = "install the same on every host"
        for odd in dict.fromkeys(v for v in found if v != meant):
            where = tuple(h.title for h, v in zip(those, found, strict=True) if v == odd)
            told = f"{name} is {odd or 'not there'}, and {meant} on {many_have} of {len(those)}"
            grave = name == OWN or version_pairs.numbers(odd)[:2] != version_pairs.numbers(meant)[:2]
            slight = name in (CANN_DRIVER, CUDA_DRIVER)
            same = False
            yield Finding("versions", told, "wrong" if grave and not slight else "warning", mend, where)
    if same:
        yield Finding("versions", "the same on all hosts", hosts=tuple(h.title for h in hosts))


def clocks(hosts: Sequence[ExaminedHost]) -> Iterator[Finding]:
    for host in hosts:
        if abs(host.apart) > APART:
            told = f"its clock is {abs(host.apart):.0f} s {'ahead' if host.apart > 0 else 'behind'}"
            yield Finding(
                "clock", told, "warning", "sudo systemctl enable --now chronyd; chronyc makestep", (host.title,)
            )
    if len(hosts) > 1 and all(abs(host.apart) <= APART for host in hosts):
        yield Finding("clock", "the same on all hosts", hosts=tuple(h.title for h in hosts))


def cluster(hosts: Sequence[ExaminedHost]) -> Iterator[Finding]:
    """What Ray has of them, where they are a cluster's."""
    if all(host.resources is None for host in hosts):
        return
    kinds = {k.resource: sum((h.resources or {}).get(k.resource, 0) for h in hosts) for k in DEVICE_KINDS.values()}
    counts = ", ".join(f"{count:g} {name}" for name, count in kinds.items() if count)
    yield Finding("ray", f"{many(len(hosts), 'host')}, {counts or 'no devices'}", hosts=tuple(h.title for h in hosts))


def folders(hosts: Sequence[ExaminedHost]) -> Iterator[Finding]:
    """Whether hosts see the folder that the question comes from."""
    names = tuple(h.title for h in hosts)
    for path in hosts[0].seen["marks"] if len(hosts) > 1 else ():
        alike = len({host.seen["marks"][path] for host in hosts}) == 1 and hosts[0].seen["marks"][path]
        own = "not shared: models and data belong at the same path on each host, results need not be shared"
        yield Finding("folder", f"{path} is {'shared' if alike else own}", hosts=names)


FIRST: tuple[Rule, ...] = (machine, python)
BELOW: tuple[Rule, ...] = (packages, together)
RULES: tuple[Rule, ...] = (engines, shared_memory, descriptors)
COMPARISONS: tuple[Comparison, ...] = (cluster, differing, clocks, folders)
