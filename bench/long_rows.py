"""Memory of a trainer for rows of 8k to 64k tokens, planned, beside published figures.

The published figures are those of prime-rl (pull request 3234): Qwen3-30B-A3B on one host of 8 H200, trained alone,
with full recomputation. The plan is one of `fsdp` with the same model, ep 8 and ZeRO 3. Prints a table and, last, one
line of JSON with the planned peak of each length and its ratio to the published one.
"""

from __future__ import annotations

import argparse
import json
import warnings

import smoke

from msrl_graph import compile
from msrl_graph.diagnostics import ProgramWarning

PROMPT = 64
# Tokens of a row: peak in GB and seconds of a step.
PUBLISHED = {8192: (67.8, "1.75"), 16384: (71.9, "5.17"), 32768: (79.1, "16 to 21"), 65536: (97.0, "38.7")}
TEXT = """import grpo
cluster one {{ device = "h200", nodes = 1, devices_per_node = 8 }}
deploy grpo on one {{
  model policy = "qwen3-30b-a3b"
  set prompts = 8
  set group = 1
  set prompt_len = {prompt}
  set response_len = {response}
  engine actor.update = fsdp {{ recompute = full, micro_batch = 1 }}
  layout actor.update {{ dp = 8, ep = 8, zero = 3 }}
}}"""


def plan_update(tokens: int) -> tuple[float, float]:
    """Return the planned peak in GB of a trainer alone, and the seconds of an update of one row on each device."""
    with warnings.catch_warnings(action="ignore", category=ProgramWarning):
        plan = compile("long.rlg", text=TEXT.format(prompt=PROMPT, response=tokens - PROMPT))
    (held,) = (phase.items for phase in plan.memory if phase.phase == "update" and phase.place == "device")
    alone = sum(size for item, size in held.items() if not item.startswith("reference"))
    assert plan.estimate is not None
    (update,) = (phase for phase in plan.estimate.phases if phase.name == "actor.update")
    return alone / 1e9, update.seconds.value


def main() -> None:
    options = smoke.parse(argparse.ArgumentParser(description=__doc__), lengths=[8192])
    found = {}
    print(f"{'tokens':>8}{'published':>12}{'planned':>10}{'ratio':>8}{'published step':>17}{'planned step':>15}")
    for tokens in getattr(options, "lengths", PUBLISHED):
        peak, seconds = plan_update(tokens)
        published, step = PUBLISHED[tokens]
        found[str(tokens)] = {"peak_gb": round(peak, 1), "ratio": round(peak / published, 3)}
        row = f"{tokens:>8,}{published:>9} GB{peak:>7.1f} GB{peak / published:>8.2f}"
        print(f"{row}{step:>15} s{seconds:>13.2f} s")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
