"""The arithmetic example on 1, 2 and 4 hosts: same tokens and metrics.

The plans are made on one host. The tokens of the first iteration must be the same, and the metrics equal except for
rounding.

Hosts are network namespaces of this machine, with a Ray node in each; the environment only sets the cluster's address.
`--iterations 320` runs the whole example and shows its held-out accuracy. Needs root. The last line is JSON; the status
is 1 if tokens differ or a deviation exceeds the bar.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from pyarrow import parquet
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

import smoke
from hosts import Hosts

from msrl_graph import compile

EXAMPLE = Path(__file__).parent.parent / "examples" / "arithmetic"
BAR = 1e-4
METRICS = ("reward", "loss", "grad_norm", "response_length")
MAIN = "import sys; from msrl_graph.cli import run_main; sys.exit(run_main())"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", default="1 2 4")
    parser.add_argument("--iterations", default="2")
    parser.add_argument("--prompts", default="64")
    options = smoke.parse(parser, hosts="1", iterations="1", prompts="32")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("hosts", "tokens of the first iteration", "largest deviation of its metrics", "held-out accuracy"):
        table.add_column(title, justify="right")
    figures: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
        known: tuple[list[list[int]], dict[str, float]] | None = None
        for count in map(int, options.hosts.split()):
            out = _run(count, Path(folder), options)
            lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
            accuracy = [line["reward"] for line in lines if "evaluation" in line]
            first = next(line for line in lines if line.get("iteration") == 0 and "evaluation" not in line)
            outcome = _read_tokens(out), {name: first[name] for name in METRICS}
            known = known or outcome
            same = outcome[0] == known[0]
            apart = max(
                abs(outcome[1][metric] - known[1][metric]) / max(abs(known[1][metric]), 1e-6)
                for metric in METRICS
                if metric != "loss"
            )
            # The first loss is a sum that cancels out, of terms as large as an advantage.
            apart = max(apart, abs(outcome[1]["loss"] - known[1]["loss"]))
            figures[str(count)] = {"same_tokens": same, "deviation": apart, "accuracy": accuracy[-1]}
            verdict = "the same" if same else "differ"
            table.add_row(str(count), verdict, f"{apart:.1e}", f"{accuracy[0]:.3f} -> {accuracy[-1]:.3f}")
    Console(width=120).print(table)
    print(json.dumps(figures))
    return int(
        any(
            not host_figures["same_tokens"] or float(str(host_figures["deviation"])) > BAR
            for host_figures in figures.values()
        )
    )


def _run(count: int, folder: Path, options: argparse.Namespace) -> Path:
    """Run the plan for `count` hosts, from the first of them."""
    text = (EXAMPLE / "grpo.rlg").read_text()
    for old, new in (
        ("nodes = 1, devices_per_node = 2", f"nodes = {count}, devices_per_node = 1"),
        ("{ dp = 2, zero = 3 }", f"{{ dp = {count}, zero = 3 }}" if count > 1 else "{ dp = 1 }"),
        ("{ tp = 2 }", f"{{ dp = {count} }}"),
    ):
        assert old in text, old
        text = text.replace(old, new)
    for item in ("train.jsonl", "test.jsonl", "model"):
        if not (folder / item).exists():
            (folder / item).symlink_to(EXAMPLE / item)
    (folder / "p.rlg").write_text(text)
    plan = folder / f"{count}.json"
    plan.write_text(compile(folder / "p.rlg", sets={"prompts": options.prompts}).to_json())
    hosts = Hosts(count)
    try:
        command = [*hosts.on(0, str(folder)), sys.executable, "-c", MAIN, str(plan), "--record"]
        command += ["--iterations", options.iterations, "--out", str(folder / f"on-{count}")]
        environment = {**os.environ, **hosts.environment, "RAY_ADDRESS": hosts.address}
        subprocess.run(command, env=environment, check=True, stdout=sys.stderr)
    finally:
        hosts.close()
    return folder / f"on-{count}"


def _read_tokens(out: Path) -> list[list[int]]:
    """Return the responses of the first iteration, by row."""
    table = parquet.read_table(sorted((out / "rows").glob("**/000000.parquet"))[0])
    order = np.argsort(table["row"].to_numpy()) if "row" in table.column_names else range(len(table))
    responses = table["response"].to_pylist()
    return [responses[row] for row in order]


if __name__ == "__main__":
    sys.exit(main())
