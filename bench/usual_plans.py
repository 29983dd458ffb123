"""Plans of usual models on usual clusters, next to the layouts of public recipes.

Each case is GRPO with 512 prompts and 16 responses a prompt (prompts of up to 2,048 tokens, responses of up to 8,192)
on a cluster, with nothing stated. The command prints the layouts and engines that the planner chooses, the options that
it sets, the seconds of an iteration, and the fullest phase with its share of a device. The line below is a public
recipe for the same model or for a similar one. If our engines can plan its layouts, the line has their seconds in the
same model.

Usage: python bench/usual_plans.py [--cases N] [--perturb]. `--perturb` plans each case again with the memory bandwidth
and the bfloat16 FLOP/s of the device 2 % lower and higher, and counts the cases of which a layout changes. The last
line is one JSON object with the seconds of each case.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from dataclasses import dataclass

import smoke

from msrl_graph import ProgramWarning, compile
from msrl_graph.diagnostics import Fault
from msrl_graph.hardware.device_presets import DEVICES
from msrl_graph.ir.plan import FUNCTIONS, Plan
from msrl_graph.passes.place import format_layout

CHANGE = 0.02


@dataclass(frozen=True)
class UsualCase:
    """A model on a cluster, and a public recipe.

    `stated` has the recipe's layouts and engines as statements of a deploy.
    """

    model: str
    device: str
    hosts: int
    recipe: str
    stated: tuple[str, ...]
    each: int = 8

    @property
    def name(self) -> str:
        return f"{self.model}, {self.hosts * self.each} {self.device}"


def _recipe(engine: str, update: str, generate: str) -> tuple[str, ...]:
    return (
        f"layout actor.update {{ {update} }}",
        f"layout actor.generate {{ {generate} }}",
        f"engine actor.update = {engine}",
    )


NEMO = "NeMo-RL examples/configs"
PERFORMANCE = f"{NEMO}/recipes/llm/performance"
CASES = [
    UsualCase(
        "qwen3-8b",
        "h100",
        1,
        f"{NEMO}/grpo_math_8B.yaml (Llama 3.1 8B)",
        _recipe("fsdp", "dp = 8, zero = 3", "dp = 8"),
    ),
    UsualCase(
        "qwen3-8b",
        "ascend-910b",
        1,
        "verl run_qwen3-8b_npu.sh",
        _recipe("fsdp", "dp = 8, zero = 3", "tp = 2, dp = 4"),
    ),
    UsualCase(
        "qwen3-8b",
        "ascend-910b",
        2,
        "verl run_qwen3-8b_npu.sh, of one host",
        _recipe("fsdp", "dp = 16, zero = 3", "tp = 2, dp = 8"),
    ),
    UsualCase(
        "qwen3-32b",
        "ascend-910b",
        2,
        "slime run-qwen3-32B.sh, of one host of H800",
        _recipe("megatron", "tp = 8, dp = 2", "tp = 8, dp = 2"),
    ),
    UsualCase(
        "qwen3-32b",
        "ascend-910b",
        4,
        "verl run_qwen3_32b_npu.sh, of 32 NPUs of A3",
        _recipe("fsdp", "cp = 4, cp_kind = ulysses, dp = 8, zero = 3", "tp = 4, dp = 8"),
    ),
    UsualCase(
        "qwen3-30b-a3b",
        "h100",
        1,
        "slime run-qwen3-30B-A3B.sh",
        _recipe("megatron", "tp = 4, dp = 2, ep = 8, etp = 1", "tp = 8"),
    ),
    UsualCase(
        "qwen3-30b-a3b",
        "h100",
        4,
        f"{PERFORMANCE}/grpo-qwen3-30ba3b-4n8g.yaml",
        _recipe("megatron", "dp = 32, ep = 8, etp = 1", "tp = 2, dp = 16"),
    ),
    UsualCase(
        "qwen3-235b-a22b",
        "h100",
        16,
        f"{PERFORMANCE}/grpo-qwen3-235b-16n8g.yaml",
        _recipe(
            "megatron",
            "tp = 2, cp = 2, pp = 8, dp = 4, ep = 16, etp = 1, stages = [11, 12, 12, 12, 12, 12, 12, 11]",
            "tp = 16, dp = 8",
        ),
    ),
    UsualCase(
        "deepseek-v3-671b",
        "h100",
        32,
        f"{PERFORMANCE}/grpo-deepseek-v3-32n8g.yaml",
        _recipe(
            "megatron",
            "pp = 16, dp = 16, ep = 16, etp = 1, stages = [3, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 2]",
            "tp = 32, dp = 8",
        ),
    ),
    UsualCase(
        "deepseek-r1-671b",
        "ascend-910c",
        48,
        "MindSpeed RL, arXiv:2507.19017, figure 11",
        _recipe("megatron", "tp = 4, pp = 6, dp = 16, ep = 16, etp = 2", "tp = 2, dp = 192, ep = 64"),
    ),
    UsualCase(
        "llama3.3-70b",
        "h100",
        8,
        f"{NEMO}/grpo_math_70B_megatron.yaml",
        _recipe("megatron", "tp = 4, pp = 4, dp = 4", "tp = 4, dp = 16"),
    ),
    UsualCase(
        "qwen2.5-0.5b", "h100", 1, "slime run-qwen3-0.6B-single-gpu.sh", _recipe("megatron", "dp = 1", "dp = 1"), 1
    ),
]


def program(case: UsualCase, stated: tuple[str, ...] = (), figure: str = "", by: float = 0.0) -> str:
    """Return the text of a case's program.

    `figure` is a figure of the device that is changed by the fraction `by`.
    """
    changed = ""
    if figure:
        device = DEVICES[case.device]
        value = device.flops["bf16"].value if figure == "flops_bf16" else getattr(device, figure).value
        unit = "TFLOP/s" if figure == "flops_bf16" else "TB/s"
        changed = f", {figure} = {value * (1 + by) / 1e12:.6g} {unit}"
    return "\n".join(
        (
            "import grpo",
            "cluster pod {",
            f'device = "{case.device}", nodes = {case.hosts}, devices_per_node = {case.each}{changed}',
            "}",
            "deploy grpo on pod {",
            *("set prompts = 512", "set group = 16", "set prompt_len = 2048", "set response_len = 8192"),
            f'model policy = "{case.model}"',
            'data source = "train.jsonl" { prompt = "problem", answer = "answer" }',
            *stated,
            "}",
            "",
        )
    )


def planned(text: str) -> Plan | str:
    """Return the plan of a program, or why there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ProgramWarning)
        try:
            return compile("usual.rlg", text=text)
        except Fault as fault:
            return ", ".join(dict.fromkeys(f"{found.code}: {found.message}" for found in fault.diagnostics))


