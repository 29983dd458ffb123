"""Rules for any host, and comparisons of hosts.

The rules check packages and their versions, memory, shared memory and open files.

Invariant: if a value differs between hosts, the value of most hosts is the expected value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ...backends import ENGINES, UNTESTED_KINDS, can_build
from ...backends.packages import list_adaptors, list_version_pairs
from ...diagnostics.quantities import plural, size
from ...hardware import version_pairs
from ...hardware.device_kinds import ASCEND, DEVICE_KINDS, HOST
from ...hardware.device_kinds import CUDA as NVIDIA
from ...hardware.version_pairs import CANN, CANN_DRIVER, CUDA, CUDA_DRIVER, PYTHON
from ..process.host_facts import CLOCK_TOLERANCE
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
ADAPTORS = [adaptor for kind in DEVICE_KINDS.values() for adaptor in list_adaptors(kind)]
EXTRAS = (ASCEND.name, NVIDIA.name)  # extras of this package
LEAST = "3.11"  # the lowest Python version; pyproject.toml
SHARED = "/dev/shm"
SMALL = 64 << 20
BESIDE = 1 << 30  # bytes of shared memory that collectives of devices use
DESCRIPTORS = 8192  # a Ray process has several open files for each process that it communicates with
USUAL = 65536
FULL = 0.1  # a host's memory counts as full if a smaller share of it is free
MEMINFO = "/proc/meminfo"
MOST = "/sys/fs/cgroup/memory.max"
USED = "/sys/fs/cgroup/memory.current"

WANTS = asking(
    texts=[CARDS, MEMINFO, MOST, USED],
    packages={
        OWN: [OWN],
        **{name: [name] for name in RUN},
        **{
            package: [*engine.packages.names(package)]
            for engine in ENGINES.values()
            for kind in DEVICE_KINDS.values()
            for package in engine.packages.on(kind)
        },
    },
    rooms=[SHARED],
)


def versions(host: ExaminedHost) -> dict[str, str]:
    """Return the versions of a host's packages, Python, CANN, CUDA and drivers.

    The rule `together` compares these versions with the versions that are known to work together.
    """
    kit = ascend.cann(host)
    packages = dict(host.packages)
    if kit is None and ASCEND not in host.kinds:
        packages.pop(ascend.PLUGIN, "")  # another rule asks to uninstall it
    return {
        **packages,
        PYTHON: host.seen["python"],
        CANN: kit.version if kit else "",
        CANN_DRIVER: ascend.driver_version(host),
        CUDA: cuda.toolkit(host),
        CUDA_DRIVER: cuda.driver_version(host),
    }


def memory(host: ExaminedHost) -> tuple[int, int]:
    """Return the free and the total bytes of a host's main memory."""
    return output_parsers.memory(host.text(MEMINFO), host.text(MOST), host.text(USED))


def machine(host: ExaminedHost) -> Iterator[Finding]:
    free, total = memory(host)
    cores = f"{plural(host.seen['cores'], 'core')} ({host.seen['processor']})"
    message = f"{cores}, {size(free)} of {size(total)} free, {host.seen['system']}"
    if total and free < FULL * total:
        yield Finding(
            "machine",
            f"{size(free)} of {size(total)} of memory is free",
            "warning",
            "see which processes use it: ps aux --sort=-rss | head",
        )
    else:
        yield Finding("machine", message)


def python(host: ExaminedHost) -> Iterator[Finding]:
    version = host.seen["python"]
    if version_pairs.numbers(version) < version_pairs.numbers(LEAST):
        message = f"Python {version}, but {LEAST} or later is needed"
        yield Finding("python", message, "wrong", f"python{LEAST} -m venv .venv; .venv/bin/pip install '{OWN}[run]'")
    else:
        yield Finding("python", version)


