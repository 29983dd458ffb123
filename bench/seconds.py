"""Seconds, predicted against measured: the example and four variants of it, interleaved; with --engines the same by
Megatron and vLLM.

Each run is preceded by measuring this machine (or `--here FILE` is taken), by the calibration that every run uses,
since what a machine can do changes within minutes where others use it too; in each round each variant runs once.
Measured is a run's median iteration, the first ones left out; predicted the estimate for the lengths of the rows that
the run had: nothing else of a run goes into it. All figures are medians over rounds, the ratio that of the rounds'
ratios. Prints tables and, last, one line of JSON; status 1 where a ratio is off by more than the bar or the variants
come in another order. Two variants whose rounds overlap have no order: they were not told apart.
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
RANKS = 2  # that a variant has at most
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
PHASES = ("actor.generate", "reference.infer", "actor.infer", "actor.update", "reshard")


@dataclass(frozen=True)
class Variant:
    """A file of the example with words in it replaced, and how many iterations a run has."""

    file: str
    model: str = "model"
    changes: tuple[tuple[str, str], ...] = ()
    iterations: int = 24


ONE = "  drop layout actor.update, actor.generate\n"
TWO = "  layout actor.update   { dp = 2, zero = 3 }\n  layout actor.generate { tp = 2 }\n"


def engines(trainer: str, generator: str, trained: str = "", generated: str = "") -> tuple[str, tuple[str, str]]:
    """The file of the example, and what is replaced in it, for these engines: on one rank, or with these layouts on
    two."""
    chosen = f"  engine actor.update = {trainer}\n  engine actor.generate = {generator}\n"
    if not trained:
        return "one_rank.rlg", (ONE, ONE + chosen)
    layouts = f"  layout actor.update {{ {trained} }}\n  layout actor.generate {{ {generated} }}\n"
    return "grpo.rlg", (TWO, layouts + chosen)


def by(model: str, changes: tuple[tuple[str, str], ...], iterations: int, *stated: str) -> Variant:
    """A variant by engines."""
    file, change = engines(*stated)
    return Variant(file, model, (*changes, change), iterations)


LONGER = (("i32[<= 5]", f"i32[<= {LONG}]"),)
VARIANTS = {
    "the demo on one rank": Variant("one_rank.rlg"),
    "two ranks": Variant("grpo.rlg"),
    "longer responses": Variant("one_rank.rlg", "endless", LONGER, 14),
    "larger model": Variant("one_rank.rlg", "larger", iterations=14),
    "naive reshard on two ranks": Variant(
        "grpo.rlg", changes=(("  evaluate held_out", "  reshard { mode = naive }\n\n  evaluate held_out"),)
    ),
}
BOTH = ("megatron", "vllm")
ENGINES = {
    "megatron and vllm on one rank": by("model", (), 24, *BOTH),
    "megatron pp 2, vllm tp 2": by("model", (), 24, *BOTH, "pp = 2", "tp = 2"),
    "megatron tp 2, vllm dp 2": by("model", (), 24, *BOTH, "tp = 2", "dp = 2"),
    "longer responses": by("endless", LONGER, 14, *BOTH),
    "larger model": by("larger", (), 14, *BOTH),
}


def prepare(folder: Path) -> None:
    """The example, a model like its own that never ends a response, and a larger one with random weights."""
    shutil.copytree(EXAMPLE, folder, dirs_exist_ok=True)
    endless(folder, "endless")
    randomised(folder, "larger", SIZES)


def endless(folder: Path, name: str) -> Path:
    """A model like the example's own that never ends a response."""
    found = shutil.copytree(folder / "model", folder / name)
    for file in ("generation_config.json", "config.json"):
        settings = json.loads((found / file).read_text())
        (found / file).write_text(json.dumps(settings | {"eos_token_id": None}))
    return found


def randomised(folder: Path, name: str, sizes: dict[str, int], of: str = "model") -> None:
    """A model like `of` with other sizes, weights at random."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    found = shutil.copytree(folder / of, folder / name)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(found)
    for field, size in sizes.items():
        setattr(config, field, size)
    config.layer_types = config.layer_types[:1] * config.num_hidden_layers
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(found)


def plan_of(variant: Variant, folder: Path) -> Plan:
    """The variant's plan, without evaluations."""
    place = Path(tempfile.mkdtemp(dir=folder))
    for name in ("grpo.rlg", "one_rank.rlg"):
        text = (folder / name).read_text()
        for old, new in (*variant.changes, ('"./model"', f'"../{variant.model}"'), ('= "t', '= "../t')):
            text = text.replace(old, new)
        (place / name).write_text(text)
    plan = compile(place / variant.file)
    deploy = replace(plan.deploy, evaluations=(), run=replace(plan.deploy.run, iterations=variant.iterations))
    return replace(plan, deploy=deploy, schedule=tuple(s for s in plan.schedule if s.task == "train"))


