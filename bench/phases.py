"""Seconds of an iteration by phase: the example on one rank and on two.

`outside` is the part of an iteration outside of generation, inference and update: dispatch, resharding, scheduling,
waits. Prints a table and, last, one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import smoke
from rich.console import Console
from rich.table import Table

from msrl_graph import compile, run

EXAMPLE = Path(__file__).parent.parent / "examples" / "arithmetic"
PROGRAMS = {1: EXAMPLE / "one_rank.rlg", 2: EXAMPLE / "grpo.rlg"}
COMPUTE = ("actor.generate", "reference.infer", "actor.infer", "actor.update")
REST = ("reshard", "swap in", "dock", "other")


def measure(program: Path, iterations: int) -> list[dict[str, float]]:
    """Return the seconds by phase of each iteration except the first three."""
    plan = compile(program)
    deploy = replace(plan.deploy, evaluations=(), run=replace(plan.deploy.run, iterations=iterations))
    plan = replace(plan, deploy=deploy, schedule=tuple(step for step in plan.schedule if step.task == "train"))
    with tempfile.TemporaryDirectory() as folder:
        with (Path(folder) / "log").open("w") as log:
            run(plan, out=Path(folder) / "out", stderr=log)
        lines = [json.loads(text) for text in (Path(folder) / "out" / "metrics.jsonl").read_text().splitlines()][3:]
    rows = []
    for line in lines:
        phases = {name: line["phases"].get(name, 0.0) for name in (*COMPUTE, *REST[:-1])}
        phases["other"] = line["seconds"] - sum(phases.values())
        rows.append(phases | {"iteration": line["seconds"], "tokens/s": line["tokens_per_second"]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=25)
    parser.add_argument("--ranks", type=int, nargs="+", choices=PROGRAMS, default=[*PROGRAMS])
    options = smoke.parse(parser, rounds=1, iterations=5, ranks=[1])
    rows_by_ranks: dict[int, list[dict[str, float]]] = {ranks: [] for ranks in options.ranks}
    for _ in range(options.rounds):
        for ranks in rows_by_ranks:
            rows_by_ranks[ranks] += measure(PROGRAMS[ranks], options.iterations)
    medians = {
        count: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        for count, rows in rows_by_ranks.items()
    }
    outside = {
        count: statistics.median(1 - sum(row[key] for key in COMPUTE) / row["iteration"] for row in rows)
        for count, rows in rows_by_ranks.items()
    }
    table = Table(
        title=f"an iteration, medians of {len(rows_by_ranks[options.ranks[0]])}",
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
    )
    table.add_column("phase")
    for ranks in rows_by_ranks:
        table.add_column(f"{ranks} rank{'s' * (ranks > 1)}", justify="right")
    for name in (*COMPUTE, *REST, "iteration"):
        table.add_row(name, *(f"{medians[count][name] * 1e3:.1f} ms" for count in rows_by_ranks))
    table.add_row("tokens/s", *(f"{medians[count]['tokens/s']:,.0f}" for count in rows_by_ranks))
    table.add_row("share outside", *(f"{outside[count]:.1%}" for count in rows_by_ranks))
    Console().print(table)
    figures = {f"outside_share_{count}": round(outside[count], 4) for count in rows_by_ranks} | {
        f"iteration_s_{count}": round(medians[count]["iteration"], 4) for count in rows_by_ranks
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
