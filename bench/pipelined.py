"""Responses per second of examples/countdown on one pool of two ranks.

Both ranks generate and learn: in step, or with a staleness of one version, where the next iteration's responses are
drawn before the update with this one's. Rewards are computed after generation or during it (streamed), and take their
normal time or WAITS more seconds per row, in one process. A variant with separate ranks is the comparison.

The variants run in turn, each for a number of iterations; the first few are left out. Results are medians over all
rounds. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
from collections import defaultdict
from dataclasses import replace

import smoke
from asynchrony import LEFT_OUT, STREAMED, Way, rate, run_example
from rich.console import Console
from rich.table import Table

WAITS = 0.003
ONE = (
    ("layout actor.update, actor.generate { dp = 1 }", "layout actor.update, actor.generate { dp = 2 }"),
    ("  apart actor.update, actor.generate\n", ""),
)

SHARED = {
    "in step": Way(changes=ONE),
    "streamed": Way(changes=(*ONE, *STREAMED)),
    "staleness 1": Way(1, ONE),
    "staleness 1, streamed": Way(1, (*ONE, *STREAMED)),
    "apart, staleness 1, streamed": Way(1, STREAMED),
}
WAYS = {name: (way, replace(way, waits=WAITS)) for name, way in SHARED.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rewards", nargs="+", choices=("quick", "slow"), default=["quick", "slow"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS], help="variants, including `in step`")
    options = smoke.parse(parser, rounds=1, iterations=LEFT_OUT + 1, ways=["in step"], rewards=["quick"])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that started processes are ended
    rates_by_way: dict[tuple[str, str], list[float]] = defaultdict(list)
    for round_index in range(options.rounds):
        for name in sorted(options.ways, reverse=bool(round_index % 2)):
            for kind in options.rewards:
                way = WAYS[name][kind == "slow"]
                rates_by_way[name, kind].append(responses(way, options.iterations))
                label = f"round {round_index + 1}, {name}, {kind} rewards"
                print(f"{label}: {rates_by_way[name, kind][-1]:.0f} responses/s", file=sys.stderr, flush=True)
    rates = {key: statistics.median(values) for key, values in rates_by_way.items()}
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in (
        "responses/s",
        *(heading for kind in options.rewards for heading in (f"{kind} rewards", "over in step")),
    ):
        table.add_column(title, justify="right" if table.columns else "left")
    figures = {}
    for name in options.ways:
        speedups = {kind: rates[name, kind] / rates["in step", kind] for kind in options.rewards}
        cells = [cell for kind in speedups for cell in (f"{rates[name, kind]:.0f}", f"{speedups[kind]:.2f}")]
        table.add_row(name, *cells)
        figures[name] = {f"{kind}_over_in_step": round(value, 3) for kind, value in speedups.items()}
    Console(width=120).print(table)
    print(json.dumps({"bench": "pipelined", **figures}))


def responses(way: Way, iterations: int) -> float:
    """Return the responses per second of a run."""
    _, lines = run_example(way, "--iterations", str(iterations))
    lines = [line for line in lines if line.get("iteration", -1) >= LEFT_OUT]
    assert all(line.get("staleness_max", 0) == way.behind for line in lines), "all are as old as they may be"
    return rate(lines)


if __name__ == "__main__":
    main()
