"""Learning of examples/countdown by staleness, with and without correction.

One loss corrects for staleness, by the ratio to the log-probabilities at the time of drawing. The other treats all rows
as fresh: its ratio is to the log-probabilities of the weights when the update begins.

All runs are `deterministic`: each generation uses the oldest weights that it may, whichever process is slow. The last
line is JSON: for each variant and seed the held-out reward by number of iterations.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys

import smoke
from asynchrony import Way, partial, run_example
from rich.console import Console
from rich.table import Table

SAME = ("seed = 0 }", "seed = 0, deterministic = true }")
UNCORRECTED = (
    ("columns {", "columns {\n    old_logp  : f32[response]"),
    ("  node host.advantage", "  node actor.infer(prompt, response) -> old_logp\n  node host.advantage"),
    ("response, gen_logp, advantage) {", "response, gen_logp, old_logp, advantage) {"),
    ("old_logp = gen_logp", "old_logp = old_logp"),
    (
        "  host.reward -> host.advantage",
        "  actor.generate -> actor.infer -> actor.update\n  host.reward -> host.advantage",
    ),
)
WAYS = {
    "in step": Way(),
    "staleness 1": Way(1),
    "staleness 1, uncorrected": Way(1, UNCORRECTED),
    "staleness 4": Way(4),
    "staleness 4, uncorrected": Way(4, UNCORRECTED),
    "partial": partial(0.5),
    "partial, uncorrected": Way(changes=(*partial(0.5).changes, *UNCORRECTED)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--only", choices=WAYS, action="append", default=[])
    options = smoke.parse(parser, seeds=[0], iterations=2, only=["staleness 1, uncorrected"])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that started processes are ended
    points_by_way: dict[str, dict[int, dict[int, float]]] = {}
    for name, way in WAYS.items():
        if options.only and name not in options.only:
            continue
        for seed in options.seeds:
            deterministic = Way(way.behind, (*way.changes, SAME))
            _, lines = run_example(deterministic, "--seed", str(seed), "--iterations", str(options.iterations))
            points = {line["after_iterations"]: round(line["reward"], 4) for line in lines if "evaluation" in line}
            oldest = int(max(line.get("staleness_max", 0) for line in lines))
            points_by_way.setdefault(name, {})[seed] = points
            print(f"{name}, seed {seed}: {points}, at most {oldest} versions behind", file=sys.stderr, flush=True)
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("held-out reward after iterations, mean")
    after = sorted(next(iter(points_by_way.values()))[options.seeds[0]])
    for title in (*map(str, after), "each seed at the end"):
        table.add_column(title, justify="right")
    for name, seeds in points_by_way.items():
        means = [statistics.mean(points[iteration] for points in seeds.values()) for iteration in after]
        last = ", ".join(f"{points[after[-1]]:.3f}" for points in seeds.values())
        table.add_row(name, *(f"{mean:.3f}" for mean in means), last)
    Console(width=150).print(table)
    print(json.dumps({"bench": "corrected", "held_out_reward": points_by_way}))


if __name__ == "__main__":
    main()
