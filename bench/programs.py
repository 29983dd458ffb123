"""Run the algorithms of tests/programs for two iterations each, with small models.

The models run on two devices of this machine. A program states what is computed; a deploy adds sizes, models and data.
Here that is the arithmetic example's model as policy, teacher and judge, PPO's reward model, and their data. Ends with
one line of JSON, and with status 1 if a run failed, took no optimizer step in an iteration, or reported a figure that
is not finite.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import smoke
from rich.console import Console
from rich.table import Table

from msrl_graph import Fault, compile
from msrl_graph.ir.run_options import RunOptions
from msrl_graph.runtime.driver import supervisor

ROOT = Path(__file__).parent.parent
PROGRAMS = ROOT / "tests" / "programs"
ARITHMETIC, REWARD, PAIRS = (
    ROOT / "examples" / name for name in ("arithmetic/model", "ppo/reward_model", "dpo/train.jsonl")
)
SUMS = ROOT / "examples" / "arithmetic" / "train.jsonl"
LONGER = "./model"  # the example's, with positions for the bounds that the programs declare
MODELS = {"policy": LONGER, "value": REWARD, "reward_model": REWARD, "teacher": LONGER, "judge": LONGER}
SMALL = {"prompts": 4, "group": 4, "prompt_len": 8, "response_len": 6}
FEW = {"prompts": 64, "prompt_len": 8, "response_len": 6}
ANSWERED = {"prompt": "prompt", "answer": "answer"}
# Replaces a large size that the file itself states and no param changes.
DISTIL = """
algorithm small extends on_policy_distillation {
  columns { prompt : i32[<= 8]  response : i32[<= 6]  top_ids : i32[response, 8]  top_logp : f32[response, 8] }
  source(8) -> prompt
}"""


@dataclass(frozen=True)
class Case:
    """A program of the folder, and the deploy of an algorithm in it."""

    program: str
    algorithm: str
    sets: dict[str, int] = field(default_factory=lambda: SMALL)
    data: Path | str = SUMS
    fields: dict[str, str] = field(default_factory=lambda: ANSWERED)
    models: tuple[str, ...] = ("policy",)
    more: str = ""


PPO = ("policy", "value", "reward_model")
ASKED = {"prompt": "prompt"}
CASES = (
    Case("agent", "agent", {**SMALL, "turns": 3, "response_len": 100}, "tasks.jsonl", {**ASKED, "task": "task"}),
    Case("async", "async_grpo"),
    Case("curriculum", "curriculum"),
    Case("dapo", "dapo", {**SMALL, "buffer": 2}),
    Case("distil", "small", {}, SUMS, ASKED, ("policy", "teacher"), DISTIL),
    Case("dpo", "dpo", {"pairs": 4}, PAIRS, {c: c for c in ("prompt", "chosen", "rejected")}),
    Case("judge", "grpo_judge", SMALL, SUMS, ANSWERED, ("policy", "judge")),
    Case("pf_ppo", "pf_ppo", FEW, SUMS, ASKED, PPO),
    Case("pf_ppo", "pf_ppo_pow", FEW, SUMS, ASKED, PPO),
    Case("ppo", "ppo", {**FEW, "prompts": 256}, SUMS, ASKED, PPO),
    Case("rft", "rejection"),
    Case("two_deploys", "grpo"),
    *(Case("variants", name) for name in ("rloo", "dr_grpo", "gspo", "reinforce_pp")),
)


def text(case: Case) -> str:
    """Return the program with its own deploy."""
    lines = [
        f'import "{PROGRAMS / case.program}.rlg"',
        case.more,
        'cluster here { device = "cpu", devices_per_node = 2 }',
    ]
    lines += [
        f"deploy {case.algorithm} on here as small {{",
        *(f"  set {name} = {value}" for name, value in case.sets.items()),
    ]
    lines += [f'  model {name} = "{MODELS[name]}"' for name in case.models]
    fields = ", ".join(f'{column} = "{name}"' for column, name in case.fields.items())
    return "\n".join(
        [*lines, f'  data source = "{case.data}" {{ {fields} }}', "  run { iterations = 2, seed = 0, save = 1 }", "}"]
    )


def find_error(lines: list[dict[str, Any]]) -> str:
    """Return what is wrong with the metrics of a run, or ""."""
    for line in lines:
        strange = [key for key, value in line.items() if isinstance(value, float) and not math.isfinite(value)]
        if strange or not line["updates"]:
            return f"iteration {line['iteration']}: {', '.join(strange) or 'no step'}"
    return "" if len(lines) == 2 else f"{len(lines)} iterations"


def execute(case: Case, folder: Path) -> dict[str, Any]:
    """Compile and run a case; return its figures and what was `wrong`."""
    out = folder / case.algorithm
    program = folder / f"{case.algorithm}.rlg"
    program.write_text(text(case))
    begin = time.monotonic()
    try:
        plan = compile(program, deploy="small")
        with (folder / f"{case.algorithm}.log").open("w") as log:
            supervisor.run(plan, RunOptions(out), stderr=log)
    except (Fault, supervisor.RunFailed) as error:
        return {"seconds": round(time.monotonic() - begin, 1), "wrong": str(error).partition("\n")[0]}
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    figures = {key: lines[-1][key] for key in ("rows", "updates", "loss", "grad_norm")}
    return {"seconds": round(time.monotonic() - begin, 1), **figures, "wrong": find_error(lines)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", choices=[case.algorithm for case in CASES], action="append", help="one algorithm; may be repeated"
    )
    options = smoke.parse(parser, only=["rloo"])
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        tasks = [
            {"prompt": f"{first}+{second}=", "task": {"thing": str((first + second) % 10)}}
            for first in (12, 37, 58)
            for second in (9, 23)
        ]
        (Path(name) / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
        config = json.loads((shutil.copytree(ARITHMETIC, Path(name) / LONGER) / "config.json").read_text())
        (Path(name) / LONGER / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
        for case in CASES:
            if not options.only or case.algorithm in options.only:
                results[case.algorithm] = execute(case, Path(name))
                print(case.algorithm, results[case.algorithm], file=sys.stderr, flush=True)
    table = Table(title="two iterations of each, figures of the second", title_justify="left", box=None)
    for column in ("algorithm", "program", "seconds", "rows", "updates", "loss", "grad_norm", "wrong"):
        table.add_column(column, justify="left" if column in ("algorithm", "program", "wrong") else "right")
    programs = {case.algorithm: f"{case.program}.rlg" for case in CASES}
    for algorithm, row in results.items():
        cells = [f"{row[key]:.4g}" if key in row else "" for key in ("seconds", "rows", "updates", "loss", "grad_norm")]
        table.add_row(algorithm, programs[algorithm], *cells, row["wrong"])
    Console(width=120).print(table)
    print(json.dumps(results))
    return 1 if any(row["wrong"] for row in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
