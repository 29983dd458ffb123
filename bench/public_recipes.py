"""Published recipes of other systems, planned on their own numbers of devices.

Each recipe has the model, the devices, the batch and the lengths of an example that another project publishes; layouts
and options are the planner's, unless the recipe needs some. The command prints the fullest device, in which phase it is
full, and the seconds of an iteration. It exits with 1 if a recipe does not fit. The last line is one JSON object with
the number of recipes, the number that fit, and the fullest device of each.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from dataclasses import dataclass

import smoke

from msrl_graph import ProgramWarning, compile
from msrl_graph.diagnostics import Fault


@dataclass(frozen=True)
class PublicRecipe:
    """A published example: where it is, and its sizes in devices, rows and tokens."""

    source: str
    model: str
    device: str
    hosts: int
    devices: int  # of a host
    prompts: int
    group: int
    prompt: int  # tokens, at most
    response: int  # tokens, at most
    algorithm: str = "grpo"
    stated: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        stated = "\n  ".join(self.stated)
        return f"""import {self.algorithm}
cluster public {{ device = "{self.device}", nodes = {self.hosts}, devices_per_node = {self.devices} }}
deploy {self.algorithm} on public {{
  model policy = "{self.model}"
  set prompts = {self.prompts}
  set group = {self.group}
  set prompt_len = {self.prompt}
  set response_len = {self.response}
  {stated}
}}"""


UNRECOMPUTED = (
    "layout actor.update { dp = 8, ep = 8 }",
    "engine actor.update = megatron { micro_batch = 1, recompute = none }",
)
RECIPES = (
    PublicRecipe("verl examples/grpo_trainer", "qwen2-7b", "h100", 1, 8, 1024, 5, 512, 1024),
    PublicRecipe("verl examples/grpo_trainer", "qwen3-8b", "h100", 1, 8, 1024, 5, 512, 1024),
    PublicRecipe("verl docs/perf/device_tuning", "qwen2-7b", "h800", 1, 2, 256, 5, 512, 1024),
    PublicRecipe("verl docs/perf/device_tuning", "qwen2.5-14b", "h800", 1, 4, 256, 5, 512, 1024),
    PublicRecipe("verl docs/perf/device_tuning", "qwen2.5-32b", "h20", 1, 8, 256, 5, 512, 1024),
    PublicRecipe("verl docs/perf/device_tuning", "llama3.1-70b", "h800", 4, 8, 256, 5, 512, 1024),
    PublicRecipe("verl recipe/dapo", "qwen2.5-32b", "h20", 16, 8, 512, 16, 2048, 20480, "dapo"),
    PublicRecipe("DeepScaleR, 24k tokens", "deepseek-r1-distill-qwen-1.5b", "a100", 4, 8, 128, 16, 1024, 24576),
    PublicRecipe("NeMo-RL grpo-qwen3-30ba3b-4n8g", "qwen3-30b-a3b", "h100", 4, 8, 64, 32, 1024, 3072),
    PublicRecipe("NeMo-RL grpo-qwen3-32b-4n8g", "qwen3-32b", "h100", 4, 8, 64, 32, 1024, 3072),
    PublicRecipe("NeMo-RL grpo-qwen3-235b-16n8g", "qwen3-235b-a22b", "h100", 16, 8, 16, 32, 1024, 7168),
    PublicRecipe("NeMo-RL grpo-deepseek-v3-32n8g", "deepseek-v3-671b", "h100", 32, 8, 32, 16, 512, 1024),
    PublicRecipe("slime run-qwen3-30B-A3B", "qwen3-30b-a3b", "h100", 1, 8, 32, 8, 1024, 8192),
    PublicRecipe("slime run-glm4-9B", "glm4-9b-0414", "h100", 1, 8, 32, 8, 1024, 8192),
    PublicRecipe("responses of 256k tokens", "deepseek-r1-distill-qwen-1.5b", "h100", 1, 1, 16, 16, 1024, 261120),
    PublicRecipe("32 responses of 40k tokens", "qwen3-30b-a3b", "h100", 1, 8, 16, 32, 1024, 40960),
    PublicRecipe("ep 8, no recomputation", "qwen3-30b-a3b", "h100", 1, 8, 64, 8, 1024, 3072, stated=UNRECOMPUTED),
)


def plan_recipe(recipe: PublicRecipe) -> tuple[float, str, float] | str:
    """Return the GB of the fullest device, its phase, and the seconds of an iteration; or why it does not fit."""
    try:
        with warnings.catch_warnings(action="ignore", category=ProgramWarning):
            plan = compile("recipe.rlg", text=recipe.text)
    except Fault as fault:
        return str(fault).split("\n")[0]
    held = {phase.phase: sum(phase.items.values()) / 1e9 for phase in plan.memory if phase.place == "device"}
    fullest = max(held, key=held.__getitem__)
    assert plan.estimate is not None
    return held[fullest], fullest, plan.estimate.iteration_seconds.value


def main() -> int:
    options = smoke.parse(argparse.ArgumentParser(description=__doc__), recipes=RECIPES[:1])
    recipes = getattr(options, "recipes", RECIPES)
    found: dict[str, float | None] = {}
    for recipe in recipes:
        name = f"{recipe.source}: {recipe.model} on {recipe.hosts * recipe.devices} {recipe.device}"
        result = plan_recipe(recipe)
        if isinstance(result, str):
            found[name] = None
            print(f"{name:<75} {result}", flush=True)
            continue
        size, phase, seconds = result
        found[name] = round(size, 1)
        print(f"{name:<75} {size:>6.1f} GB in {phase:<9} {seconds:>9,.1f} s", flush=True)
    fitting = sum(size is not None for size in found.values())
    print(json.dumps({"recipes": len(found), "fit": fitting, "gb": found}))
    return 0 if fitting == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
