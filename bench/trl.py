"""The example's recipe in trl's GRPOTrainer and here, interleaved.

Both use the same model, tokenizer, data and batches (64 prompts with 8 responses, 2 optimizer steps of 256 responses
each), the same loss, optimizer, clipping and sampling, in float32 on the same cores: one rank with two threads, and two
ranks with one each, data parallel on both sides (trl: two processes, DistributedDataParallel over gloo; here
two_ranks.rlg). trl runs in its own environment (constraints/trl.txt) with gradient checkpointing, bfloat16, logging,
saving and the search for unused parameters off. Both compute reference and old log-probabilities for every batch, since
both take two steps on it.

The remaining differences are:

- trl divides advantages by std + 1e-4 (here + 1e-6) and does not clamp the KL estimator (here +-20 and +-10)
- trl starts the warmup at a rate of 0, one step behind
- on two ranks trl's loss is the mean of the ranks' token means
- trl distributes the responses of a batch over the two steps at random, so a prompt's rows are separated; here they
  stay together
- trl computes entropies for its metrics
- trl has its own random numbers
- trl feeds each response with its own copy of the prompt; here the shared part of rows is computed once. The responses
  of this example are short and often alike, and gain more by that than long ones would.

Each measurement is a process; the first iterations are left out. Figures are medians over the iterations of all rounds.
`ratio` is their quotient; `ratio_quiet` is that of lower quartiles, which other load on the machine affects less. `cpu`
is user and system time of all processes, including threads that busy-wait for others. Prints tables and, last, a line
of JSON.

With --load N, N processes that compute without end run at the same time: the speed that remains on a machine that does
other work too.

With --curves: held-out accuracy (greedy) over wall time for both on one rank, over some seeds. The clock of both is
stopped during evaluation, start and end. Writes a picture.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import smoke
from phases import COMPUTE, EXAMPLE
from rich.console import Console
from rich.table import Table

from msrl_graph import compile, run

ROOT = Path(__file__).parent.parent
TRL = ROOT / ".venv-trl" / "bin" / "python"
PROGRAMS = {1: EXAMPLE / "one_rank.rlg", 2: EXAMPLE / "two_ranks.rlg"}
THREADS = {1: 2, 2: 1}  # by number of ranks
FIRST = 3  # iterations left out
# The same phase by both names: (name, ours, trl's).
PHASES = (
    ("generate", "actor.generate", "generate"),
    ("reference log-probabilities", "reference.infer", "reference"),
    ("old log-probabilities", "actor.infer", "old"),
    ("loss, backward, optimizer", "actor.update", "update"),
)
Line = dict[str, float]


class Meter(threading.Thread):
    """Median processor seconds from one line of `file` to the next.

    They include this process and all that it started.
    """

    def __init__(self, file: Path) -> None:
        super().__init__(daemon=True)
        self.file = file
        self.done = threading.Event()
        self.seen: list[tuple[int, float]] = []  # lines, processor seconds so far

    def run(self) -> None:
        while not self.done.wait(0.02):
            count = self.file.read_bytes().count(b"\n") if self.file.exists() else 0
            if count > (self.seen[-1][0] if self.seen else FIRST):
                self.seen.append((count, _cpu()))

    def seconds(self) -> float:
        self.done.set()
        self.join()
        return statistics.median(
            (next_cpu - cpu) / (next_count - count) for (count, cpu), (next_count, next_cpu) in pairwise(self.seen)
        )


def _cpu() -> float:
    total = 0.0
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        try:
            times = process.cpu_times()
            total += times.user + times.system
        except psutil.NoSuchProcess:
            pass
    return total


def _run(ranks: int, iterations: int, seed: int, interval: int) -> tuple[list[dict[str, Any]], float]:
    """Run; return the lines of metrics.jsonl, and processor seconds per iteration."""
    plan = compile(PROGRAMS[ranks])
    evaluations = (
        tuple(replace(evaluation, every=interval) for evaluation in plan.deploy.evaluations) if interval else ()
    )
    deploy = replace(
        plan.deploy, evaluations=evaluations, run=replace(plan.deploy.run, iterations=iterations, seed=seed)
    )
    schedule = tuple(step for step in plan.schedule if step.task == "train" or interval)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        meter = Meter(out / "metrics.jsonl")
        meter.start()
        with (Path(folder) / "log").open("w") as log:
            run(replace(plan, deploy=deploy, schedule=schedule), out=out, stderr=log)
        return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()], meter.seconds()


def ours(ranks: int, iterations: int) -> list[Line]:
    """Return seconds by phase of each iteration except the first ones."""
    lines, cpu = _run(ranks, iterations, 0, 0)
    rows = []
    for line in lines[FIRST:]:
        phases = {name: line["phases"].get(node, 0.0) for name, node, _ in PHASES}
        phases["reward"] = (
            line["phases"]["host.reward"] + line["phases"]["host.advantage"]
        )  # at the same time as the ranks' work
        compute = sum(line["phases"].get(node, 0.0) for node in COMPUTE)
        rest = {
            "reshard": line["phases"]["reshard"],
            "dock": line["phases"]["dock"],
            "outside": line["seconds"] - compute,
        }
        rows.append(
            phases | rest | {"iteration": line["seconds"], "cpu": cpu, "overhead_share": 1 - compute / line["seconds"]}
        )
    return rows


def _trl(ranks: int, iterations: int, seed: int = 0, interval: int = 0) -> dict[str, Any]:
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    options = {"example": EXAMPLE, "iterations": iterations, "threads": THREADS[ranks], "seed": seed, "every": interval}
    flags = [f"--{name}={value}" for name, value in options.items()]
    # This folder has a trl.py, which must not hide the library.
    variables = {**os.environ, "OMP_NUM_THREADS": str(THREADS[ranks]), "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"}
    variables.pop("PYTHONPATH", None)
    command = [str(TRL), *launch, str(Path(__file__).parent / "trl_side.py"), *flags]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, env={**variables, "TMPDIR": folder}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"trl failed:\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def theirs(ranks: int, iterations: int) -> list[Line]:
    names = {here: name for name, _, here in PHASES}
    return [
        {names.get(key, key): value for key, value in line.items()} | {"outside": line["other"]}
        for line in _trl(ranks, iterations)["lines"][FIRST:]
    ]


@contextmanager
def busy_cores(processes: int) -> Iterator[None]:
    """Keep a number of cores busy with processes that end with this one."""
    code = "import os\nwhile os.getppid() == int(os.sys.argv[1]): pass"
    others = [subprocess.Popen([sys.executable, "-c", code, str(os.getpid())]) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def speed(rounds: int, iterations: int, counts: list[int]) -> None:
    rows = compile(PROGRAMS[1]).graph.rows[-1]
    sides = {"ours": ours, "trl": theirs}
    lines_by_ranks: dict[int, dict[str, list[Line]]] = {count: {side: [] for side in sides} for count in counts}
    for number in range(rounds):
        for ranks in counts:
            for side, measure in sides.items():
                lines = measure(ranks, iterations)
                lines_by_ranks[ranks][side] += lines
                middle = statistics.median(line["iteration"] for line in lines)
                print(f"round {number + 1}, {ranks} ranks, {side}: {middle:.3f} s an iteration", file=sys.stderr)
    figures: dict[str, Any] = {}
    for ranks, by_side in lines_by_ranks.items():
        medians = {
            side_name: {key: statistics.median(line[key] for line in side_lines) for key in side_lines[0]}
            for side_name, side_lines in by_side.items()
        }
        quiet = {
            side_name: statistics.quantiles([line["iteration"] for line in side_lines], n=4)[0]
            for side_name, side_lines in by_side.items()
        }
        table = Table(title=f"{ranks} rank{'s' * (ranks > 1)} with {THREADS[ranks]} thread{'s' * (THREADS[ranks] > 1)}")
        table.title_justify = "left"
        table.box = None
        table.add_column("seconds of an iteration")
        for side in sides:
            table.add_column(side, justify="right")
        for name in (*(phase[0] for phase in PHASES), "reward", "reshard", "dock", "outside", "iteration", "cpu"):
            table.add_row(
                name, *(f"{medians[side_name][name]:.4f}" if name in medians[side_name] else "" for side_name in sides)
            )
        speeds = {side_name: rows / medians[side_name]["iteration"] for side_name in sides}
        table.add_row("responses/s", *(f"{speeds[side_name]:,.0f}" for side_name in sides))
        table.add_row("iterations measured", *(str(len(by_side[side_name])) for side_name in sides))
        Console().print(table)
        tail = "" if ranks == 1 else f"_{ranks}_ranks"
        figures |= {f"{side_name}_responses_per_s{tail}": round(speed, 1) for side_name, speed in speeds.items()} | {
            f"ratio{tail}": round(speeds["ours"] / speeds["trl"], 3),
            f"ratio_quiet{tail}": round(quiet["trl"] / quiet["ours"], 3),
            f"cpu_ratio{tail}": round(medians["trl"]["cpu"] / medians["ours"]["cpu"], 3),
            f"overhead_share{tail}": round(medians["ours"]["overhead_share"], 4),
        }
    figures["load"] = round(os.getloadavg()[0], 1)  # of the machine, including other users
    print(json.dumps(figures))


Curve = list[tuple[int, float, float]]  # iterations done, minutes, held-out accuracy


def _our_curve(seed: int, iterations: int, interval: int) -> Curve:
    lines, _ = _run(1, iterations, seed, interval)
    seconds = 0.0
    points = []
    for line in lines:
        if "evaluation" in line:
            points.append((line["after_iterations"], seconds / 60, line["reward"]))
        else:
            seconds += line["seconds"]
    return points


def _their_curve(seed: int, iterations: int, interval: int) -> Curve:
    return [(done, seconds / 60, share) for done, seconds, share in _trl(1, iterations, seed, interval)["curve"]]


def _spread(ends: list[float]) -> dict[str, float]:
    """Return mean and standard deviation over the seeds."""
    return {"mean": round(statistics.mean(ends), 4), "std": round(statistics.stdev(ends) if len(ends) > 1 else 0.0, 4)}


def curves(seeds: int, iterations: int, interval: int, out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sides = {"ours": _our_curve, "trl": _their_curve}
    curves_by_side: dict[str, list[Curve]] = {side_name: [] for side_name in sides}
    table = Table(title=f"held-out accuracy, {iterations} iterations on one rank", title_justify="left", box=None)
    for name in ("seed", *(f"{side_name}: {column}" for side_name in sides for column in ("first", "last", "minutes"))):
        table.add_column(name, justify="right")
    for seed in range(seeds):
        cells = []
        for side, measure in sides.items():
            curve = measure(seed, iterations, interval)
            curves_by_side[side].append(curve)
            print(f"seed {seed}, {side}: {curve}", file=sys.stderr)
            cells += [f"{curve[0][2]:.3f}", f"{curve[-1][2]:.3f}", f"{curve[-1][1]:.1f}"]
        table.add_row(str(seed), *cells)
    Console().print(table)
    means = {
        side_name: [
            [statistics.mean(values[index] for values in point) for index in range(3)]
            for point in zip(*side_curves, strict=True)
        ]
        for side_name, side_curves in curves_by_side.items()
    }
    shown = Table(title="means over the seeds", title_justify="left", box=None)
    for name in (
        "iterations",
        *(f"{side_name}: {column}" for side_name in sides for column in ("minutes", "accuracy")),
    ):
        shown.add_column(name, justify="right")
    for points in zip(*means.values(), strict=True):
        shown.add_row(f"{points[0][0]:.0f}", *(f"{values[index]:.3f}" for values in points for index in (1, 2)))
    Console().print(shown)
    figure, axes = pyplot.subplots(figsize=(6, 4))
    for color, (side, side_curves) in zip(("C0", "C1"), curves_by_side.items(), strict=True):
        for curve in side_curves:
            axes.plot([values[1] for values in curve], [values[2] for values in curve], color=color, alpha=0.3)
        axes.plot([values[1] for values in means[side]], [values[2] for values in means[side]], color=color, label=side)
    axes.set(xlabel="minutes of training", ylabel="held-out accuracy")
    axes.legend()
    figure.savefig(out, dpi=120, bbox_inches="tight")
    print(f"picture: {out}")
    last = {
        side: _spread([points_of_seed[-1][2] for points_of_seed in side_curves])
        for side, side_curves in curves_by_side.items()
    }
    # Two sets of runs agree if their means differ by at most twice the standard error that the spread over seeds
    # implies.
    noise = 2 * (sum(spread["std"] ** 2 for spread in last.values()) / seeds) ** 0.5
    apart = abs(last["ours"]["mean"] - last["trl"]["mean"])
    minutes = {f"{side_name}_minutes": round(points[-1][1], 2) for side_name, points in means.items()}
    print(json.dumps({"accuracy": last, "apart": round(apart, 4), "noise": round(noise, 4), **minutes}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--load", type=int, default=0, help="number of busy processes that run at the same time")
    parser.add_argument(
        "--iterations", type=int, help="iterations of a measurement (default: 20) or of a curve (default: 320)"
    )
    parser.add_argument("--curves", action="store_true", help="held-out accuracy over wall time instead of speed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--every", type=int, default=40, help="iterations between two points of a curve")
    parser.add_argument(
        "--out", type=Path, default=Path(tempfile.gettempdir()) / "trl-curves.png", help="the picture of the curves"
    )
    parser.add_argument("--ranks", type=int, nargs="+", choices=PROGRAMS, default=[*PROGRAMS])
    options = smoke.parse(parser, rounds=1, iterations=FIRST + 2, ranks=[1])
    if options.curves:
        curves(options.seeds, options.iterations or 320, options.every, options.out)
    else:
        with busy_cores(options.load):
            speed(options.rounds, options.iterations or 20, options.ranks)


if __name__ == "__main__":
    main()