def packages(host: ExaminedHost) -> Iterator[Finding]:
    missing = [name for name in RUN if name not in host.packages]
    extra = next((kind.name for kind in host.kinds if kind.name in EXTRAS), "")
    if missing:
        message = f"{listed(missing)} {'is' if len(missing) == 1 else 'are'} not installed, but needed by a run"
        install = f"pip install '{OWN}[{','.join(filter(None, ('run', extra)))}]'"
        yield Finding("packages", message, "wrong", install)
    else:
        needs = (package for spec in ENGINES.values() for package in spec.packages.needs)
        adaptors = (adaptor.name for adaptor in ADAPTORS if adaptor.required)
        shown = dict.fromkeys(name for name in ("torch", "ray", *needs, *adaptors) if name in host.packages)
        yield Finding("packages", ", ".join(f"{name} {host.packages[name]}" for name in shown))


def together(host: ExaminedHost) -> Iterator[Finding]:
    """Check that a host's package versions are known to work together."""
    known = versions(host)
    for pair in version_pairs.find_broken_pairs(known, list_version_pairs()):
        wanted = pair.wanted(known[pair.package])
        message = (
            f"{pair.package} {known[pair.package]} needs {pair.other} {wanted}, but {known[pair.other]} is installed"
        )
        yield Finding("pairs", message, "wrong", _how_to_install(pair.other, wanted, host))


def _how_to_install(package: str, wanted: str, host: ExaminedHost) -> str:
    if adaptor := next((adaptor for adaptor in ADAPTORS if adaptor.name == package), None):
        return adaptor.install(wanted)
    return {
        CANN_DRIVER: "sudo bash Ascend-hdk-*-npu-driver_*_linux-$(uname -m).run --upgrade; then restart the host",
        CUDA_DRIVER: f"Ubuntu: sudo apt install nvidia-driver-{wanted.split()[0]}-server; then restart the host",
        CANN: f"bash Ascend-cann-toolkit_{wanted}*_linux-$(uname -m).run --install; its ops and NNAL too",
        PYTHON: f"python3.12 -m venv .venv; .venv/bin/pip install '{OWN}[run]'",
    }.get(package, f"pip install '{package}=={wanted}.*'")


def engines(host: ExaminedHost) -> Iterator[Finding]:
    """Check which engines are installed on a host and can use its devices."""
    kind = next((device_kind for device_kind in host.kinds if not device_kind.is_host), HOST)
    missing_packages = {
        name: [package for package in spec.packages.on(kind) if package not in host.packages]
        for name, spec in ENGINES.items()
        if can_build(name)
    }
    ready = [name for name, missing in missing_packages.items() if not missing]
    needs = [f"{name} needs {', '.join(missing)}" for name, missing in missing_packages.items() if missing]
    ready_text = " and ".join([", ".join(ready[:-1])] * (len(ready) > 1) + ready[-1:]) or "none"
    state = f"installed, but never tried on {kind.resource}" if kind.name in UNTESTED_KINDS and ready else "run here"
    ready_text = f"{ready_text} {'are ' * (state != 'run here')}{state}"
    yield Finding("engines", "; ".join([ready_text, *needs]))


def shared_memory(host: ExaminedHost) -> Iterator[Finding]:
    free, total = host.seen["rooms"].get(SHARED, (0, 0))
    accelerated = any(not kind.is_host for kind in host.kinds)
    fix = "sudo mount -o remount,size=16G /dev/shm"
    if host.seen["contained"]:
        fix = "docker run --shm-size=16g ...; in a pod an emptyDir with medium: Memory at /dev/shm"
    state: State = "wrong" if accelerated else "warning"
    if not total:
        message = "there is no /dev/shm: rows use temporary files" + ", and collectives of devices fail" * accelerated
        yield Finding("shm", message, state, "sudo mount -t tmpfs tmpfs /dev/shm")
    elif free < (BESIDE if accelerated else SMALL):
        message = f"only {size(free)} of {size(total)} free in /dev/shm, which rows and collectives use"
        yield Finding("shm", message, state, fix)
    else:
        yield Finding("shm", f"{size(free)} free in /dev/shm")


def descriptors(host: ExaminedHost) -> Iterator[Finding]:
    soft, hard = host.seen["descriptors"]
    if 0 <= soft < DESCRIPTORS:
        raise_limit = f"ulimit -n {USUAL if hard < 0 else min(USUAL, hard)}"
        raise_for_all = f"echo '* - nofile {USUAL}' | sudo tee -a /etc/security/limits.conf; then log in again"
        fix = host.anew(raise_limit) if hard < 0 or hard >= DESCRIPTORS else raise_for_all
        yield Finding(
            "descriptors", f"a process may have {soft} files open, but with many ranks Ray needs more", "warning", fix
        )
    else:
        yield Finding("descriptors", f"{soft if soft >= 0 else 'any number of'} files may be open")


