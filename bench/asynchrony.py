"""Responses a second of examples/countdown, whose longest response is ten times as long as the mean: generation and
update in step, and with weights that may be one and two versions old, on two ranks of which one generates and one
learns.

The ways take turns, each for so many iterations, of which the first few are left out; told are the medians of all
rounds. The last line is JSON; its `proof_share` is the part of an iteration's seconds that went into the proof that
weights arrived (1: all), of all iterations of all ways, by the process that it took longest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

EXAMPLE = Path(__file__).parent.parent / "examples" / "countdown" / "countdown.rlg"
MAIN = "import sys; from msrl_graph.cli import run_main; sys.exit(run_main())"
WAYS = {"in step": 0, "staleness 1": 1, "staleness 2": 2}
NODES = ("actor.generate", "actor.update")
LEFT_OUT = 3  # iterations: the first fill the pipeline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=20)
    options = parser.parse_args()
    found: dict[str, list[list[dict[str, Any]]]] = defaultdict(list)
    for i in range(options.rounds):
        for name in sorted(WAYS, reverse=bool(i % 2)):
            found[name].append(run(WAYS[name], options.iterations))
            print(f"round {i + 1}, {name}: {rate(found[name][-1]):.0f} responses/s", file=sys.stderr, flush=True)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("", "responses/s", "over in step", "generate", "update", "proof", "versions behind", "longest/mean"):
        table.add_column(title, justify="right" if title else "left")
    rates = {name: statistics.median(map(rate, rounds)) for name, rounds in found.items()}
    for name, behind in WAYS.items():
        lines = [line for lines in found[name] for line in lines]
        table.add_row(
            name,
            f"{rates[name]:.0f}",
            f"{rates[name] / rates['in step']:.2f}",
            *(f"{statistics.median(line['phases'][node] for line in lines):.2f} s" for node in NODES),
            f"{proof_share(lines):.2%}",
            f"{statistics.mean(line.get('staleness', 0.0) for line in lines):.2f}, at most {behind}",
            f"{statistics.median(line['response_length_max'] / line['response_length'] for line in lines):.1f}",
        )
        assert max(line.get("staleness_max", 0.0) for line in lines) <= behind
    Console(width=120).print(table)
    told = {f"staleness{n}_over_sync": round(rates[name] / rates["in step"], 3) for name, n in WAYS.items() if n}
    told["proof_share"] = round(proof_share([x for rounds in found.values() for lines in rounds for x in lines]), 5)
    print(json.dumps({"responses_per_second": {n: round(r, 1) for n, r in rates.items()}, **told}))


def run(behind: int, iterations: int) -> list[dict[str, Any]]:
    """One run's lines of metrics, without the first."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--set", f"behind={behind}", "--iterations", str(iterations), "--out", f"{folder}/run"]
        subprocess.run([sys.executable, "-c", MAIN, str(EXAMPLE), *options], check=True, capture_output=True)
        lines = map(json.loads, (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines())
        return [line for line in lines if line.get("iteration", -1) >= LEFT_OUT and "evaluation" not in line]


def rate(lines: list[dict[str, Any]]) -> float:
    """Responses a second, of an iteration as most are."""
    return float(statistics.median(line["rows"] / line["seconds"] for line in lines))


def proof_share(lines: list[dict[str, Any]]) -> float:
    """Of the seconds of these iterations."""
    return sum(line["phases"].get("proof", 0.0) for line in lines) / sum(line["seconds"] for line in lines)


if __name__ == "__main__":
    main()
