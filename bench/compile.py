"""How long `msrl-compile --check` takes beside the import of lark and networkx alone: whole processes, interleaved.

Usage: python bench/compile.py [--runs N]. The last line is one JSON object; the bar is a ratio of at most 3.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

PROGRAM = Path(__file__).parent.parent / "tests" / "programs" / "grpo_page.rlg"
BAR = 3.0
COMMANDS = {
    "compile": [sys.executable, "-m", "msrl_graph.cli", str(PROGRAM), "--check"],
    "imports": [sys.executable, "-c", "import lark, networkx"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=15, help="of each, after one that warms the caches")
    runs = max(11, parser.parse_args().runs)
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for i in range(runs + 1):
        for name, command in COMMANDS.items():
            began = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            if i:
                seconds[name].append(time.perf_counter() - began)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    # Each run beside its neighbour: what else the machine does then weighs on both.
    ratio = statistics.median(a / b for a, b in zip(seconds["compile"], seconds["imports"], strict=True))
    for name, values in seconds.items():
        print(f"{name:<8} median {median[name] * 1e3:7.1f} ms, least {min(values) * 1e3:7.1f} ms, {runs} runs")
    figures = {"bench": "compile", "ratio": round(ratio, 3), "bar": BAR, "pass": ratio <= BAR, "runs": runs}
    print(json.dumps({**figures, **{f"{k}_ms": round(v * 1e3, 1) for k, v in median.items()}}))


if __name__ == "__main__":
    main()