def differing(hosts: Sequence[ExaminedHost]) -> Iterator[Finding]:
    """Find package versions that differ from the version on most hosts.

    Packages that only devices need are compared only between hosts with devices.
    """
    if len(hosts) == 1:
        return
    with_devices = [host for host in hosts if host.kinds] or hosts
    versions_by_host = {host.title: versions(host) for host in hosts}
    all_same = True
    for name in dict.fromkeys(
        package for versions_of_host in versions_by_host.values() for package in versions_of_host
    ):
        compared = hosts if name in (OWN, PYTHON, *RUN) else with_devices
        host_versions = [versions_by_host[host.title].get(name, "") for host in compared]
        expected, many_have = Counter(filter(None, host_versions) if any(host_versions) else host_versions).most_common(
            1
        )[0]
        fix = f"pip install '{name}=={expected.partition('+')[0]}'"
        if name in (PYTHON, CANN, CANN_DRIVER, CUDA, CUDA_DRIVER, OWN):
            fix = "install the same on every host"
        for odd_version in dict.fromkeys(version for version in host_versions if version != expected):
            odd_hosts = tuple(
                host.title for host, version in zip(compared, host_versions, strict=True) if version == odd_version
            )
            message = f"{name} is {odd_version or 'not installed'}, but {expected} on {many_have} of {len(compared)}"
            is_serious = name == OWN or version_pairs.numbers(odd_version)[:2] != version_pairs.numbers(expected)[:2]
            is_driver = name in (CANN_DRIVER, CUDA_DRIVER)
            all_same = False
            yield Finding("versions", message, "wrong" if is_serious and not is_driver else "warning", fix, odd_hosts)
    if all_same:
        yield Finding("versions", "the same on all hosts", hosts=tuple(host.title for host in hosts))


def clocks(hosts: Sequence[ExaminedHost]) -> Iterator[Finding]:
    for host in hosts:
        if abs(host.apart) > CLOCK_TOLERANCE:
            message = f"its clock is {abs(host.apart):.0f} s {'ahead' if host.apart > 0 else 'behind'}"
            yield Finding(
                "clock", message, "warning", "sudo systemctl enable --now chronyd; chronyc makestep", (host.title,)
            )
    if len(hosts) > 1 and all(abs(host.apart) <= CLOCK_TOLERANCE for host in hosts):
        yield Finding("clock", "the same on all hosts", hosts=tuple(host.title for host in hosts))


def cluster(hosts: Sequence[ExaminedHost]) -> Iterator[Finding]:
    """Report the resources that Ray counts, if the hosts belong to a cluster."""
    if all(host.resources is None for host in hosts):
        return
    kinds = {
        kind.resource: sum((host.resources or {}).get(kind.resource, 0) for host in hosts)
        for kind in DEVICE_KINDS.values()
    }
    counts = ", ".join(f"{count:g} {name}" for name, count in kinds.items() if count)
    yield Finding(
        "ray",
        f"{plural(len(hosts), 'host')}, {counts or 'no devices'}",
        hosts=tuple(host.title for host in hosts),
    )


def folders(hosts: Sequence[ExaminedHost]) -> Iterator[Finding]:
    """Check whether all hosts share the folder in which msrl-doctor was started."""
    names = tuple(host.title for host in hosts)
    for path in hosts[0].seen["marks"] if len(hosts) > 1 else ():
        is_shared = len({host.seen["marks"][path] for host in hosts}) == 1 and hosts[0].seen["marks"][path]
        text = "not shared: models and data must be at the same path on each host, results need not be shared"
        yield Finding("folder", f"{path} is {'shared' if is_shared else text}", hosts=names)


FIRST: tuple[Rule, ...] = (machine, python)
BELOW: tuple[Rule, ...] = (packages, together)
RULES: tuple[Rule, ...] = (engines, shared_memory, descriptors)
COMPARISONS: tuple[Comparison, ...] = (cluster, differing, clocks, folders)
