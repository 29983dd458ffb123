"""Tokens a second of each engine, and what an iteration takes outside of them: the example's model, and one of some 50M
parameters whose responses have 256 tokens, on one rank with two threads and on two ranks with one.

A run has a generator and a trainer, so that each engine is measured as a program has it: between allocation, resharding
and release. Runs are interleaved, the first iterations of each left out; figures are medians over the iterations of all
rounds. Generated are the tokens of responses, inferred and updated those of whole rows, what rows share counted in each
of them: that an engine computes it once is its gain. `outside` is what is left of an iteration beside generation,
inference and update. Prints a table in Markdown and, last, one line of JSON; status 1 where `outside` is over the bar.
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
from seconds import EXAMPLE, Variant, by, endless, measured, plan_of, randomised

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
    """A folder, what is replaced in the example's program for it, and the iterations of a run, the first left out."""

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
    """The engines of one run, and on two ranks their layouts."""

    generator: str
    trainer: str
    generated: str = ""
    trained: str = ""

    def variant(self, model: Model) -> Variant:
        stated = (self.trainer, self.generator, self.trained, self.generated)
        return by(model.folder, model.changes, model.iterations, *stated)


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
    """Of each iteration tokens a second by what is done, seconds, and the share outside of the engines."""
    found = []
    for line in measured(plan_of(run.variant(model), folder), model.warm):
        phases = line["phases"]
        response = line["response_tokens"]
        whole = line["prompt_tokens"] + response
        found.append(
            {
                "generate": response / phases["actor.generate"],
                "infer": whole / phases["actor.infer"],
                "update": whole / phases["actor.update"],
                "seconds": line["seconds"],
                "outside": 1 - sum(phases.get(name, 0.0) for name in COMPUTE) / line["seconds"],
            }
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--runs", type=int, default=len(RUNS), help="the first ones of all")
    options = smoke.parse(parser, rounds=1, models=["example"], runs=1)
    found: dict[tuple[str, Run], list[Line]] = {(m, r): [] for m in options.models for r in RUNS[: options.runs]}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(EXAMPLE, folder, dirs_exist_ok=True)
        endless(folder, "endless")
        randomised(folder, "large", LARGE, "endless")
        for number in range(options.rounds):
            for (model, run), kept in found.items():
                some = lines(run, MODELS[model], folder)
                kept += some
                took = statistics.median(x["seconds"] for x in some)
                print(f"round {number + 1}, {model}, {run}: {took:.2f} s an iteration", file=sys.stderr, flush=True)
    status = report(found)
    return 0 if options.smoke else status


def report(found: dict[tuple[str, Run], list[Line]]) -> int:
    print("tokens a second\n\n| model | ranks | engines | generate | infer | update | an iteration | outside |")
    print("|---|---|---|---|---|---|---|---|")
    figures = {}
    for (model, run), some in found.items():
        middle = {k: statistics.median(x[k] for x in some) for k in some[0]}
        stated = ((run.generator, run.generated), (run.trainer, run.trained))
        names = [f"{engine} {layout}".replace(" = ", " ").strip() for engine, layout in stated]
        cells = [model, "2" if run.trained else "1", " and ".join(names)]
        cells += [f"{middle[k]:,.0f}" for k in ("generate", "infer", "update")]
        print(f"| {' | '.join(cells)} | {middle['seconds']:.2f} s | {middle['outside']:.1%} |")
        figures[f"{model}: {cells[2]}"] = {
            k: round(v, 4 if k in ("seconds", "outside") else 1) for k, v in middle.items()
        }
    worst = max(x["outside"] for x in figures.values())
    print(json.dumps({"runs": figures, "outside_most": worst, "bar": BAR}))
    return 0 if worst <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
