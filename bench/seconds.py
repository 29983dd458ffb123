"""Seconds, predicted and measured, of the example and five variants of it.

With --engines the same with Megatron and vLLM.

This machine is measured before each run (or `--here FILE` is used), with the calibration that every run uses, since the
speed of a shared machine changes within minutes. Each variant runs once in each round. Measured is a run's median
iteration, without the first ones; predicted is the estimate for the lengths of the run's rows, which are its only input
from the run. All figures are medians over rounds; the ratio is the median of the rounds' ratios. Prints tables and,
last, one line of JSON; the status is 1 if a ratio is off by more than the bar or the variants come in another order.
Two variants whose rounds overlap have no order: they cannot be distinguished.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import smoke
from rich.console import Console
from rich.table import Table

from msrl_graph import compile, run
from msrl_graph.hardware import calibration
from msrl_graph.ir.plan import Estimate, Plan
from msrl_graph.runtime.calibrate.measure import measure
from msrl_graph.runtime.metrics import predicted

EXAMPLE = Path(__file__).parent.parent / "examples" / "arithmetic"
BAR = 0.2
WARM = 4  # iterations that are left out
LONG = 24  # tokens
RANKS = 2  # maximum ranks of a variant
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
# Three of four layers have a window that is shorter than the rows.
WINDOWS = {"use_sliding_window": True, "sliding_window": 16}
KINDS = (*["sliding_attention"] * 3, "full_attention")
PHASES = ("actor.generate", "reference.infer", "actor.infer", "actor.update", "reshard")


@dataclass(frozen=True)
class Variant:
    """A file of the example with replaced text, and the iterations of a run."""

    file: str
    model: str = "model"
    changes: tuple[tuple[str, str], ...] = ()
    iterations: int = 24


ONE = "  drop layout actor.update, actor.generate\n"
TWO = "  layout actor.update   { dp = 2, zero = 3 }\n  layout actor.generate { tp = 2 }\n"


def engines(trainer: str, generator: str, trained: str = "", generated: str = "") -> tuple[str, tuple[str, str]]:
    """Return the example's file and its replacement for these engines.

    It runs on one rank, or with these layouts on two.
    """
    chosen = f"  engine actor.update = {trainer}\n  engine actor.generate = {generator}\n"
    if not trained:
        return "one_rank.rlg", (ONE, ONE + chosen)
    layouts = f"  layout actor.update {{ {trained} }}\n  layout actor.generate {{ {generated} }}\n"
    return "grpo.rlg", (TWO, layouts + chosen)


def with_engines(model: str, changes: tuple[tuple[str, str], ...], iterations: int, *stated: str) -> Variant:
    """Return a variant with these engines."""
    file, change = engines(*stated)
    return Variant(file, model, (*changes, change), iterations)


LONGER = (("i32[<= 5]", f"i32[<= {LONG}]"),)
VARIANTS = {
    "the demo on one rank": Variant("one_rank.rlg"),
    "two ranks": Variant("grpo.rlg"),
    "longer responses": Variant("one_rank.rlg", "endless", LONGER, 14),
    "larger model": Variant("one_rank.rlg", "larger", iterations=14),
    "sliding windows": Variant("one_rank.rlg", "windowed", (("i32[<= 5]", "i32[<= 48]"),), 10),
    "naive reshard on two ranks": Variant(
        "grpo.rlg", changes=(("  evaluate held_out", "  reshard { mode = naive }\n\n  evaluate held_out"),)
    ),
}
BOTH = ("megatron", "vllm")
ENGINES = {
    "megatron and vllm on one rank": with_engines("model", (), 24, *BOTH),
    "megatron pp 2, vllm tp 2": with_engines("model", (), 24, *BOTH, "pp = 2", "tp = 2"),
    "megatron tp 2, vllm dp 2": with_engines("model", (), 24, *BOTH, "tp = 2", "dp = 2"),
    "longer responses": with_engines("endless", LONGER, 14, *BOTH),
    "larger model": with_engines("larger", (), 14, *BOTH),
}


def prepare(folder: Path) -> None:
    """Create the example, an endless copy of its model, and larger random models."""
    shutil.copytree(EXAMPLE, folder, dirs_exist_ok=True)
    endless(folder, "endless")
    randomize(folder, "larger", SIZES)
    randomize(folder, "windowed", SIZES | WINDOWS, "endless", KINDS)


def endless(folder: Path, name: str) -> Path:
    """Create a copy of the example's model that never ends a response."""
    copy = shutil.copytree(folder / "model", folder / name)
    for file in ("generation_config.json", "config.json"):
        settings = json.loads((copy / file).read_text())
        (copy / file).write_text(json.dumps(settings | {"eos_token_id": None}))
    return copy


def randomize(
    folder: Path, name: str, sizes: dict[str, int], base: str = "model", kinds: tuple[str, ...] = ("full_attention",)
) -> None:
    """Create a model like `base` with other sizes and random weights.

    `kinds` are the kinds of attention of its layers, in turn.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    copy = shutil.copytree(folder / base, folder / name)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(copy)
    for field, size in sizes.items():
        setattr(config, field, size)
    config.layer_types = [kinds[layer % len(kinds)] for layer in range(config.num_hidden_layers)]
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(copy)


def plan_of(variant: Variant, folder: Path) -> Plan:
    """Return the variant's plan, without evaluations."""
    place = Path(tempfile.mkdtemp(dir=folder))
    for name in ("grpo.rlg", "one_rank.rlg"):
        text = (folder / name).read_text()
        for old, new in (*variant.changes, ('"./model"', f'"../{variant.model}"'), ('= "t', '= "../t')):
            text = text.replace(old, new)
        (place / name).write_text(text)
    plan = compile(place / variant.file)
    deploy = replace(plan.deploy, evaluations=(), run=replace(plan.deploy.run, iterations=variant.iterations))
    return replace(plan, deploy=deploy, schedule=tuple(step for step in plan.schedule if step.task == "train"))


