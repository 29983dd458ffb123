"""Simulation times for 1,024 prompts with 16 responses, on 384 and 10,000 devices.

Usage: python bench/simulate.py [--runs N]. Runs are interleaved. The last line is one JSON object; the bar is 10
seconds per iteration on 10,000 devices.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import smoke

from msrl_graph import compile, simulate

BAR = 10.0
PROGRAM = """import grpo
cluster pod {{ device = "ascend-910c", nodes = {nodes}, devices_per_node = 8, network = 25 GB/s }}
deploy grpo on pod {{
  set prompts = 1024
  model policy = "qwen2.5-32b"
  data source = "deepscaler.jsonl" {{ prompt = "problem", answer = "answer" }}
  place actor.generate on nodes 0..{last}
  place actor.update, reference together on nodes {first}..{end}
  layout actor.generate {{ tp = 4 }}
  layout actor.update {{ tp = 8 }}
  engine actor.generate = vllm
  actor.generate -> actor.infer, reference.infer {{ stream = 1024 }}
}}
"""
# All hosts, and those that generate: the update's data-parallel size must divide the rows.
SIZES = {384: (48, 16), 10_000: (1250, 226)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=3, help="runs of each size")
    parser.add_argument("--devices", type=int, nargs="+", choices=SIZES, default=[*SIZES])
    options = smoke.parse(parser, runs=1, devices=[384])
    runs = max(1, options.runs)
    sizes = {size: SIZES[size] for size in options.devices}
    plans = {
        size: compile(
            "bench.rlg", text=PROGRAM.format(nodes=nodes, last=generating - 1, first=generating, end=nodes - 1)
        )
        for size, (nodes, generating) in sizes.items()
    }
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(runs):
        for size, plan in plans.items():
            began = time.perf_counter()
            simulated = simulate(plan, iterations=1, lengths="lognormal(1500, 1)", stragglers="1% x3")
            seconds[size].append(time.perf_counter() - began)
            assert simulated.seconds > 0
    for size, values in seconds.items():
        print(f"{size:>6,} devices: median {statistics.median(values):6.2f} s, least {min(values):6.2f} s, {runs} runs")
    median = {f"seconds_{size}": round(statistics.median(values), 2) for size, values in seconds.items()}
    worst = max(median.values())
    print(
        json.dumps({"bench": "simulate", "rows": 1024 * 16, **median, "bar": BAR, "pass": worst <= BAR, "runs": runs})
    )


if __name__ == "__main__":
    main()
