"""Where the seconds of an iteration go: the example on one rank and on two, interleaved.

`outside` is what is left of an iteration beside generation, inference and update: dispatch, resharding, scheduling,
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
    """Seconds by phase of each iteration but the first three."""
    plan = compile(program)
    deploy = replace(plan.deploy, evaluations=(), run=replace(plan.deploy.run, iterations=iterations))
    plan = replace(plan, deploy=deploy, schedule=tuple(s for s in plan.schedule if s.task == "train"))
    with tempfile.TemporaryDirectory() as folder:
        with (Path(folder) / "log").open("w") as log:
            run(plan, out=Path(folder) / "out", stderr=log)
        lines = [json.loads(x) for x in (Path(folder) / "out" / "metrics.jsonl").read_text().splitlines()][3:]
    found = []
    for line in lines:
        phases = {name: line["phases"].get(name, 0.0) for name in (*COMPUTE, *REST[:-1])}
        phases["other"] = line["seconds"] - sum(phases.values())
        found.append(phases | {"iteration": line["seconds"], "tokens/s": line["tokens_per_second"]})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=25)
    parser.add_argument("--ranks", type=int, nargs="+", choices=PROGRAMS, default=[*PROGRAMS])
    options = smoke.parse(parser, rounds=1, iterations=5, ranks=[1])
    found: dict[int, list[dict[str, float]]] = {ranks: [] for ranks in options.ranks}
    for _ in range(options.rounds):
        for ranks in found:
            found[ranks] += measure(PROGRAMS[ranks], options.iterations)
    medians = {r: {k: statistics.median(x[k] for x in xs) for k in xs[0]} for r, xs in found.items()}
    outside = {
        r: statistics.median(1 - sum(x[k] for k in COMPUTE) / x["iteration"] for x in xs) for r, xs in found.items()
    }
    table = Table(
        title=f"an iteration, medians of {len(found[options.ranks[0]])}",
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
    )
    table.add_column("phase")
    for ranks in found:
        table.add_column(f"{ranks} rank{'s' * (ranks > 1)}", justify="right")
    for name in (*COMPUTE, *REST, "iteration"):
        table.add_row(name, *(f"{medians[r][name] * 1e3:.1f} ms" for r in found))
    table.add_row("tokens/s", *(f"{medians[r]['tokens/s']:,.0f}" for r in found))
    table.add_row("share outside", *(f"{outside[r]:.1%}" for r in found))
    Console().print(table)
    figures = {f"outside_share_{r}": round(outside[r], 4) for r in found} | {
        f"iteration_s_{r}": round(medians[r]["iteration"], 4) for r in found
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