def measure_run(plan: Plan, warm: int = WARM) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics, without the first ones."""
    with tempfile.TemporaryDirectory() as folder:
        with (Path(folder) / "log").open("w") as log:
            run(plan, out=Path(folder) / "out", stderr=log)
        return [json.loads(line) for line in (Path(folder) / "out" / "metrics.jsonl").read_text().splitlines()][warm:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, help="iterations of each run (default: each variant's own)")
    parser.add_argument("--only", metavar="NAME", help="only variants whose names contain this")
    parser.add_argument(
        "--engines", action="store_true", help="variants with Megatron and vLLM instead of the light engines"
    )
    parser.add_argument("--here", metavar="FILE", help="a calibration to use instead of measuring this machine")
    parser.add_argument("--ranks", type=int, default=RANKS, help="processes at a time that a calibration measures")
    options = smoke.parse(parser, rounds=1, only="the demo on one rank", iterations=WARM + 2, ranks=1)
    chosen = ENGINES if options.engines else VARIANTS
    chosen = {
        variant_name: variant
        for variant_name, variant in chosen.items()
        if not options.only or options.only in variant_name
    }
    if options.iterations:
        chosen = {
            variant_name: replace(variant, iterations=options.iterations) for variant_name, variant in chosen.items()
        }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        here = os.environ["MSRL_HERE"] = options.here or str(folder / "here.json")
        sizes = {"prompts": "64", "group": "8", "prompt_len": "16", "response_len": "16"}
        probed = compile("grpo", model="tiny", sets=sizes)
        plans = {variant_name: plan_of(variant, folder) for variant_name, variant in chosen.items()}
        rounds: dict[str, list[Round]] = {variant_name: [] for variant_name in plans}
        noise = []
        for number, (variant_name, plan) in product(range(options.rounds), plans.items()):
            if not options.here:
                measure(probed, Path(here), rounds=1, most=options.ranks)
            known = calibration.read(Path(here))
            if not isinstance(known, calibration.Calibration):
                print(known.message, file=sys.stderr)
                return 1
            noise.append(known.noise)
            lines = measure_run(plan)
            estimate = predicted.estimate(plan, lines)
            assert estimate is not None
            rounds[variant_name].append(measured_round := Round(lines, estimate))
            print(
                f"round {number + 1}, {variant_name}: {measured_round.ratio:.2f} x {measured_round.seconds:.3f} s",
                file=sys.stderr,
                flush=True,
            )
        status = report(rounds, statistics.median(noise))
        return 0 if options.smoke else status


@dataclass(frozen=True)
class Round:
    """One run: the lines of its metrics, and the estimate for their rows."""

    lines: list[dict[str, Any]]
    estimate: Estimate

    @property
    def seconds(self) -> float:
        return statistics.median(line["seconds"] for line in self.lines)

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.estimate.iteration_seconds.value / self.seconds


def report(rounds_by_variant: dict[str, list[Round]], noise: float) -> int:
    table = Table(title="seconds of an iteration", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("variant", no_wrap=True)
    for heading in ("predicted", "measured", "ratio", "of rounds", "measured in rounds"):
        table.add_column(heading, justify="right")
    seconds: dict[str, tuple[float, float]] = {}
    ratios: dict[str, float] = {}
    ranges: dict[str, tuple[float, float]] = {}
    phases = Table(title="of which, predicted / measured", title_justify="left", box=None, padding=(0, 2, 0, 0))
    phases.add_column("variant", no_wrap=True)
    for heading in PHASES:
        phases.add_column(heading, justify="right")
    for name, rounds in rounds_by_variant.items():
        took = [measured_round.seconds for measured_round in rounds]
        want = statistics.median(measured_round.estimate.iteration_seconds.value for measured_round in rounds)
        got = statistics.median(took)
        seconds[name] = (want, got)
        ranges[name] = (min(took), max(took))
        ratios[name] = round(statistics.median(measured_round.ratio for measured_round in rounds), 3)
        table.add_row(
            name,
            *(f"{value * 1e3:.0f} ms" for value in (want, got)),
            f"{ratios[name]:.2f}",
            f"{min(one.ratio for one in rounds):.2f}-{max(one.ratio for one in rounds):.2f}",
            f"{min(took) * 1e3:.0f}-{max(took) * 1e3:.0f} ms",
        )
        cells = [
            (
                statistics.median(
                    estimated.seconds.value
                    for measured_round in rounds
                    for estimated in measured_round.estimate.phases
                    if estimated.name == phase
                ),
                statistics.median(line["phases"][phase] for measured_round in rounds for line in measured_round.lines),
            )
            for phase in PHASES
        ]
        phases.add_row(
            name,
            *(
                f"{predicted_seconds * 1e3:.1f} / {measured_seconds * 1e3:.1f}"
                for predicted_seconds, measured_seconds in cells
            ),
        )
    console = Console(width=130)
    console.print(table)
    console.print()
    console.print(phases)
    apart = [(first, second) for first in seconds for second in seconds if ranges[first][1] < ranges[second][0]]
    turned = [f"{first} / {second}" for first, second in apart if seconds[first][0] >= seconds[second][0]]
    worst = max(abs(ratio - 1) for ratio in ratios.values())
    figures = {
        "ratios": ratios,
        "worst": round(worst, 3),
        "same_order": not turned,
        "turned": turned,
        "told_apart": len(apart),
    }
    print(json.dumps(figures | {"noise": round(noise, 3)}))
    return 0 if worst <= BAR and not turned else 1


if __name__ == "__main__":
    sys.exit(main())
