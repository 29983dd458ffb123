"""Build a wheel, and run the README's example with it outside the repository.

    python tests/wheel/check.py PYTHON...       # for each of these interpreters

Invariant: an environment has the wheel and the packages that it requires, at the versions of constraints/cpu.txt. Its
folder has what the README names: the program, its model and its data. Everything is in a temporary folder, which is
deleted. Exit status 1: a file is missing from the wheel, or a command failed.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PINNED = ("--quiet", "--constraint", ROOT / "constraints" / "cpu.txt")
LEXER = "from pygments.lexers import get_lexer_by_name; get_lexer_by_name('rlg')"
# In addition to the commands in the README's table.
COMMANDS = (
    "msrl-compile --explain staleness",
    "msrl-compile program.rlg --check",
    "msrl-compile program.rlg --format html -o plan.html",
    "msrl-compile program.rlg --why",
    "msrl-compile program.rlg --simulate 20",
    f"python -c {shlex.quote(LEXER)}",
)
OPTIONS = {"msrl-run": "--iterations 2"}


def call(*command: object, folder: Path = ROOT) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{shlex.join(map(str, command))} failed with status {done.returncode}:\n{done.stdout[-4000:]}")
    return done.stdout


def build(folder: Path) -> Path:
    """Build a wheel from the tracked files, and compare its files with those of the package."""
    tracked = call("git", "ls-files").splitlines()
    for name in tracked:
        copy = folder / "source" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy, follow_symlinks=False)
    call(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, folder / "source")
    (wheel,) = folder.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    held = {name for name in names if ".dist-info/" not in name}
    wanted = {name for name in tracked if name.startswith("msrl_graph/")}
    if held != wanted:
        sys.exit(f"missing from the wheel: {sorted(wanted - held)}; not of the package: {sorted(held - wanted)}")
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
        sys.exit("the wheel has no LICENSE")
    print(f"{wheel.name}: {len(held)} files", flush=True)
    return wheel


def prepare_example(folder: Path) -> list[str]:
    """Write the README's program with its model and data; return the README's commands."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```rlg\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    folder.mkdir()
    (folder / "program.rlg").write_text(program, encoding="utf-8")
    shutil.copytree(ROOT / "examples" / "arithmetic" / "model", folder / "model")
    shutil.copy2(ROOT / "examples" / "arithmetic" / "train.jsonl", folder)
    commands = re.findall(r"^\| `(msrl-[^`]+)`", text, re.MULTILINE)
    return [*(f"{command} {OPTIONS.get(command.split()[0], '')}" for command in commands), *COMMANDS]


def follow_hint(binaries: Path, example: Path) -> None:
    """Install what a run needs with the command that msrl-run prints if it is missing."""
    done = subprocess.run(
        [binaries / "msrl-run", "program.rlg"], cwd=example, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    program, *arguments = shlex.split(done.stderr.rpartition("to run plans: ")[2])
    if done.returncode != 2 or program != "pip":
        sys.exit(f"msrl-run without its packages ends with status {done.returncode}:\n{done.stderr}")
    call(binaries / "pip", *arguments, *PINNED)


def check(python: str, wheel: Path, folder: Path) -> None:
    """Install the wheel for an interpreter, and run the commands."""
    environment = folder / "environment"
    version = call(python, "--version").split()[-1]
    call(python, "-m", "venv", environment)
    binaries = environment / "bin"
    call(binaries / "pip", "install", *PINNED, "torch")
    call(binaries / "pip", "install", *PINNED, wheel)
    commands = prepare_example(folder / "example")
    follow_hint(binaries, folder / "example")
    for command in commands:
        name, *arguments = shlex.split(command)
        call(binaries / name, *arguments, folder=folder / "example")
    print(f"Python {version}: {len(commands)} commands of the README ran", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the README's example with a wheel.")
    parser.add_argument("pythons", nargs="+", metavar="PYTHON", help="an interpreter")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(Path(folder))
        for python in options.pythons:
            with tempfile.TemporaryDirectory() as own:
                check(python, wheel, Path(own))


if __name__ == "__main__":
    main()
