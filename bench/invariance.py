"""The table of invariance: where and how a program runs never changes what it computes, but for rounding.

One run on one rank is recorded. Then for each configuration (1) one iteration that generates for itself: its tokens are
the reference's, one for one; and (2) all iterations on the reference's responses: the largest relative deviation of
what they make from the reference's. After a first difference by rounding, runs that generate may draw another token and
part; that is no mistake, and so (2) replays. An iteration takes six optimizer steps, in two epochs, the last mini-batch
of each a short one. All is float32.

The loss of an iteration is a sum that cancels out, of terms as large as an advantage: its deviation is absolute.

Softmax does not see what is added to all keys alike. A bias of the keys is, but for what the rotation by position makes
of it, so the gradient of its slowly rotating elements is nearly zero and in good part rounding, and Adam makes steps of
the usual size of it. These biases are told apart, relative to the largest step that any weight took. Ends with one line
of JSON, and with status 1 where tokens differ or a deviation passes the bar.
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
from msrl_graph.runtime.driver import supervisor

EXAMPLE = Path(__file__).parent.parent / "examples" / "arithmetic"
SIZES = {"prompts": "16", "group": "4"}
BAR = 1e-4
METRICS = ("loss", "reward", "grad_norm")
BIAS = "k_proj.bias"


@dataclass(frozen=True)
class How:
    """A deploy: on how many devices, and in which words."""

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


def execute(how: How, out: Path, iterations: int, replay: str = "") -> None:
    """One run, recorded."""
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
    plan = replace(plan, deploy=deploy, schedule=tuple(s for s in plan.schedule if s.task == "train"))
    options = supervisor.WatchOptions(record=True, replay=replay)
    driver = (str(Path(__file__).with_name("shuffled.py")),) if how.shuffled else supervisor.PROGRAM
    log = out.with_suffix(".log")
    with log.open("w") as words:
        try:
            supervisor.Supervisor(supervisor.prepare(plan, out, options=options), options, words, driver).whole()
        except supervisor.RunFailed:
            print(log.read_text(), file=sys.stderr)
            raise


def tokens(out: Path) -> list[list[int]]:
    """The responses of the first iteration."""
    found: list[list[int]] = parquet.read_table(out / "rows" / "000000.parquet")["response"].to_pylist()
    return found


def off(value: float, expected: float) -> float:
    return abs(value - expected) / abs(expected) if expected else math.inf if value else 0.0


def compare(out: Path, reference: Path) -> dict[str, float]:
    """The largest deviations of a run from the reference, relative but for the loss."""
    lines, expected = (
        [json.loads(x) for x in (f / "metrics.jsonl").read_text().splitlines()] for f in (out, reference)
    )
    found = {name: max(off(a[name], b[name]) for a, b in zip(lines, expected, strict=True)) for name in METRICS}
    found["loss"] = max(abs(a["loss"] - b["loss"]) for a, b in zip(lines, expected, strict=True))
    start = load_file(EXAMPLE / "model" / "model.safetensors")
    weights, old = (load_file(f / "weights" / "actor" / "model.safetensors") for f in (out, reference))
    away = {t: float(np.abs(w - old[t]).max()) for t, w in weights.items()}
    step = max(float(np.abs(w - start[t]).max()) for t, w in old.items())
    whole = [t for t in old if not t.endswith(BIAS)]
    found["weights"] = max(away[t] / float(np.abs(old[t]).max()) for t in whole)
    found["update"] = max(away[t] for t in whole) / step
    found[BIAS] = max(away[t] for t in old if t.endswith(BIAS)) / step
    return found


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
        table.add_row(name, "same" if same else "differ", *(f"{x:.1e}" for x in numbers))
    Console(width=120).print(table)
    print(
        json.dumps(
            {
                name: {k: x if k == "tokens" else float(f"{x:.2e}") for k, x in row.items()}
                for name, row in figures.items()
            }
        )
    )
    held = all(row["tokens"] and max(row[k] for k in (*METRICS, "weights")) <= BAR for row in figures.values())
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
