"""How long a user waits from `msrl-run` to the first iteration of the example.

Prints, for this checkout and each folder of `--other` (other checkouts with an environment, measured in turn with it):
`first_s`, the seconds until the first line of metrics is there, and `first_cpu_s`, the CPU time of all processes by
then, medians of `--rounds` rounds. The last line is JSON."""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import smoke

ROOT = Path(__file__).parent.parent
PROGRAM = "examples/arithmetic/grpo.rlg"
# Modules are compiled once, as on a user's machine, even where the caller's Python keeps no bytecode.
CACHING = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def first_iteration(root: Path) -> tuple[float, float]:
    """Seconds from the start of a run to its first line of metrics, and the CPU seconds of its processes by then."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        command = [root / ".venv/bin/msrl-run", root / PROGRAM, "--iterations", "1", "--out", out]
        spent: dict[int, float] = {}
        begin = time.monotonic()
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder, env=CACHING)
        process = psutil.Process(run.pid)
        lines = out / "metrics.jsonl"
        while not (lines.exists() and lines.stat().st_size):
            if run.poll() is not None:
                raise SystemExit(f"the run of {root} ended with status {run.returncode} before its first iteration")
            for one in [process, *process.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    times = one.cpu_times()
                    spent[one.pid] = times.user + times.system
            time.sleep(0.05)
        waited = time.monotonic() - begin
        if run.wait():
            raise SystemExit(f"the run of {root} ended with status {run.returncode}")
        return waited, sum(spent.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--other", type=Path, nargs="*", default=[])
    options = smoke.parse(parser, rounds=1)
    roots = [ROOT, *(other.absolute() for other in options.other)]
    starts: dict[Path, list[tuple[float, float]]] = {root: [] for root in roots}
    for i in range(options.rounds):
        for root in roots[:: 1 if i % 2 else -1]:
            starts[root].append(first_iteration(root))
            print(f"{root.name}: {starts[root][-1][0]:.1f} s, {starts[root][-1][1]:.1f} s of CPU time", flush=True)
    medians = {
        str(root): {
            "first_s": statistics.median(waited for waited, _ in starts[root]),
            "first_cpu_s": statistics.median(cpu for _, cpu in starts[root]),
        }
        for root in roots
    }
    print(json.dumps(medians.pop(str(ROOT)) | ({"others": medians} if medians else {})))


if __name__ == "__main__":
    main()
