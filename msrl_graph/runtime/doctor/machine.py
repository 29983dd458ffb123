"""The readings of a machine, and the object that reads them.

A *reading* is a fact about the machine, such as the text of a file or the output of a command.

Invariant: reading changes nothing, loads no package and judges nothing. The reader knows no kind of device, and reads
only the items that the query names. A command that hangs is abandoned after its deadline. All commands run in parallel,
so reading takes no longer than the longest command. A host needs only Python: Ray sends the code of this file to the
hosts, not the name of this module.
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

from ..process.host_facts import initial_environment, package_digest

OWN = "msrl-graph"
SMALL = 1 << 16  # most bytes of a file that are read
FEW = 64  # most files of a pattern that are read, and most items that a command is repeated for
DEADLINE = 15.0  # time limit in seconds for a command
LONG = 30.0  # time limit in seconds for a command that loads packages
PYTHON = "{python}"  # a command's word that stands for the Python of this process
HUNG = "hung"
ABSENT = "absent"


class Command(TypedDict):
    """A command to run on a machine.

    - `words`: the program and its arguments.
    - `each`: a pattern of file paths, or "". With a pattern, the command runs once for each matching file whose path
      ends in a number. This number replaces `{}` in `words`.
    - `where`: a pattern of file paths, or "". With a pattern, the command runs only if a file matches.
    - `seconds`: the time limit.
    """

    words: list[str]
    each: str
    where: str
    seconds: float


class HostQuery(TypedDict):
    """The facts to read from a machine.

    - `texts`: path patterns of files whose text is read. `$NAME` in a pattern is an environment variable.
    - `paths`: path patterns of files that are listed, but not read. `$NAME` in a pattern is an environment variable.
    - `sizes`: paths of files whose size is read.
    - `marks`: paths of folders whose mark is read. A mark is a text that is equal on all hosts that share the folder.
    - `variables`: names of environment variables. A `*` at the end of a name matches any ending.
    - `packages`: for each package, the names under which the package may be installed.
    - `sources`: files in Python modules, such as `torch/version.py`, whose text is read.
    - `commands`: commands to run.
    - `folders`: folders in which programs are searched, in addition to PATH.
    - `rooms`: folders whose free disk space is read.
    """

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
    """The output of a command, and its exit status.

    `status` is "hung" if the command did not end in time, and "absent" if the command does not exist.
    """

    status: int | str
    text: str


class MachineReadings(TypedDict):
    """What was read from a machine in answer to a HostQuery.

    Some fields have the same name as a field of the HostQuery. Such a field has the readings for the paths or names
    that the HostQuery's field lists. A key of `said` is the words of a command, joined by spaces; the value is the
    command's output. `descriptors` are the soft and the hard limit of open files.
    """

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
    """The machine on which this process runs, as a source of readings.

    Tests replace this object by an object with the same methods.
    """

    @property
    def variables(self) -> Mapping[str, str]:
        return initial_environment()

    def facts(self) -> dict[str, object]:
        """Return the facts that can be read without running a command."""
        return {
            "name": platform.node(),
            "system": f"{platform.system()} {platform.release()}",
            "processor": platform.machine(),
            "python": platform.python_version(),
            "root": os.geteuid() == 0,
            "contained": any(Path(path).exists() for path in ("/.dockerenv", "/run/.containerenv")),
            "descriptors": resource.getrlimit(resource.RLIMIT_NOFILE),
            "cores": os.cpu_count() or 1,
        }

    def names(self, pattern: str) -> list[str]:
        return sorted(glob(pattern))  # noqa: PTH207 (a Path has no pattern that begins at the root)

    def text(self, path: str) -> str:
        """Return the beginning of a file's text; "" if the file cannot be read."""
        try:
            with Path(path).open("rb") as file:
                return file.read(SMALL).decode(errors="replace")
        except OSError:
            return ""

    def source(self, path: str) -> str:
        """Return the text of a file in a module, without importing the module."""
        module, _, file = path.partition("/")
        spec = find_spec(module)
        folders = spec.submodule_search_locations if spec is not None else None
        return self.text(str(Path(folders[0]) / file)) if folders else ""

    def size(self, path: str) -> int:
        """Return the size of a file in bytes; -1 if the file is not readable."""
        try:
            return Path(path).stat().st_size if os.access(path, os.R_OK) else -1
        except (OSError, ValueError):
            return -1

    def mark(self, path: str) -> str:
        """Return a text that identifies a folder; "" if the folder is missing.

        Hosts that share the folder return the same text.
        """
        try:
            stat_result = Path(path).stat()
        except (OSError, ValueError):
            return ""
        return f"{stat_result.st_ino} {stat_result.st_mtime_ns}"

    def room(self, folder: str) -> tuple[int, int]:
        """Return the free and the total bytes of the disk that contains a folder.

        The free bytes are 0 if this process cannot write to the folder.
        """
        try:
            usage = shutil.disk_usage(folder)
        except OSError:
            return 0, 0
        return (usage.free if os.access(folder, os.W_OK) else 0), usage.total

    def version(self, package: str) -> str:
        if package == OWN:
            return package_digest()  # includes a digest of its files
        try:
            return version(package)
        except PackageNotFoundError:
            return ""

    def run(self, words: list[str], folders: list[str], seconds: float) -> CommandOutput:
        """Run a command and return its output.

        A command that does not end within `seconds` is killed with its children. A command that cannot be killed, for
        example because it is stuck in a driver, is abandoned.
        """
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
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=1)
            return CommandOutput(status=HUNG, text="")
        return CommandOutput(status=process.returncode, text=output[:SMALL].decode(errors="replace"))


