"""Download the wheels that a run needs on a machine without a network, and print their size.

    python constraints/wheels.py DIR --have FILE         # FILE: what `pip list --format=freeze` printed there

The packages are those of the extra `run`, those named by --with, and what their wheels require in turn, in the versions
of constraints/cuda.txt and constraints/trl.txt. A package that the machine has is left out if its version is accepted;
torch and vLLM are always left out. Ray's wheel is packed again: without its Java library and its dashboard, which no
run uses, and compressed further. bench/with_wheels.py installs the folder.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from resolve import HERE, locked

LEFT_OUT = ("torch", "triton", "vllm", "nvidia-", "cuda-")
# What Megatron-Core requires and does not import.
UNUSED = {"onnxscript", "onnx-ir"}
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17", "manylinux2014", "manylinux1")
# Of Ray's wheel, what a run does not use.
SURPLUS = ("ray/jars/", "ray/dashboard/client/", "ray/cpp/", "ray/rllib/")


def requirements(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []


def pack_again(wheel: Path) -> None:
    """Leave out what a run does not use, and compress the rest by LZMA, which pip reads too."""
    partial = wheel.with_suffix(".partial")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(partial, "w", zipfile.ZIP_LZMA) as new:
        for entry in old.infolist():
            if entry.filename.startswith(SURPLUS):
                continue
            content = old.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                kept = (line for line in content.decode().splitlines(keepends=True) if not line.startswith(SURPLUS))
                content = "".join(kept).encode()
            new.writestr(entry, content, zipfile.ZIP_LZMA)
    partial.replace(wheel)


def download(name: str, version: str, python: str, folder: Path) -> Path | None:
    """Return the wheel of a package, downloaded unless the folder has it; None if the index has none."""

    def find() -> Path | None:
        wheels = (wheel for wheel in folder.glob("*.whl") if canonicalize_name(wheel.name.split("-")[0]) == name)
        return next(wheels, None)

    if found := find():
        return found
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}", f"--dest={folder}"]
    command += [f"--platform={platform}_x86_64" for platform in PLATFORMS]
    done = subprocess.run([*command, f"{name}=={version}" if version else name], capture_output=True, text=True)
    if done.returncode:
        print(f"{name} {version}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return None
    return find()


def roots(extras: list[str], others: list[str]) -> Iterator[Requirement]:
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    for line in (
        *project["dependencies"],
        *(item for extra in extras for item in project["optional-dependencies"][extra]),
    ):
        yield Requirement(line)
    yield from map(Requirement, others)


def collect(
    needs: list[Requirement], have: dict[str, str], versions: dict[str, str], python: str, folder: Path
) -> list[str]:
    """Download the wheels of `needs` and of what they require; return the packages that the index lacks.

    `have`: the versions that the machine has ("": not known, and accepted). `versions`: those to download.
    """
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    waiting = [*needs]
    seen: set[str] = set()
    missing = []
    while waiting:
        need = waiting.pop()
        name = canonicalize_name(need.name)
        if name in seen | UNUSED or name.startswith(LEFT_OUT):
            continue
        if need.marker and not need.marker.evaluate(environment):
            continue
        if name in have and (not have[name] or need.specifier.contains(Version(have[name]), prereleases=True)):
            continue
        seen.add(name)
        wheel = download(name, versions.get(name, ""), python, folder)
        if wheel is None:
            missing.append(name)
            continue
        waiting += map(Requirement, requirements(wheel))
        if name == "ray":
            pack_again(wheel)
    return missing


def main() -> int:
    p = argparse.ArgumentParser(description="Download the wheels that a machine without a network lacks.")
    p.add_argument("folder", type=Path)
    p.add_argument("--have", type=Path, help="the packages of that machine: NAME or NAME==VERSION a line")
    p.add_argument("--with", dest="others", nargs="*", default=["trl"], help="more packages (default: trl)")
    p.add_argument("--extras", nargs="*", default=["run", "megatron"])
    p.add_argument("--python", default="3.12", help="the version of that machine's Python")
    options = p.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    versions = locked(HERE / "trl.txt") | locked(HERE / "cuda.txt")
    have = locked(options.have) if options.have else {}
    missing = collect([*roots(options.extras, options.others)], have, versions, options.python, options.folder)
    wheels = sorted(options.folder.glob("*.whl"), key=lambda wheel: -wheel.stat().st_size)
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 1e6:8.2f} MB  {wheel.name}")
    print(f"{sum(wheel.stat().st_size for wheel in wheels) / 1e6:8.2f} MB  {len(wheels)} wheels")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
