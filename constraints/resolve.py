"""Whether the locked versions of each stack still go together, by the index's word alone: nothing is installed.

    python constraints/resolve.py             # of all stacks: what is locked against what the index gives now
    python constraints/resolve.py ascend      # of some
    python constraints/resolve.py --write     # lock anew what the index gives now

Invariant: a lock is what the pins of msrl_graph/hardware/stacks.py, the needs of this package and constraints/NAME.toml
(what uv is told of packages that no index has, or has in another build) lead to, and nothing else. Exit status 0: all
resolve, or the index cannot be reached, which is told; 1: a lock does not resolve, or lacks a package.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.utils import canonicalize_name

from msrl_graph.hardware.stacks import STACKS, Stack

HERE = Path(__file__).parent
# What uv says where no answer came, whatever the answer would have been.
UNREACHED = ("error sending request", "dns error", "Request failed after", "timed out", "Connect")


class Unreached(Exception):
    """The index did not answer."""


class Unresolved(Exception):
    """No versions go together; uv's own words."""


def resolved(stack: Stack, python: str, lock: Path | None = None) -> dict[str, str]:
    """The versions of all packages of a stack, by name, those of the `lock` where it has them."""
    own = HERE / f"{stack.name}.toml"
    options = ["--resolution", "lowest-direct"] if stack.lowest else []
    options += ["--constraints", str(lock)] if lock else []
    for extra in stack.extras:
        options += ["--extra", extra]
    with tempfile.NamedTemporaryFile("w", suffix=".in") as wanted:
        wanted.write("".join(f"{package}=={version}\n" for package, version in stack.pins.items()))
        wanted.flush()
        done = subprocess.run(
            [
                *(Path(sys.executable).with_name("uv"), "pip", "compile", wanted.name, HERE.parent / "pyproject.toml"),
                *(("--config-file", own) if own.is_file() else ("--no-config",)),
                *("--python", sys.executable, "--python-version", python, "--python-platform", stack.platform),
                *("--no-header", "--no-annotate", "--quiet", *options),
            ],
            capture_output=True,
            text=True,
            env=os.environ | {"UV_PYTHON_DOWNLOADS": "never"},
        )
    if done.returncode:
        raise (Unreached if any(words in done.stderr for words in UNREACHED) else Unresolved)(done.stderr.strip())
    return dict(line.split("==") for line in done.stdout.splitlines())


def locked(path: Path) -> dict[str, str]:
    lines = path.read_text().splitlines()
    return {canonicalize_name(n): v for n, _, v in (line.partition("==") for line in lines if not line.startswith("#"))}


def look(stack: Stack) -> bool:
    """Tells how a stack's lock stands; whether it is sound."""
    path = HERE / f"{stack.name}.txt"
    held, sound = locked(path), True
    for python in stack.pythons:
        told = f"{stack.name}, Python {python}, {stack.platform}"
        try:
            found = resolved(stack, python, path)
        except Unresolved as error:
            print(f"{told}: does not resolve\n{error}")
            return False
        lacking = sorted(found.keys() - held.keys())
        sound &= not lacking
        print(f"{told}: {len(found)} packages resolve" + f"; not locked: {', '.join(lacking)}" * bool(lacking))
    now = resolved(stack, stack.pythons[0])
    newer = [f"{p} {held[p]} -> {v}" for p, v in sorted(now.items()) if held.get(p, v) != v]
    print(f"  the index gives now: {', '.join(newer) or 'the same'}")
    for package, where in stack.elsewhere.items():
        print(f"  {package} is not the index's: {where}")
    return sound


def write(stack: Stack) -> None:
    """Locks what the index gives now: for the first Python, and what the others want besides."""
    path = HERE / f"{stack.name}.txt"
    comment = [line for line in path.read_text().splitlines() if line.startswith("#")] if path.is_file() else []
    found = resolved(stack, stack.pythons[0])
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as lock:
        lock.write("".join(f"{p}=={v}\n" for p, v in found.items()))
        lock.flush()
        for python in stack.pythons[1:]:
            found |= resolved(stack, python, Path(lock.name))
    path.write_text("".join(f"{line}\n" for line in (*comment, *(f"{p}=={v}" for p, v in sorted(found.items())))))


def main() -> int:
    p = argparse.ArgumentParser(description="Resolve the stacks of packages, dry.")
    p.add_argument("stacks", nargs="*", metavar="STACK", help=f"of {', '.join(STACKS)} (default: all)")
    p.add_argument("--write", action="store_true", help="lock anew what the index gives now")
    options = p.parse_args()
    sound = True
    for name in options.stacks or STACKS:
        try:
            if options.write:
                write(STACKS[name])
            else:
                sound &= look(STACKS[name])
        except Unreached as error:
            print(f"{name}: not resolved, since the index cannot be reached\n{error}")
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