class MachineProber:
    """A process that answers queries about its host. On a cluster, it is a Ray actor."""

    def look(self, query: HostQuery) -> MachineReadings:
        return look(Machine(), query)

    def clock(self) -> float:
        return time.time()


def look(machine: Machine, query: HostQuery) -> MachineReadings:
    """Read from a machine everything that a query names."""
    variables = machine.variables

    def matching(patterns: list[str]) -> list[str]:
        filled = [
            filled_pattern
            for filled_pattern in (_fill_variables(pattern, variables) for pattern in patterns)
            if filled_pattern
        ]
        return list(dict.fromkeys(name for pattern in filled for name in machine.names(pattern)[:FEW]))

    commands = [words for command in query["commands"] for words in _expand_command(machine, command)]
    with ThreadPoolExecutor(max(1, len(commands))) as pool:
        answers = pool.map(lambda job: machine.run(_insert_python(job[0]), query["folders"], job[1]), commands)
        packages = {
            package: next((value for name in names if (value := machine.version(name))), "")
            for package, names in query["packages"].items()
        }
        outputs = {" ".join(words): answer for (words, _), answer in zip(commands, answers, strict=True)}
    facts = machine.facts()
    sources = {path: text for path in query["sources"] if (text := machine.source(path))}
    readings = {
        "variables": {
            variable: value
            for variable, value in variables.items()
            if any(_matches_name(variable, name) for name in query["variables"])
        },
        "packages": {package: value for package, value in packages.items() if value},
        "texts": sources | {path: text for path in matching(query["texts"]) if (text := machine.text(path))},
        "paths": matching(query["paths"]),
        "sizes": {path: machine.size(path) for path in query["sizes"]},
        "marks": {path: machine.mark(path) for path in query["marks"]},
        "rooms": {folder: machine.room(folder) for folder in query["rooms"]},
        "said": outputs,
    }
    return cast(MachineReadings, facts | readings)


def numbers(paths: list[str]) -> list[int]:
    """Return the numbers at the ends of file paths, in ascending order."""
    return sorted(int(match[0]) for path in paths if (match := re.search(r"\d+$", path)))


def _expand_command(machine: Machine, command: Command) -> list[tuple[list[str], float]]:
    words = command["words"]
    seconds = command["seconds"]
    if command["where"] and not machine.names(command["where"]):
        return []
    if not command["each"]:
        return [(words, seconds)]
    repeat_numbers = numbers(machine.names(command["each"]))[:FEW]
    return [([word.replace("{}", str(number)) for word in words], seconds) for number in repeat_numbers]


def _insert_python(words: list[str]) -> list[str]:
    return [sys.executable if word == PYTHON else word for word in words]


def _matches_name(name: str, pattern: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


def _fill_variables(pattern: str, variables: Mapping[str, str]) -> str:
    """Replace each `$NAME` in a pattern by the environment variable NAME.

    Returns "" if one of the variables is missing or empty.
    """
    names = re.findall(r"\$(\w+)", pattern)
    if not all(variables.get(name) for name in names):
        return ""
    return re.sub(r"\$(\w+)", lambda match: variables[match[1]], pattern)
