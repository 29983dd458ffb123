"""Tokens per second of each engine, and an iteration's time outside of engines.

Models are the example's and one of some 50M parameters with responses of 256 tokens, on one rank with two threads and
on two ranks with one.

A run has a generator and a trainer, so that each engine is measured as in a program: between allocation, resharding and
release. Runs are interleaved, the first iterations of each are left out, and figures are medians over the iterations of
all rounds. Generation counts the tokens of responses; inference and update count those of whole rows, and tokens that
rows share count for each row: computing them once is the engine's gain. `outside` is the share of an iteration outside
of generation, inference and update. Prints a table in Markdown and, last, one line of JSON; the status is 1 if
`outside` exceeds the bar.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import smoke
from phases import COMPUTE
from seconds import EXAMPLE, Variant, endless, measure_run, plan_of, randomize, with_engines

BAR = 0.15
LARGE = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 512,
}


@dataclass(frozen=True)
class Model:
    """A model: its folder, program changes, and iterations (`warm` are left out)."""

    folder: str
    changes: tuple[tuple[str, str], ...]
    iterations: int
    warm: int


MODELS = {
    "example": Model("model", (), 12, 4),
    "50M": Model(
        "large",
        (
            ("i32[<= 5]", "i32[<= 256]"),
            ("prompts = 64", "prompts = 2"),
            ("group   = 8", "group   = 2"),
            ("mini_batch = 256", "mini_batch = 4"),
        ),
        2,
        1,
    ),
}


@dataclass(frozen=True)
class Run:
    """The engines of one run, and their layouts on two ranks."""

    generator: str
    trainer: str
    generated: str = ""
    trained: str = ""

    def variant(self, model: Model) -> Variant:
        stated = (self.trainer, self.generator, self.trained, self.generated)
        return with_engines(model.folder, model.changes, model.iterations, *stated)


RUNS = (
    Run("hf", "fsdp"),
    Run("vllm", "megatron"),
    Run("hf", "fsdp", "tp = 2", "dp = 2, zero = 3"),
    Run("vllm", "megatron", "tp = 2", "pp = 2"),
    Run("hf", "fsdp", "dp = 2", "dp = 2, zero = 0"),
    Run("vllm", "megatron", "dp = 2", "tp = 2"),
)
Line = dict[str, float]


def lines(run: Run, model: Model, folder: Path) -> list[Line]:
    """Return figures of each iteration.

    These are tokens per second of each phase, seconds, and the share outside of the engines.
    """
    rows = []
    for line in measure_run(plan_of(run.variant(model), folder), model.warm):
        phases = line["phases"]
        response = line["response_tokens"]
        all_tokens = line["prompt_tokens"] + response
        rows.append(
            {
                "generate": response / phases["actor.generate"],
                "infer": all_tokens / phases["actor.infer"],
                "update": all_tokens / phases["actor.update"],
                "seconds": line["seconds"],
                "outside": 1 - sum(phases.get(name, 0.0) for name in COMPUTE) / line["seconds"],
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--runs", type=int, default=len(RUNS), help="number of runs, from the first")
    options = smoke.parse(parser, rounds=1, models=["example"], runs=1)
    lines_by_run: dict[tuple[str, Run], list[Line]] = {
        (model_name, engines): [] for model_name in options.models for engines in RUNS[: options.runs]
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(EXAMPLE, folder, dirs_exist_ok=True)
        endless(folder, "endless")
        randomize(folder, "large", LARGE, "endless")
        for number in range(options.rounds):
            for (model, run), run_lines in lines_by_run.items():
                new_lines = lines(run, MODELS[model], folder)
                run_lines += new_lines
                took = statistics.median(line["seconds"] for line in new_lines)
                print(f"round {number + 1}, {model}, {run}: {took:.2f} s an iteration", file=sys.stderr, flush=True)
    status = report(lines_by_run)
    return 0 if options.smoke else status


def report(lines_by_run: dict[tuple[str, Run], list[Line]]) -> int:
    print("tokens a second\n\n| model | ranks | engines | generate | infer | update | an iteration | outside |")
    print("|---|---|---|---|---|---|---|---|")
    figures = {}
    for (model, run), run_lines in lines_by_run.items():
        middle = {key: statistics.median(line[key] for line in run_lines) for key in run_lines[0]}
        stated = ((run.generator, run.generated), (run.trainer, run.trained))
        names = [f"{engine} {layout}".replace(" = ", " ").strip() for engine, layout in stated]
        cells = [model, "2" if run.trained else "1", " and ".join(names)]
        cells += [f"{middle[key]:,.0f}" for key in ("generate", "infer", "update")]
        print(f"| {' | '.join(cells)} | {middle['seconds']:.2f} s | {middle['outside']:.1%} |")
        figures[f"{model}: {cells[2]}"] = {
            key: round(value, 4 if key in ("seconds", "outside") else 1) for key, value in middle.items()
        }
    worst = max(run_figures["outside"] for run_figures in figures.values())
    print(json.dumps({"runs": figures, "outside_most": worst, "bar": BAR}))
    return 0 if worst <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
