"""Responses a second of examples/countdown, whose longest response is ten times as long as the mean: generation and
update in step, with rewards while the longest responses are still drawn (streamed), with responses that go on in the
next iteration (partial), and with weights that may be one and two versions old, on two ranks of which one generates and
one learns; measured, and as it is predicted for this machine and the lengths that the rows had (but for partial).

The ways take turns, each for so many iterations, of which the first few are left out; told are the medians of all
rounds. Before each round this machine is measured (or `--here FILE` is taken). The last line is JSON; its `proof_share`
is the part of an iteration's seconds that went into the proof that weights arrived (1: all), of all iterations of all
ways, by the process that it took longest.
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
    """What is changed in the example, and how old its weights may be."""

    behind: int = 0
    changes: tuple[tuple[str, str], ...] = ()
    oldest: int = 0  # versions that a token may be old
    waits: float = 0.0  # seconds that a reward takes more, of each row


STREAMED = (
    ("  actor.generate -> host.reward, ", "  actor.generate -> host.reward { stream = 32 }\n  actor.generate -> "),
)
CUTS = 4


def partial(share: float) -> Way:
    """With so many more prompts under way than an iteration takes."""
    said = f"temperature = 1.0, partial = {share}, cuts = {CUTS} }}"
    return Way(changes=(("temperature = 1.0 }", said),), oldest=CUTS)


WAYS = {
    "in step": Way(),
    "streamed": Way(changes=STREAMED),
    "partial": partial(0.125),  # about as many as have a long response
    "staleness 1": Way(1, oldest=1),
    "staleness 2": Way(2, oldest=2),
}
NODES = ("actor.generate", "actor.update")
RANKS = 2
LEFT_OUT = 3  # iterations: the first fill the pipeline


@dataclass(frozen=True)
class Run:
    """The lines of a run's metrics, the first ones left out, and what was predicted for their rows."""

    lines: list[dict[str, Any]]
    estimate: Estimate

    @property
    def rate(self) -> float:
        """Responses a second, of an iteration as most are."""
        return rate(self.lines)

    @property
    def seconds(self) -> float:
        return float(statistics.median(line["seconds"] for line in self.lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--here", metavar="FILE", help="a calibration to take, in place of measuring this machine")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS], help="`in step` among them")
    few = {"rounds": 1, "iterations": LEFT_OUT + 1, "here": os.devnull, "ways": ["in step"]}
    options = smoke.parse(parser, **few)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    found: dict[str, list[Run]] = defaultdict(list)
    probed = compile("grpo", model="tiny", sets={"prompts": "64", "prompt_len": "16", "response_len": "16"})
    with tempfile.TemporaryDirectory() as folder:
        here = os.environ["MSRL_HERE"] = options.here or f"{folder}/here.json"
        for i in range(options.rounds):
            if not options.here:
                measure(probed, Path(here), rounds=1, most=RANKS)
            for name in sorted(options.ways, reverse=bool(i % 2)):
                found[name].append(run(WAYS[name], options.iterations))
                print(f"round {i + 1}, {name}: {found[name][-1].rate:.0f} responses/s", file=sys.stderr, flush=True)
    report(found)


def report(found: dict[str, list[Run]]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    heads = ("an iteration", "predicted", "over in step", "predicted", "versions behind", "predicted", "longest/mean")
    for title in ("", "responses/s", "generate", "update", "proof", *heads):
        table.add_column(title, justify="right" if title else "left")
    rates: dict[str, float] = {}
    took: dict[str, float] = {}
    want: dict[str, float] = {}
    over: dict[str, float] = {}
    foreseen: dict[str, float] = {}
    for name, way in [(n, w) for n, w in WAYS.items() if n in found]:
        runs = found[name]
        lines = [line for r in runs for line in r.lines]
        rates[name] = statistics.median(r.rate for r in runs)
        took[name] = statistics.median(r.seconds for r in runs)
        want[name] = statistics.median(r.estimate.iteration_seconds.value for r in runs)
        over[name] = rates[name] / rates["in step"]
        foreseen[name] = want["in step"] / want[name]
        old = statistics.mean(r.estimate.staleness.mean.value if r.estimate.staleness else 0.0 for r in runs)
        table.add_row(
            name,
            f"{rates[name]:.0f}",
            *(f"{statistics.median(line['phases'][node] for line in lines):.2f} s" for node in NODES),
            f"{proof_share(lines):.2%}",
            *(f"{s[name]:.2f} s" for s in (took, want)),
            *(f"{s[name]:.2f}" for s in (over, foreseen)),
            f"{statistics.mean(line.get('staleness', 0.0) for line in lines):.2f}, at most {way.oldest}",
            f"{old:.2f}",
            f"{statistics.median(line['response_length_max'] / line['response_length'] for line in lines):.1f}",
        )
        assert max(line.get("staleness_max", 0.0) for line in lines) <= way.oldest
    Console(width=150).print(table)
    told: dict[str, Any] = {"responses_per_second": {n: round(r, 1) for n, r in rates.items()}}
    for name in [n for n in rates if n != "in step"]:
        told |= {f"{name.replace(' ', '')}_over_sync": round(over[name], 3)}
        if WAYS[name].behind:
            told |= {f"{name.replace(' ', '')}_over_sync_predicted": round(foreseen[name], 3)}
    told["proof_share"] = round(proof_share([x for runs in found.values() for r in runs for x in r.lines]), 5)
    print(json.dumps(told))


def run(way: Way, iterations: int) -> Run:
    plan, lines = told_by(way, "--iterations", str(iterations))
    lines = [line for line in lines if line.get("iteration", -1) >= LEFT_OUT]
    estimate = predicted.estimate(plan, lines)
    assert estimate is not None
    return Run(lines, estimate)


def told_by(way: Way, *options: str) -> tuple[Plan, list[dict[str, Any]]]:
    """The plan of a run of the example, and the lines of its metrics."""
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
            said = REWARD.read_text().replace("import re", "import re\nimport time")
            (Path(folder) / REWARD.name).write_text(
                said.replace("    wanted =", f"    time.sleep({way.waits})\n    wanted =")
            )
        command = [sys.executable, "-c", MAIN, f"{folder}/{EXAMPLE.name}", *options]
        command += ["--set", f"behind={way.behind}", "--out", f"{folder}/run"]
        subprocess.run(command, check=True, capture_output=True)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        return from_json((Path(folder) / "run" / "plan.json").read_text()), [*map(json.loads, lines)]


def rate(lines: list[dict[str, Any]]) -> float:
    """Responses a second, of an iteration as most are."""
    return float(statistics.median(line["rows"] / line["seconds"] for line in lines))


def proof_share(lines: list[dict[str, Any]]) -> float:
    """Of the seconds of these iterations."""
    return sum(line["phases"].get("proof", 0.0) for line in lines) / sum(line["seconds"] for line in lines)


if __name__ == "__main__":
    main()
