"""Planning times: 10,000 devices, and searches for the paper's models.

The 10,000 devices have stated layouts; the paper's models are searched on 16 and 384 devices.

Usage: python bench/planner.py [--rounds N]. Each compile is a call in this process with empty caches. Rounds are
interleaved, and medians are reported: wall-clock seconds, and processor seconds, which other load affects less. Each
search's fastest iteration is compared with that of the paper's layouts (arXiv:2507.19017; for models whose layouts it
does not give, those of the same kind), in the same model. The last line is one JSON object; the bars are 3 s and 5 s,
and a ratio of at most 1.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import time
from pathlib import Path

import smoke

from msrl_graph import compile
from msrl_graph.diagnostics import Fault

PAGE = (Path(__file__).parent.parent / "tests" / "programs" / "grpo_page.rlg").read_text(encoding="utf-8")
LAYOUTS = [line for line in PAGE.split("\n") if line.strip().startswith("layout ")]
BAR_LARGE = 3.0
BAR_SEARCH = 5.0
DENSE = ["layout actor.update { tp = 8 }", "layout actor.generate { tp = 4 }"]
SPARSE = ["layout actor.update { tp = 4, pp = 2, ep = 8, etp = 1 }", "layout actor.generate { tp = 2, ep = 16 }"]
R1 = [
    "layout actor.update { tp = 4, pp = 6, dp = 16, ep = 16, etp = 2 }",  # TP4 PP6 EP16 DP2: experts' sizes, over etp 2
    "layout actor.generate { tp = 2, dp = 192, ep = 64 }",  # TP2 PP1 EP64 DP6
]
# (model, hosts of 8 packages, layouts). Qwen2.5-7B has 28 heads, which are not divisible by 8.
CASES = [
    ("qwen2.5-7b", 2, ["layout actor.update { tp = 4 }", "layout actor.generate { tp = 2 }"]),
    ("qwen2.5-32b", 2, DENSE),  # TP8DP2 to TP4DP4, figure 10
    ("qwen3-30b-a3b", 2, SPARSE),
    ("deepseek-r1-671b", 2, []),  # none of its layouts fits 16 packages; the search finds this too
    ("qwen2.5-7b", 48, ["layout actor.update { tp = 4, pp = 3 }", "layout actor.generate { tp = 2 }"]),
    ("qwen2.5-32b", 48, ["layout actor.update { tp = 8, pp = 3 }", "layout actor.generate { tp = 4 }"]),
    (
        "qwen3-30b-a3b",
        48,
        ["layout actor.update { tp = 4, pp = 3, ep = 8, etp = 1 }", "layout actor.generate { tp = 2, ep = 16 }"],
    ),
    ("deepseek-r1-671b", 48, R1),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", type=int, default=len(CASES), help="number of cases, from the first")
    options = smoke.parse(parser, rounds=1, cases=1)
    rounds = options.rounds
    cases = CASES[: options.cases]
    times: dict[str, list[tuple[float, float]]] = {}
    best: dict[str, tuple[float, str]] = {}
    for _ in range(rounds):
        text = (
            PAGE.replace("nodes            = 2", "nodes            = 1250")
            .replace("dp = 2", "dp = 1250")
            .replace("dp = 4", "dp = 2500")
        )
        text = text.replace("prompts      = 256", "prompts      = 1250")
        took, plan = time_compile(text)
        assert plan is not None and plan.cluster.devices == 10_000
        times.setdefault("10,000 devices", []).append(took)
        for model, hosts, _ in cases:
            seconds, plan = time_compile(program(model, hosts, []))
            times.setdefault(f"{model} on {hosts * 8}", []).append(seconds)
            if plan is not None and plan.search is not None and plan.search.seconds:
                search = plan.search
                best[f"{model} on {hosts * 8}"] = (
                    search.fastest_seconds,
                    "the fastest" if search.is_proven else f"gap {100 * search.gap:.2g} %",
                )
    ratios = {}
    for model, hosts, layouts in cases:
        name = f"{model} on {hosts * 8}"
        line = f"{name:<24} {median(times[name]):6.2f} s ({median(times[name], 1):5.2f} s)"
        if name in best:
            seconds, how = best[name]
            stated = paper(model, hosts, layouts)
            ratios[name] = seconds / stated if stated else 0.0
            line += f"   iteration {seconds:9,.1f} s ({how})"
            line += (
                f", of the paper's layouts {stated:9,.1f} s: x {ratios[name]:.3f}"
                if stated
                else ", the paper's layouts do not fit"
            )
        else:
            line += "   nothing fits"
        print(line)
    large = median(times["10,000 devices"])
    print(f"{'10,000 devices, stated':<24} {large:6.2f} s ({median(times['10,000 devices'], 1):5.2f} s)")
    slowest, processor = (
        max(median(value, which) for case, value in times.items() if case != "10,000 devices") for which in (0, 1)
    )
    figures = {
        "bench": "planner",
        "large_s": round(large, 2),
        "slowest_search_s": round(slowest, 2),
        "slowest_search_processor_s": round(processor, 2),
        "worst_ratio": round(max(ratios.values()), 3),
        "pass": large < BAR_LARGE and slowest < BAR_SEARCH and max(ratios.values()) <= 1,
        "rounds": rounds,
        "ratios": {case: round(value, 3) for case, value in ratios.items()},
    }
    print(json.dumps(figures))


def program(model: str, hosts: int, layouts: list[str]) -> str:
    """Return the page's program with another model and cluster.

    With stated layouts it also names engines that support them.
    """
    engines = ["engine actor.update, reference.infer = megatron", "engine actor.generate = vllm"] if layouts else []
    text = PAGE.replace("\n".join(LAYOUTS), "\n".join(f"  {statement}" for statement in [*layouts, *engines]))
    return text.replace("qwen2.5-32b", model).replace("nodes            = 2", f"nodes            = {hosts}")


def time_compile(text: str):  # type: ignore[no-untyped-def]
    """Compile; return wall-clock and processor seconds, and the plan or None."""
    for module in [candidate for candidate in gc.get_objects() if isinstance(candidate, functools._lru_cache_wrapper)]:
        module.cache_clear()
    began = time.perf_counter(), time.process_time()
    try:
        plan = compile("bench.rlg", text=text)
    except Fault:
        plan = None
    return (time.perf_counter() - began[0], time.process_time() - began[1]), plan


def median(times: list[tuple[float, float]], which: int = 0) -> float:
    return statistics.median(pair[which] for pair in times)


def paper(model: str, hosts: int, layouts: list[str]) -> float:
    """Return seconds per iteration with the paper's layouts, 0 if they do not fit."""
    plan = time_compile(program(model, hosts, layouts))[1] if layouts else None
    return plan.estimate.iteration_seconds.value if plan is not None and plan.estimate is not None else 0.0


if __name__ == "__main__":
    main()
