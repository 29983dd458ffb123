"""What a host is and has, as the probe of a cluster asks it.

Invariant: looking changes nothing, and needs neither this package, which a host may lack, nor any other but what Ray
brings: Ray hands over the code of this file, not its name.
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
PATIENCE = 20.0  # seconds within which an interpreter tells its packages
APART = 2.0  # seconds that clocks may differ by: a trace lays what hosts did together
SOURCES = (".py", ".rlg", ".lark")
BLOCK = 1 << 16  # bytes of a block of a large file that is sampled, from its beginning to its end
SAMPLED = 16 * BLOCK  # bytes that are sampled of it
Packages = Mapping[str, tuple[str, ...]]  # the names that each may be installed by


class PackageQuery(TypedDict):
    """`packages`: of the run's interpreter; `others`: of each other one the command that tells them; `files`: paths;
    `devices`: the pattern of their files in /dev; `variables`: of the environment; `address`: Ray's of the host;
    `interface`: one that must be there, or ""."""

    packages: Packages
    others: Mapping[str, list[str]]
    files: list[str]
    devices: str
    variables: list[str]
    address: str
    interface: str


class Versions(TypedDict):
    """Of an interpreter, by package, "" where it is not installed; `wrong`: why it does not run, or ""."""

    found: dict[str, str]
    wrong: str


class HostFacts(TypedDict):
    """`versions`: by package, "" where it is not installed, `others`: those of other interpreters; `sizes`: by path, -1
    where nothing can be read; `digests`: by path, of sampled blocks, "" where nothing can be read; `memory`, `total`,
    `shared`: bytes that are free, that there are, and that are free in /dev/shm; `variables`: those that are set in the
    environment in which Ray starts processes; `interface`: that of the address, or the one that was asked for; "" where
    there is none; `speaks`: its own address."""

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
    """A process on a host that answers; on Ray an actor."""

    def look(self, asked: PackageQuery) -> HostFacts:
        return look(asked)

    def clock(self) -> float:
        return time.time()

    def keep(self, files: dict[str, Any]) -> str:
        """Lays down what is shipped to the host: the folder. Whoever is asked this has the package."""
        from msrl_graph.runtime.process.shipped_files import lay

        return str(lay(files))


def look(asked: PackageQuery) -> HostFacts:
    memory, total = _memory()
    held = _interfaces()
    name, speaks = interface(asked["address"], asked["interface"])
    return HostFacts(
        name=platform.node(),
        versions=versions(asked["packages"]),
        others={python: told(command) for python, command in asked["others"].items()},
        sizes={path: _size(path) for path in asked["files"]},
        digests=_sampled(asked["files"]),
        cores=os.cpu_count() or 1,
        devices=len([*Path("/dev").glob(asked["devices"])]) if asked["devices"] else 0,
        variables={name: value for name, value in begun_with().items() if name in asked["variables"]},
        memory=memory,
        total=total,
        shared=shutil.disk_usage("/dev/shm").free if os.access("/dev/shm", os.W_OK) else 0,
        interface=name,
        speaks=speaks,
        interfaces=sorted(name for name, addresses in held.items() if addresses),
    )


def versions(packages: Packages) -> dict[str, str]:
    """What the interpreter that runs this has."""
    found = {package: _version(names) for package, names in packages.items()}
    return {"Python": platform.python_version(), "msrl-graph": own(), **found}


def told(command: list[str]) -> Versions:
    """What another interpreter of this host has, by a command that has it run this file."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except OSError as error:
        return Versions(found={}, wrong=error.strerror or str(error))
    except subprocess.TimeoutExpired:
        return Versions(found={}, wrong=f"no answer within {PATIENCE:g} s")
    if done.returncode:
        said = done.stderr.strip().split("\n")[-1]
        return Versions(found={}, wrong=said or f"exit status {done.returncode}")
    return Versions(found=json.loads(done.stdout), wrong="")


def interface(address: str, stated: str = "") -> tuple[str, str]:
    """The interface that has an address of this host's, or the one that is stated, and its own address; nothing where
    there is none."""
    held = _interfaces()
    name = stated or next((n for n, addresses in held.items() if address in addresses), "")
    # Of several addresses one of the protocol that the host's address is of.
    own = sorted(held.get(name, ()), key=lambda a: (a != address, (":" in a) != (":" in address), a))
    return (name, own[0]) if own else ("", "")


def begun_with() -> Mapping[str, str]:
    """The environment that processes of a run begin in: this one, or on a host of a cluster that of Ray's server, since
    Ray changes it in the processes that it starts for others."""
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


def own() -> str:
    """This package's version and what its files hold, since a checkout changes and its version does not."""
    spec = find_spec(PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    if not folders:
        return ""
    digest = hashlib.sha256()
    folder = Path(folders[0])
    for path in sorted(p for p in folder.rglob("*") if p.suffix in SOURCES):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return f"{_version(('msrl-graph',))} {digest.hexdigest()[:8]}"


def sampled(path: str) -> str:
    """A digest of a file's size and of sampled blocks, or of all of it where it is small. OSError, also for a pipe."""
    # Without O_NONBLOCK a pipe that nobody writes into would hold the caller.
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


def _sampled(paths: list[str]) -> dict[str, str]:
    def one(path: str) -> str:
        try:
            return sampled(path)
        except (OSError, ValueError):
            return ""

    with ThreadPoolExecutor(8) as pool:  # they wait for disks and networks
        return dict(zip(paths, pool.map(one, paths), strict=True))


def _size(path: str) -> int:
    try:
        return Path(path).stat().st_size if os.access(path, os.R_OK) else -1
    except (OSError, ValueError):
        return -1


def _memory() -> tuple[int, int]:
    """Bytes that are free and that there are, of the machine or of the container that this is one of."""
    import psutil

    machine = psutil.virtual_memory()
    try:
        most = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return machine.available, machine.total
    return min(machine.available, most - used), min(machine.total, most)


def _interfaces() -> dict[str, set[str]]:
    """By interface its addresses of the Internet."""
    import socket

    import psutil

    kinds = (socket.AF_INET, socket.AF_INET6)
    return {name: {a.address for a in held if a.family in kinds} for name, held in psutil.net_if_addrs().items()}


if __name__ == "__main__":
    print(json.dumps(versions(json.loads(sys.argv[1]))))