def measured(plan: Plan, warm: int = WARM) -> list[dict[str, Any]]:
    """The lines of a run's metrics, the first ones left out."""
    with tempfile.TemporaryDirectory() as folder:
        with (Path(folder) / "log").open("w") as log:
            run(plan, out=Path(folder) / "out", stderr=log)
        return [json.loads(line) for line in (Path(folder) / "out" / "metrics.jsonl").read_text().splitlines()][warm:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, help="of each run, in place of each variant's own")
    parser.add_argument("--only", metavar="NAME", help="a variant whose name has this in it")
    parser.add_argument(
        "--engines", action="store_true", help="variants by Megatron and vLLM in place of the light ones"
    )
    parser.add_argument("--here", metavar="FILE", help="a calibration to take, in place of measuring this machine now")
    options = smoke.parse(parser, rounds=1, only="the demo on one rank", iterations=WARM + 2)
    chosen = ENGINES if options.engines else VARIANTS
    chosen = {n: v for n, v in chosen.items() if not options.only or options.only in n}
    if options.iterations:
        chosen = {n: replace(v, iterations=options.iterations) for n, v in chosen.items()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        here = os.environ["MSRL_HERE"] = options.here or str(folder / "here.json")
        sizes = {"prompts": "64", "group": "8", "prompt_len": "16", "response_len": "16"}
        probed = compile("grpo", model="tiny", sets=sizes)
        plans = {n: plan_of(v, folder) for n, v in chosen.items()}
        rounds: dict[str, list[Round]] = {n: [] for n in plans}
        noise = []
        for number, (n, plan) in product(range(options.rounds), plans.items()):
            if not options.here:
                measure(probed, Path(here), rounds=1, most=RANKS)
            known = calibration.read(Path(here))
            if not isinstance(known, calibration.Calibration):
                print(known.message, file=sys.stderr)
                return 1
            noise.append(known.noise)
            lines = measured(plan)
            estimate = predicted.estimate(plan, lines)
            assert estimate is not None
            rounds[n].append(found := Round(lines, estimate))
            print(f"round {number + 1}, {n}: {found.ratio:.2f} x {found.seconds:.3f} s", file=sys.stderr, flush=True)
        status = report(rounds, statistics.median(noise))
        return 0 if options.smoke else status


@dataclass(frozen=True)
class Round:
    """One run: the lines of its metrics, and what was predicted for their rows."""

    lines: list[dict[str, Any]]
    estimate: Estimate

    @property
    def seconds(self) -> float:
        return statistics.median(line["seconds"] for line in self.lines)

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.estimate.iteration_seconds.value / self.seconds


def report(found: dict[str, list[Round]], noise: float) -> int:
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
    for name, rounds in found.items():
        took = [r.seconds for r in rounds]
        want = statistics.median(r.estimate.iteration_seconds.value for r in rounds)
        got = statistics.median(took)
        seconds[name] = (want, got)
        ranges[name] = (min(took), max(took))
        ratios[name] = round(statistics.median(r.ratio for r in rounds), 3)
        table.add_row(
            name,
            *(f"{x * 1e3:.0f} ms" for x in (want, got)),
            f"{ratios[name]:.2f}",
            f"{min(r.ratio for r in rounds):.2f}-{max(r.ratio for r in rounds):.2f}",
            f"{min(took) * 1e3:.0f}-{max(took) * 1e3:.0f} ms",
        )
        cells = [
            (
                statistics.median(p.seconds.value for r in rounds for p in r.estimate.phases if p.name == phase),
                statistics.median(line["phases"][phase] for r in rounds for line in r.lines),
            )
            for phase in PHASES
        ]
        phases.add_row(name, *(f"{a * 1e3:.1f} / {b * 1e3:.1f}" for a, b in cells))
    console = Console(width=130)
    console.print(table)
    console.print()
    console.print(phases)
    apart = [(a, b) for a in seconds for b in seconds if ranges[a][1] < ranges[b][0]]
    turned = [f"{a} / {b}" for a, b in apart if seconds[a][0] >= seconds[b][0]]
    worst = max(abs(r - 1) for r in ratios.values())
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
