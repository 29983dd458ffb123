"""Responses per second of examples/countdown, synchronous and asynchronous.

The longest response of the example is ten times as long as the mean. Compared are generation and update in step, with
rewards computed during generation (streamed), with responses that continue in the next iteration (partial), and with a
staleness of one and two versions, on two ranks: one generates and one learns. Rates are measured, and predicted for
this machine and the lengths that the rows had (except for partial).

The variants run in turn, each for a number of iterations; the first few are left out. Results are medians over all
rounds. This machine is measured before each round (or `--here FILE` is used). The last line is JSON; its `proof_share`
is the share of an iteration's seconds spent on the proof that weights arrived (1: all), over all iterations of all
variants, for the slowest process.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import smoke
from rich.console import Console
from rich.table import Table

from msrl_graph import compile
from msrl_graph.ir.plan import Estimate, Plan, from_json
from msrl_graph.runtime.calibrate.measure import measure
from msrl_graph.runtime.metrics import predicted

EXAMPLE = Path(__file__).parent.parent / "examples" / "countdown" / "countdown.rlg"
REWARD = EXAMPLE.parent / "countdown.py"
MAIN = "import sys; from msrl_graph.cli import run_main; sys.exit(run_main())"


@dataclass(frozen=True)
class Way:
    """A variant: changes to the example, and the age that its weights may have."""

    behind: int = 0
    changes: tuple[tuple[str, str], ...] = ()
    oldest: int = 0  # versions that a token may be old
    waits: float = 0.0  # additional seconds of a reward, per row


STREAMED = (
    ("  actor.generate -> host.reward, ", "  actor.generate -> host.reward { stream = 32 }\n  actor.generate -> "),
)
CUTS = 4


def partial(share: float) -> Way:
    """Return a variant with a share of additional prompts in progress."""
    attributes = f"temperature = 1.0, partial = {share}, cuts = {CUTS} }}"
    return Way(changes=(("temperature = 1.0 }", attributes),), oldest=CUTS)


WAYS = {
    "in step": Way(),
    "streamed": Way(changes=STREAMED),
    "partial": partial(0.125),  # about the share of prompts with a long response
    "staleness 1": Way(1, oldest=1),
    "staleness 2": Way(2, oldest=2),
}
NODES = ("actor.generate", "actor.update")
RANKS = 2
LEFT_OUT = 3  # iterations: the first fill the pipeline


@dataclass(frozen=True)
class Run:
    """The metrics of a run without the first iterations, and their estimate."""

    lines: list[dict[str, Any]]
    estimate: Estimate

    @property
    def rate(self) -> float:
        """Responses per second of a median iteration."""
        return rate(self.lines)

    @property
    def seconds(self) -> float:
        return float(statistics.median(line["seconds"] for line in self.lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--here", metavar="FILE", help="a calibration to use instead of measuring this machine")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS], help="variants, including `in step`")
    few = {"rounds": 1, "iterations": LEFT_OUT + 1, "here": os.devnull, "ways": ["in step"]}
    options = smoke.parse(parser, **few)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that started processes are ended
    runs: dict[str, list[Run]] = defaultdict(list)
    probed = compile("grpo", model="tiny", sets={"prompts": "64", "prompt_len": "16", "response_len": "16"})
    with tempfile.TemporaryDirectory() as folder:
        here = os.environ["MSRL_HERE"] = options.here or f"{folder}/here.json"
        for round_index in range(options.rounds):
            if not options.here:
                measure(probed, Path(here), rounds=1, most=RANKS)
            for name in sorted(options.ways, reverse=bool(round_index % 2)):
                runs[name].append(run(WAYS[name], options.iterations))
                print(
                    f"round {round_index + 1}, {name}: {runs[name][-1].rate:.0f} responses/s",
                    file=sys.stderr,
                    flush=True,
                )
    report(runs)


def report(runs_by_way: dict[str, list[Run]]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    heads = ("an iteration", "predicted", "over in step", "predicted", "versions behind", "predicted", "longest/mean")
    for title in ("", "responses/s", "generate", "update", "proof", *heads):
        table.add_column(title, justify="right" if title else "left")
    rates: dict[str, float] = {}
    took: dict[str, float] = {}
    want: dict[str, float] = {}
    speedups: dict[str, float] = {}
    foreseen: dict[str, float] = {}
    for name, way in [(key, value) for key, value in WAYS.items() if key in runs_by_way]:
        runs = runs_by_way[name]
        lines = [line for run in runs for line in run.lines]
        rates[name] = statistics.median(run.rate for run in runs)
        took[name] = statistics.median(run.seconds for run in runs)
        want[name] = statistics.median(run.estimate.iteration_seconds.value for run in runs)
        speedups[name] = rates[name] / rates["in step"]
        foreseen[name] = want["in step"] / want[name]
        old = statistics.mean(run.estimate.staleness.mean.value if run.estimate.staleness else 0.0 for run in runs)
        table.add_row(
            name,
            f"{rates[name]:.0f}",
            *(f"{statistics.median(line['phases'][node] for line in lines):.2f} s" for node in NODES),
            f"{proof_share(lines):.2%}",
            *(f"{values[name]:.2f} s" for values in (took, want)),
            *(f"{values[name]:.2f}" for values in (speedups, foreseen)),
            f"{statistics.mean(line.get('staleness', 0.0) for line in lines):.2f}, at most {way.oldest}",
            f"{old:.2f}",
            f"{statistics.median(line['response_length_max'] / line['response_length'] for line in lines):.1f}",
        )
        assert max(line.get("staleness_max", 0.0) for line in lines) <= way.oldest
    Console(width=150).print(table)
    figures: dict[str, Any] = {
        "responses_per_second": {way_name: round(responses, 1) for way_name, responses in rates.items()}
    }
    for name in [way_name for way_name in rates if way_name != "in step"]:
        figures |= {f"{name.replace(' ', '')}_over_sync": round(speedups[name], 3)}
        if WAYS[name].behind:
            figures |= {f"{name.replace(' ', '')}_over_sync_predicted": round(foreseen[name], 3)}
    figures["proof_share"] = round(
        proof_share([run_line for runs in runs_by_way.values() for run in runs for run_line in run.lines]), 5
    )
    print(json.dumps(figures))


def run(way: Way, iterations: int) -> Run:
    plan, lines = run_example(way, "--iterations", str(iterations))
    lines = [line for line in lines if line.get("iteration", -1) >= LEFT_OUT]
    estimate = predicted.estimate(plan, lines)
    assert estimate is not None
    return Run(lines, estimate)


def run_example(way: Way, *options: str) -> tuple[Plan, list[dict[str, Any]]]:
    """Run the example; return its plan and the lines of its metrics."""
    with tempfile.TemporaryDirectory() as folder:
        text = EXAMPLE.read_text()
        for old, new in way.changes:
            assert old in text, old
            text = text.replace(old, new)
        for item in EXAMPLE.parent.iterdir():
            if item != EXAMPLE and (item != REWARD or not way.waits):
                (Path(folder) / item.name).symlink_to(item)
        (Path(folder) / EXAMPLE.name).write_text(text)
        if way.waits:
            source = REWARD.read_text().replace("import re", "import re\nimport time")
            (Path(folder) / REWARD.name).write_text(
                source.replace("    wanted =", f"    time.sleep({way.waits})\n    wanted =")
            )
        command = [sys.executable, "-c", MAIN, f"{folder}/{EXAMPLE.name}", *options]
        command += ["--set", f"behind={way.behind}", "--out", f"{folder}/run"]
        subprocess.run(command, check=True, capture_output=True)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        return from_json((Path(folder) / "run" / "plan.json").read_text()), [*map(json.loads, lines)]


def rate(lines: list[dict[str, Any]]) -> float:
    """Return the responses per second of a median iteration."""
    return float(statistics.median(line["rows"] / line["seconds"] for line in lines))


def proof_share(lines: list[dict[str, Any]]) -> float:
    """Return the proof's share of the seconds of these iterations."""
    return sum(line["phases"].get("proof", 0.0) for line in lines) / sum(line["seconds"] for line in lines)


if __name__ == "__main__":
    main()
