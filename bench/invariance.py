"""The table of invariance: placement never changes results, except for rounding.

One run on one rank is recorded. Then for each configuration:

- (1) one iteration generates for itself: its tokens equal the reference's
- (2) all iterations use the reference's responses: the largest relative deviation of their results from the reference's

After a first difference by rounding, runs that generate may draw another token and diverge. That is not an error, and
so (2) replays. An iteration takes six optimizer steps, in two epochs; the last mini-batch of each epoch is short. All
is float32.

The loss of an iteration is a sum that cancels out, of terms as large as an advantage: its deviation is absolute.

Softmax does not depend on what is added to all keys alike. A bias of the keys is such an addition, except for the
rotation by position, so the gradient of its slowly rotating elements is nearly zero and largely rounding, and Adam
turns it into steps of the usual size. These biases are reported separately, relative to the largest step of any weight.
Ends with one line of JSON, and with status 1 if tokens differ or a deviation exceeds the bar.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import smoke
from pyarrow import parquet
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file

from msrl_graph import compile
from msrl_graph.ir.run_options import RunOptions
from msrl_graph.runtime.driver import supervisor

EXAMPLE = Path(__file__).parent.parent / "examples" / "arithmetic"
SIZES = {"prompts": "16", "group": "4"}
BAR = 1e-4
METRICS = ("loss", "reward", "grad_norm")
BIAS = "k_proj.bias"


@dataclass(frozen=True)
class How:
    """A deploy: its additional statements, devices and layouts."""

    words: str = ""
    devices: int = 2
    update: str = "dp = 2, zero = 3"
    generate: str = "tp = 2"
    shuffled: bool = False


ONE = How(devices=1, update="dp = 1", generate="dp = 1")
STREAM = """
  source -> actor.generate { stream = 3 }
  actor.generate -> actor.infer { stream = 5 }
  actor.generate -> reference.infer { stream = 7 }
  actor.generate -> host.reward { stream = 4 }"""
CONFIGURATIONS = {
    "one rank": ONE,
    "dp 2": How(update="dp = 2, zero = 0", generate="dp = 2"),
    "zero 1": How(update="dp = 2, zero = 1", generate="dp = 2"),
    "zero 2": How(update="dp = 2, zero = 2", generate="dp = 2"),
    "zero 3": How(update="dp = 2, zero = 3", generate="dp = 2"),
    "tp 2": How(update="tp = 2", generate="tp = 2"),
    "dp 2 x tp 2": How(devices=4, update="dp = 2, tp = 2, zero = 3", generate="dp = 2, tp = 2"),
    "two pools": How("apart actor.generate, actor.update", update="dp = 1", generate="dp = 1"),
    "dp 4": How(devices=4, update="dp = 4, zero = 3", generate="dp = 4"),
    "central dock": How("dock { mode = central }"),
    "stream": How(STREAM, generate="dp = 2"),
    "balance tokens": How(
        "host.advantage -> actor.update { balance = tokens }\n  actor.generate -> actor.infer { balance = tokens }"
    ),
    "micro-batches": How(
        "engine actor.update = fsdp { micro_batch = 3 }\n  engine actor.generate = hf { micro_batch = 3 }"
    ),
    "shuffled arrival": How(STREAM, generate="dp = 2", shuffled=True),
}


def execute(how: How, out: Path, iterations: int, replay: str | None = None) -> None:
    """Run and record."""
    text = (EXAMPLE / "grpo.rlg").read_text()
    for old, new in (
        ("mini_batch = 256", "mini_batch = 24, epochs = 2"),
        ("devices_per_node = 2", f"devices_per_node = {how.devices}"),
        ("layout actor.update   { dp = 2, zero = 3 }", f"layout actor.update {{ {how.update} }}"),
        ("layout actor.generate { tp = 2 }", f"layout actor.generate {{ {how.generate} }}"),
        ("run { iterations = 320", f"{how.words}\n  run {{ iterations = {iterations}"),
    ):
        assert old in text, old
        text = text.replace(old, new)
    plan = compile(EXAMPLE / "grpo.rlg", text=text, sets=SIZES)
    deploy = replace(plan.deploy, evaluations=())
    plan = replace(plan, deploy=deploy, schedule=tuple(step for step in plan.schedule if step.task == "train"))
    prepared = supervisor.prepare(plan, RunOptions(out, record=True, replay=replay))
    driver = (str(Path(__file__).with_name("shuffled.py")),) if how.shuffled else supervisor.PROGRAM
    log = out.with_suffix(".log")
    with log.open("w") as words:
        try:
            supervisor.Supervisor(prepared, words, driver).run()
        except supervisor.RunFailed:
            print(log.read_text(), file=sys.stderr)
            raise


def tokens(out: Path) -> list[list[int]]:
    """Return the responses of the first iteration."""
    responses: list[list[int]] = parquet.read_table(out / "rows" / "000000.parquet")["response"].to_pylist()
    return responses


def relative_deviation(value: float, expected: float) -> float:
    return abs(value - expected) / abs(expected) if expected else math.inf if value else 0.0


def compare(out: Path, reference: Path) -> dict[str, float]:
    """Return a run's largest deviations from the reference (absolute for the loss)."""
    lines, expected = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (out, reference)
    )
    deviations = {
        name: max(relative_deviation(got[name], want[name]) for got, want in zip(lines, expected, strict=True))
        for name in METRICS
    }
    deviations["loss"] = max(abs(got["loss"] - want["loss"]) for got, want in zip(lines, expected, strict=True))
    start = load_file(EXAMPLE / "model" / "model.safetensors")
    weights, old = (load_file(folder / "weights" / "actor" / "model.safetensors") for folder in (out, reference))
    distances = {tensor: float(np.abs(weight - old[tensor]).max()) for tensor, weight in weights.items()}
    step = max(float(np.abs(weight - start[tensor]).max()) for tensor, weight in old.items())
    compared_tensors = [tensor for tensor in old if not tensor.endswith(BIAS)]
    deviations["weights"] = max(distances[tensor] / float(np.abs(old[tensor]).max()) for tensor in compared_tensors)
    deviations["update"] = max(distances[tensor] for tensor in compared_tensors) / step
    deviations[BIAS] = max(distances[tensor] for tensor in old if tensor.endswith(BIAS)) / step
    return deviations


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=CONFIGURATIONS, action="append", help="one configuration; may be repeated")
    parser.add_argument("--iterations", type=int, default=5)
    options = smoke.parse(parser, only=["shuffled arrival"], iterations=1)
    figures: dict[str, dict[str, float | bool]] = {}
    with tempfile.TemporaryDirectory() as folder:
        reference = Path(folder) / "reference"
        execute(ONE, reference, options.iterations)
        for number, name in enumerate(options.only or CONFIGURATIONS):
            how = CONFIGURATIONS[name]
            drew = Path(folder) / f"{number}-drew"
            trained = Path(folder) / f"{number}-trained"
            execute(how, drew, 1)
            execute(how, trained, options.iterations, str(reference))
            figures[name] = {"tokens": tokens(drew) == tokens(reference), **compare(trained, reference)}
            print(name, figures[name], file=sys.stderr, flush=True)
    table = Table(
        title=f"largest relative deviation from one rank, {options.iterations} iterations",
        title_justify="left",
        box=None,
    )
    for column in ("", "tokens", *METRICS, "weights", "of the update", BIAS):
        table.add_column(column, justify="right" if column else "left")
    for name, row in figures.items():
        same, *numbers = row.values()
        table.add_row(name, "same" if same else "differ", *(f"{value:.1e}" for value in numbers))
    Console(width=120).print(table)
    print(
        json.dumps(
            {
                name: {key: value if key == "tokens" else float(f"{value:.2e}") for key, value in row.items()}
                for name, row in figures.items()
            }
        )
    )
    within_bar = all(
        row["tokens"] and max(row[key] for key in (*METRICS, "weights")) <= BAR for row in figures.values()
    )
    return 0 if within_bar else 1


if __name__ == "__main__":
    sys.exit(main())
