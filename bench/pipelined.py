"""Responses a second of examples/countdown on one pool of two ranks that both generate and learn: in step, and with
staleness of one version, where the next iteration's responses are drawn before the update with this one's; each with
rewards handed on at once or while others are drawn (streamed), and with rewards as quick as they are or of WAITS more
seconds a row, by one process; beside it both ranks apart.

The ways take turns, each for so many iterations, of which the first few are left out; told are the medians of all
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
from asynchrony import LEFT_OUT, STREAMED, Way, rate, told_by
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
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS], help="`in step` among them")
    options = smoke.parse(parser, rounds=1, iterations=LEFT_OUT + 1, ways=["in step"], rewards=["quick"])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for i in range(options.rounds):
        for name in sorted(options.ways, reverse=bool(i % 2)):
            for kind in options.rewards:
                way = WAYS[name][kind == "slow"]
                found[name, kind].append(responses(way, options.iterations))
                told_now = f"round {i + 1}, {name}, {kind} rewards"
                print(f"{told_now}: {found[name, kind][-1]:.0f} responses/s", file=sys.stderr, flush=True)
    rates = {key: statistics.median(some) for key, some in found.items()}
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("responses/s", *(t for kind in options.rewards for t in (f"{kind} rewards", "over in step"))):
        table.add_column(title, justify="right" if table.columns else "left")
    told = {}
    for name in options.ways:
        over = {kind: rates[name, kind] / rates["in step", kind] for kind in options.rewards}
        cells = [cell for kind in over for cell in (f"{rates[name, kind]:.0f}", f"{over[kind]:.2f}")]
        table.add_row(name, *cells)
        told[name] = {f"{kind}_over_in_step": round(value, 3) for kind, value in over.items()}
    Console(width=120).print(table)
    print(json.dumps({"bench": "pipelined", **told}))


def responses(way: Way, iterations: int) -> float:
    """A second."""
    _, lines = told_by(way, "--iterations", str(iterations))
    lines = [line for line in lines if line.get("iteration", -1) >= LEFT_OUT]
    assert all(line.get("staleness_max", 0) == way.behind for line in lines), "all are as old as they may be"
    return rate(lines)


if __name__ == "__main__":
    main()