def layouts(plan: Plan) -> dict[str, str]:
    """Return the layout and engine of each node on devices, as text; nodes of equal layouts have one entry."""
    found: dict[str, str] = {}
    for placement in plan.placements:
        if placement.pool != FUNCTIONS and placement.node in ("actor.generate", "actor.update"):
            options = [
                f"{option} {value}"
                for option, value in placement.engine.options.items()
                if option in ("recompute", "offload") and value != "none"
            ]
            how = ", ".join((format_layout(placement.layout), placement.engine.name, *options))
            found[placement.node] = how
    return found


def describe(plan: Plan | str) -> str:
    if isinstance(plan, str):
        return plan
    assert plan.estimate is not None
    fullest = max((phase for phase in plan.memory if phase.place == "device"), key=lambda phase: phase.total)
    share = fullest.total / fullest.capacity.value
    pools = f"{len(plan.pools)} pools; " if len(plan.pools) > 1 else ""
    named = "; ".join(f"{node.split('.')[1]}: {how}" for node, how in layouts(plan).items())
    seconds = plan.estimate.iteration_seconds.value
    return f"{seconds:9,.0f} s  {fullest.total / 1e9:5.1f} GB ({100 * share:.0f} %)  {pools}{named}"


def changes(case: UsualCase, plan: Plan) -> list[str]:
    """Return the changes of a figure that change a layout or a pool of the plan."""

    def shape(other: Plan) -> tuple[object, ...]:
        return (
            [(pool.nodes, pool.devices) for pool in other.pools],
            [(placement.node, placement.layout, placement.engine.name) for placement in other.placements],
        )

    found = []
    for figure in ("memory_bandwidth", "flops_bf16"):
        for by in (-CHANGE, CHANGE):
            other = planned(program(case, figure=figure, by=by))
            if isinstance(other, str) or shape(other) != shape(plan):
                found.append(f"{figure} {100 * by:+.0f} %")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=len(CASES), help="number of cases, from the first")
    parser.add_argument("--perturb", action="store_true", help="also plan with figures 2 %% lower and higher")
    options = smoke.parse(parser, cases=2)
    seconds: dict[str, float] = {}
    flips: dict[str, list[str]] = {}
    took = 0.0
    for case in CASES[: options.cases]:
        began = time.process_time()
        plan = planned(program(case))
        took += time.process_time() - began
        print(case.name)
        print(f"  chosen  {describe(plan)}")
        if isinstance(plan, Plan):
            assert plan.estimate is not None
            seconds[case.name] = round(plan.estimate.iteration_seconds.value, 1)
            if options.perturb and (found := changes(case, plan)):
                flips[case.name] = found
                print(f"  changes with {', '.join(found)}")
        print(f"  recipe  {describe(planned(program(case, case.stated)))}  [{case.recipe}]", flush=True)
    figures = {
        "bench": "usual_plans",
        "cases": len(seconds),
        "seconds": seconds,
        "planning_processor_s": round(took, 1),
        **({"flips": len(flips)} if options.perturb else {}),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
