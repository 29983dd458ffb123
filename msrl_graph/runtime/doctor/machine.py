"""What is read of a machine, and the one object that it is read through.

Invariant: reading changes nothing, loads no package and judges nothing; it knows of no kind of device, but reads what
it is asked for. A command that hangs is left after its deadline, and all run at once, so that reading takes no longer
than the longest of them. Nothing but Python is needed: Ray hands hosts the code of this file, not its name.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from glob import glob
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TypedDict, cast

from ..process.host_facts import begun_with, own

OWN = "msrl-graph"
SMALL = 1 << 16  # bytes of a file that are read
FEW = 64  # files of a pattern that are read, and items that a command is repeated for
DEADLINE, LONG = 15.0, 30.0  # seconds that a command has, and one that loads packages
PYTHON = "{python}"  # of a command's words: the Python that asks
HUNG = "hung"
ABSENT = "absent"


class Command(TypedDict):
    """`words`, of which `{}` is each number that the files of the pattern `each` end in, where there is one; run where
    a file of the pattern `where` is there, or always."""

    words: list[str]
    each: str
    where: str
    seconds: float


class HostQuery(TypedDict):
    """`texts` and `paths`: patterns, of files whose text is wanted and of those of which only whether they are there;
    $NAME in them is of the environment. `sizes` and `marks`: paths, of which the size is wanted, or what tells whether
    it is the same folder on two hosts. `variables`: names, `*` at the end for any. `packages`: the
    names that each may be installed by. `sources`: files in modules, `torch/version.py`. `folders`: where programs are
    found besides PATH. `rooms`: folders of which the free space is wanted."""

    texts: list[str]
    paths: list[str]
    sizes: list[str]
    marks: list[str]
    variables: list[str]
    packages: dict[str, list[str]]
    sources: list[str]
    commands: list[Command]
    folders: list[str]
    rooms: list[str]


class CommandOutput(TypedDict):
    """What a command printed, and its exit status; "hung" where it did not end, "absent" where there is none."""

    status: int | str
    text: str


class MachineReadings(TypedDict):
    """What was read, by what was asked; `said` by the command's words. `descriptors`: of open files, how many a
    process may have, and may let itself have."""

    name: str
    system: str
    processor: str
    python: str
    root: bool
    contained: bool
    variables: dict[str, str]
    packages: dict[str, str]
    texts: dict[str, str]
    paths: list[str]
    sizes: dict[str, int]
    marks: dict[str, str]
    rooms: dict[str, tuple[int, int]]
    said: dict[str, CommandOutput]
    descriptors: tuple[int, int]
    cores: int


class Machine:
    """This machine. Another one, as tests have it, answers the same questions."""

    @property
    def variables(self) -> Mapping[str, str]:
        return begun_with()

    def facts(self) -> dict[str, object]:
        """What needs no question."""
        return {
            "name": platform.node(),
            "system": f"{platform.system()} {platform.release()}",
            "processor": platform.machine(),
            "python": platform.python_version(),
            "root": os.geteuid() == 0,
            "contained": any(Path(p).exists() for p in ("/.dockerenv", "/run/.containerenv")),
            "descriptors": resource.getrlimit(resource.RLIMIT_NOFILE),
            "cores": os.cpu_count() or 1,
        }

    def names(self, pattern: str) -> list[str]:
        return sorted(glob(pattern))  # noqa: PTH207 (a Path has no pattern that begins at the root)

    def text(self, path: str) -> str:
        """The beginning of a file; nothing where it cannot be read."""
        try:
            with Path(path).open("rb") as file:
                return file.read(SMALL).decode(errors="replace")
        except OSError:
            return ""

    def source(self, path: str) -> str:
        """A file of a module, which is not imported."""
        module, _, file = path.partition("/")
        spec = find_spec(module)
        folders = spec.submodule_search_locations if spec is not None else None
        return self.text(str(Path(folders[0]) / file)) if folders else ""

    def size(self, path: str) -> int:
        """Bytes of a file that can be read, else -1."""
        try:
            return Path(path).stat().st_size if os.access(path, os.R_OK) else -1
        except (OSError, ValueError):
            return -1

    def mark(self, path: str) -> str:
        """What a folder has on each host that sees this very one; "" where there is none."""
        try:
            found = Path(path).stat()
        except (OSError, ValueError):
            return ""
        return f"{found.st_ino} {found.st_mtime_ns}"

    def room(self, folder: str) -> tuple[int, int]:
        """Bytes that are free in a folder that can be written to, and that there are."""
        try:
            found = shutil.disk_usage(folder)
        except OSError:
            return 0, 0
        return (found.free if os.access(folder, os.W_OK) else 0), found.total

    def version(self, package: str) -> str:
        if package == OWN:
            return own()  # with what its files hold
        try:
            return version(package)
        except PackageNotFoundError:
            return ""

    def run(self, words: list[str], folders: list[str], seconds: float) -> CommandOutput:
        """What a command says. One that does not end is killed with its children, and where that does not help, as of a
        process that a driver holds, left."""
        environment = {**self.variables, "LC_ALL": "C"}
        program = shutil.which(words[0], path=os.pathsep.join([environment.get("PATH", ""), *folders]))
        if program is None:
            return CommandOutput(status=ABSENT, text="")
        try:
            process = subprocess.Popen(
                [program, *words[1:]],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                env=environment, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return CommandOutput(status=126, text=str(error))
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=1)
            return CommandOutput(status=HUNG, text="")
        return CommandOutput(status=process.returncode, text=said[:SMALL].decode(errors="replace"))


class MachineProber:
    """A process on a host that answers; on Ray an actor."""

    def look(self, asked: HostQuery) -> MachineReadings:
        return look(Machine(), asked)

    def clock(self) -> float:
        return time.time()


def look(machine: Machine, asked: HostQuery) -> MachineReadings:
    """Everything that is asked of a machine."""
    variables = machine.variables

    def matching(patterns: list[str]) -> list[str]:
        whole = [p for p in (_filled(pattern, variables) for pattern in patterns) if p]
        return list(dict.fromkeys(name for pattern in whole for name in machine.names(pattern)[:FEW]))

    commands = [words for command in asked["commands"] for words in _each(machine, command)]
    with ThreadPoolExecutor(max(1, len(commands))) as pool:
        answers = pool.map(lambda c: machine.run(_here(c[0]), asked["folders"], c[1]), commands)
        packages = {
            package: next((v for name in names if (v := machine.version(name))), "")
            for package, names in asked["packages"].items()
        }
        said = {" ".join(words): answer for (words, _), answer in zip(commands, answers, strict=True)}
    facts = machine.facts()
    sources = {path: text for path in asked["sources"] if (text := machine.source(path))}
    seen = {
        "variables": {n: v for n, v in variables.items() if any(_is(n, name) for name in asked["variables"])},
        "packages": {package: v for package, v in packages.items() if v},
        "texts": sources | {path: text for path in matching(asked["texts"]) if (text := machine.text(path))},
        "paths": matching(asked["paths"]),
        "sizes": {path: machine.size(path) for path in asked["sizes"]},
        "marks": {path: machine.mark(path) for path in asked["marks"]},
        "rooms": {folder: machine.room(folder) for folder in asked["rooms"]},
        "said": said,
    }
    return cast(MachineReadings, facts | seen)


def numbers(paths: list[str]) -> list[int]:
    """The numbers that paths end in, rising."""
    return sorted(int(found[0]) for path in paths if (found := re.search(r"\d+$", path)))


def _each(machine: Machine, command: Command) -> list[tuple[list[str], float]]:
    words = command["words"]
    seconds = command["seconds"]
    if command["where"] and not machine.names(command["where"]):
        return []
    if not command["each"]:
        return [(words, seconds)]
    found = numbers(machine.names(command["each"]))[:FEW]
    return [([word.replace("{}", str(n)) for word in words], seconds) for n in found]


def _here(words: list[str]) -> list[str]:
    return [sys.executable if word == PYTHON else word for word in words]


def _is(name: str, pattern: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


def _filled(pattern: str, variables: Mapping[str, str]) -> str:
    """A pattern with the environment's values in it; nothing where it has not all of them."""
    wanted = re.findall(r"\$(\w+)", pattern)
    if not all(variables.get(name) for name in wanted):
        return ""
    return re.sub(r"\$(\w+)", lambda found: variables[found[1]], pattern)
