"""Facts that a run queries about a host before it starts processes on the host.

Invariant: a query changes nothing on the host. A query needs only packages that are installed with Ray. The host may
lack the package msrl_graph, so Ray sends the host the code of this file, not the name of a module.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypedDict

PACKAGE = "msrl_graph"
PATIENCE = 20.0  # seconds within which an interpreter reports its packages
CLOCK_TOLERANCE = 2.0  # maximum difference of clocks in seconds: a trace merges the events of all hosts
SOURCES = (".py", ".rlg", ".lark")
BLOCK = 1 << 16  # bytes of one sampled block; the blocks are spread over a large file
SAMPLED = 16 * BLOCK  # bytes that are sampled of a large file in all
Packages = Mapping[str, tuple[str, ...]]  # by package, the names under which it may be installed


class PackageQuery(TypedDict):
    """The facts to look up on a host.

    - `packages`: the packages whose versions are looked up in the process that answers the query.
    - `others`: for each other interpreter that a pool uses, the command that prints the versions of the interpreter's
      packages.
    - `files`: the paths of files.
    - `devices`: a glob pattern for device files in /dev.
    - `variables`: the names of environment variables.
    - `address`: the address by which Ray knows the host.
    - `interface`: the name of a network interface that must exist, or "".
    """

    packages: Packages
    others: Mapping[str, list[str]]
    files: list[str]
    devices: str
    variables: list[str]
    address: str
    interface: str


class Versions(TypedDict):
    """The package versions of one interpreter.

    - `found`: the version of each package; "" for a package that is not installed.
    - `wrong`: the reason why the interpreter does not run, or "".
    """

    found: dict[str, str]
    wrong: str


class HostFacts(TypedDict):
    """The answer of a host to a PackageQuery.

    - `name`: the name of the host.
    - `versions`: the version of each package; "" for a package that is not installed.
    - `others`: for each interpreter in the query's `others`, the versions of the interpreter's packages.
    - `sizes`: the size of each file in bytes; -1 for a file that is not readable.
    - `digests`: a digest of sampled blocks of each file; "" for a file that is not readable.
    - `cores`, `devices`: the number of CPU cores, and the number of device files that match the query's pattern.
    - `memory`, `total`: the free and the total bytes of memory.
    - `shared`: the free bytes in /dev/shm.
    - `variables`: the values of the query's variables in the environment in which Ray starts processes. A variable that
      is not set is left out.
    - `interface`: the network interface with the name in the query. If the query has no name, the interface with the
      query's address. "" if there is no such interface.
    - `speaks`: the address of the network interface `interface`.
    - `interfaces`: all network interfaces with an internet address.
    """

    name: str
    versions: dict[str, str]
    others: dict[str, Versions]
    sizes: dict[str, int]
    digests: dict[str, str]
    cores: int
    devices: int
    variables: dict[str, str]
    memory: int
    total: int
    shared: int
    interface: str
    speaks: str
    interfaces: list[str]


class HostActor:
    """A Ray actor that answers queries about the host on which it runs."""

    def look(self, asked: PackageQuery) -> HostFacts:
        return look(asked)

    def clock(self) -> float:
        return time.time()

    def keep(self, files: dict[str, Any]) -> str:
        """Store the user's files that the run ships to this host; return their new folder.

        The caller uses this method only on hosts that have the package msrl_graph.
        """
        from msrl_graph.runtime.process.shipped_files import ship_files

        return str(ship_files(files))


def look(asked: PackageQuery) -> HostFacts:
    memory, total = _memory()
    own_interfaces = _interfaces()
    name, speaks = find_interface(asked["address"], asked["interface"])
    return HostFacts(
        name=platform.node(),
        versions=versions(asked["packages"]),
        others={python: query_interpreter(command) for python, command in asked["others"].items()},
        sizes={path: _size(path) for path in asked["files"]},
        digests=_sampled_digests(asked["files"]),
        cores=os.cpu_count() or 1,
        devices=len([*Path("/dev").glob(asked["devices"])]) if asked["devices"] else 0,
        variables={name: value for name, value in initial_environment().items() if name in asked["variables"]},
        memory=memory,
        total=total,
        shared=shutil.disk_usage("/dev/shm").free if os.access("/dev/shm", os.W_OK) else 0,
        interface=name,
        speaks=speaks,
        interfaces=sorted(name for name, addresses in own_interfaces.items() if addresses),
    )


def versions(packages: Packages) -> dict[str, str]:
    """Return the versions of Python, of msrl_graph and of `packages`.

    For each package, the result has the version that this process has imported or would import.
    """
    package_versions = {package: _version(names) for package, names in packages.items()}
    return {"Python": platform.python_version(), "msrl-graph": package_digest(), **package_versions}


def query_interpreter(command: list[str]) -> Versions:
    """Return the package versions of another interpreter on this host.

    `command` makes the other interpreter run the code of this file, which prints the versions.
    """
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except OSError as error:
        return Versions(found={}, wrong=error.strerror or str(error))
    except subprocess.TimeoutExpired:
        return Versions(found={}, wrong=f"no answer within {PATIENCE:g} s")
    if result.returncode:
        last_line = result.stderr.strip().split("\n")[-1]
        return Versions(found={}, wrong=last_line or f"exit status {result.returncode}")
    return Versions(found=json.loads(result.stdout), wrong="")


def find_interface(address: str, stated: str = "") -> tuple[str, str]:
    """Return the name and the address of a network interface of this host.

    If `stated` is not empty, the interface with this name is used. If it is empty, the interface that has `address` is
    used. Returns ("", "") if there is no such interface.
    """
    own_interfaces = _interfaces()
    name = stated or next((candidate for candidate, addresses in own_interfaces.items() if address in addresses), "")
    # Of several addresses, prefer one of the same protocol as the host's address.
    own = sorted(
        own_interfaces.get(name, ()),
        key=lambda own_address: (own_address != address, (":" in own_address) != (":" in address), own_address),
    )
    return (name, own[0]) if own else ("", "")


def initial_environment() -> Mapping[str, str]:
    """Return the environment variables with which processes of a run start.

    If Ray's server started this process, the result is the environment of that server, because Ray changes the
    environment of the processes that it starts. If not, the result is the environment of this process.
    """
    parent = Path(f"/proc/{os.getppid()}")
    with suppress(OSError):
        if b"raylet" in (parent / "cmdline").read_bytes().split(b"\0")[0]:
            pairs = (parent / "environ").read_bytes().decode(errors="replace").split("\0")
            return dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    return os.environ


def _version(names: tuple[str, ...]) -> str:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def package_digest() -> str:
    """Return the version of msrl_graph and a digest of its files.

    The digest is needed because the files of a source checkout may change while the version of msrl_graph does not
    change.
    """
    spec = find_spec(PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    if not folders:
        return ""
    digest = hashlib.sha256()
    folder = Path(folders[0])
    for path in sorted(source for source in folder.rglob("*") if source.suffix in SOURCES):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return f"{_version(('msrl-graph',))} {digest.hexdigest()[:8]}"


def sampled_digest(path: str) -> str:
    """Return a digest of a file's size and of sampled blocks of its content.

    A small file is read whole. Raises OSError if the file cannot be read. Also raises OSError for anything that is not
    a regular file, such as a pipe.
    """
    # Without O_NONBLOCK a pipe without a writer would block the caller.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is not a regular file")
        size = status.st_size
        digest = hashlib.sha256(b"%d:" % size)
        blocks = SAMPLED // BLOCK
        places = range(blocks) if size > SAMPLED else ()
        for i in places:
            file.seek((size - BLOCK) * i // (blocks - 1))
            digest.update(file.read(BLOCK))
        if not places:
            digest.update(file.read())
    return digest.hexdigest()[:32]


def _sampled_digests(paths: list[str]) -> dict[str, str]:
    def one(path: str) -> str:
        try:
            return sampled_digest(path)
        except (OSError, ValueError):
            return ""

    with ThreadPoolExecutor(8) as pool:  # the threads wait for disks and networks
        return dict(zip(paths, pool.map(one, paths), strict=True))


def _size(path: str) -> int:
    try:
        return Path(path).stat().st_size if os.access(path, os.R_OK) else -1
    except (OSError, ValueError):
        return -1


def _memory() -> tuple[int, int]:
    """Return the free and the total bytes of memory of the machine or its container."""
    import psutil

    machine = psutil.virtual_memory()
    try:
        most = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return machine.available, machine.total
    return min(machine.available, most - used), min(machine.total, most)


def _interfaces() -> dict[str, set[str]]:
    """Return the name of each network interface, with the interface's addresses."""
    import socket

    import psutil

    kinds = (socket.AF_INET, socket.AF_INET6)
    return {
        name: {entry.address for entry in entries if entry.family in kinds}
        for name, entries in psutil.net_if_addrs().items()
    }


if __name__ == "__main__":
    print(json.dumps(versions(json.loads(sys.argv[1]))))
