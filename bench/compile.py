"""Compile times: start-up, large programs and 10,000 devices.

Usage: python bench/compile.py [--runs N] [--rounds N] [--shape NAME]. Compared runs are interleaved.

- Start: medians of whole processes of `msrl-compile --check` for the page's program, and of `import lark, networkx`.
- Large programs: the page's with 100, 1,000 and 10,000 additional function nodes, step by step in this process, with
  empty caches, in processor seconds. Each figure is the minimum over all runs, since other load on the machine can only
  add to it.
- networkx: the same graph, as `Graph.to_networkx()` makes it, sorted by dependency, ties by name. `bare` is a DiGraph
  of the same names and edges without data, sorted in any such order.
- Devices: the page's program for 10,000 devices.

The garbage collector is off in both, as in every compile. The last line is one JSON object; the bars are in `BARS`.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import networkx as nx
import smoke

from msrl_graph.checks.table import check_graph, check_plan
from msrl_graph.compiler.pipeline import CONTEXT, PASSES, context, translate
from msrl_graph.compiler.sources import ProgramSource
from msrl_graph.dsl.lower import lower
from msrl_graph.ir.graph import Graph
from msrl_graph.ir.plan import Plan

PROGRAM = Path(__file__).parent.parent / "tests" / "programs" / "grpo_page.rlg"
PAGE = PROGRAM.read_text(encoding="utf-8")
ALGORITHM, DEPLOY = PAGE.split("cluster pod", 1)
# Ratio of the process to the imports; of a step at ten times the nodes; of all but parsing to networkx; seconds for
# 10,000 devices.
BARS = {"start": 2.5, "growth": 15.0, "networkx": 20.0, "devices": 3.0}
SIZES = (100, 1_000, 10_000)
AGAIN = 3_000
# Modules are compiled once, as on a user's machine, even where the caller's Python keeps no bytecode.
CACHING = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
COMMANDS = {
    "compile": [sys.executable, "-m", "msrl_graph.cli", str(PROGRAM), "--check"],
    "imports": [sys.executable, "-c", "import lark, networkx"],
}


def program(shape: str, nodes: int) -> str:
    """Return the page's program with additional nodes."""
    body = "\n".join(SHAPES[shape](nodes))
    columns = "\n".join(f"    c{i} : f32" for i in range(nodes))
    deploy = DEPLOY.replace("deploy grpo", "deploy big")
    return (
        f"{ALGORITHM}\nalgorithm big extends grpo {{\n  columns {{\n{columns}\n  }}\n{body}\n}}\n\ncluster pod{deploy}"
    )


def chains(nodes: int) -> list[str]:
    """Return chains of ten nodes; each chain begins at the previous one."""
    lines = []
    for i in range(nodes):
        before = 0 if i == 0 else i if i % 10 else i - 9  # of nodes counted from 1; 0 is the reward
        column, node = (f"c{before - 1}", f"host.f{before - 1}") if before else ("reward", "host.reward")
        lines += [f"  node host.f{i}({column}) -> c{i} {{ call = shuffle(score = {column}), per = prompt }}"]
        lines += [f"  {node} -> host.f{i}"]
    return lines


def skips(nodes: int) -> list[str]:
    """Return one long chain in which each node reads from the second node before it.

    No edge leads directly there from the writer.
    """
    lines = []
    for i in range(nodes):
        column = f"c{i - 2}" if i > 1 else "reward"
        node = f"host.f{i - 1}" if i else "host.reward"
        lines += [f"  node host.f{i}({column}) -> c{i} {{ call = shuffle(score = {column}), per = prompt }}"]
        lines += [f"  {node} -> host.f{i}"]
    return lines


def fan(nodes: int) -> list[str]:
    """Return parallel nodes, from one node to one node that reads all their columns."""
    lines = [f"  node host.f{i}(response, answer) -> c{i} {{ call = exact_match() }}" for i in range(nodes)]
    all_nodes, all_columns = (", ".join(f"{name}{i}" for i in range(nodes)) for name in ("host.f", "c"))
    lines += [
        (
            f"  columns {{ sum : f32 }}\n  node host.sum({all_columns}) -> sum {{ call = "
            f"weighted_sum({', '.join('1' * nodes)}) }}"
        )
    ]
    return [*lines, f"  actor.generate -> {all_nodes}", f"  {all_nodes} -> host.sum"]


SHAPES: dict[str, Callable[[int], list[str]]] = {"chains": chains, "skips": skips, "fan": fan}


def time_call(do: Callable[[], Any]) -> tuple[float, Any]:
    """Call without garbage collection; return the processor seconds and the result."""
    gc.collect()
    gc.disable()
    began = time.process_time()
    result = do()
    seconds = time.process_time() - began
    gc.enable()
    return seconds, result


def measure_least(text: str, nodes: int, again: int) -> dict[str, float]:
    """Return the minimum of each figure, over several runs if they are short."""
    runs = [steps(text) for _ in range(max(1, again // nodes))]
    return {name: min(run[name] for run in runs) for name in runs[0]}


def steps(text: str) -> dict[str, float]:
    """Return the seconds of each step, of a compile without parsing, and of networkx."""
    for cached in [cache for cache in gc.get_objects() if isinstance(cache, functools._lru_cache_wrapper)]:
        cached.cache_clear()
    source = ProgramSource("bench.rlg", text, Path())
    figures: dict[str, float] = {}
    figures["parse"], result = time_call(lambda: translate(source, until="ast"))
    figures["lower"], lowered = time_call(lambda: lower(result.tree, context(source)))
    figures["checks"], _ = time_call(lambda: check_graph(lowered.graph, lowered.library, lowered.warnings))
    parsed = ProgramSource(source.name, text, Path(), result.tree)
    figures["all but parse"], result = time_call(lambda: translate(parsed))
    plan = Plan(lowered.graph, lowered.cluster, lowered.deploy)
    verify = 0.0
    for step in PASSES:
        figures[step.name], plan = time_call(lambda step=step, plan=plan: step.apply(plan))  # type: ignore[misc]
        # The checks that a pass enables, and its postconditions.
        both = functools.partial(
            lambda step, plan: (check_plan(step.name, plan, CONTEXT), [*step.verify(plan)]), step, plan
        )
        verify += time_call(both)[0]
    figures["verify"] = verify
    graph = result.graph
    return figures | {
        "networkx": time_call(lambda: sort(graph))[0],
        "networkx, bare": time_call(lambda: sort_bare(graph))[0],
    }


def sort(graph: Graph) -> list[str]:
    built = graph.to_networkx()
    built.remove_edges_from([(edge.src, edge.dst, edge.kind) for edge in graph.reshards()])
    return list(nx.lexicographical_topological_sort(built))


def sort_bare(graph: Graph) -> list[str]:
    built: nx.DiGraph[str] = nx.DiGraph()
    for node in graph.nodes:
        built.add_node(node.name)
    for edge in graph.samples():
        built.add_edge(edge.src, edge.dst)
    return list(nx.topological_sort(built))


def devices() -> float:
    """Return the seconds for the page's program and layouts on 10,000 devices."""
    text = (
        PAGE.replace("nodes            = 2", "nodes            = 1250")
        .replace("dp = 2", "dp = 1250")
        .replace("dp = 4", "dp = 2500")
    )
    text = text.replace("prompts      = 256", "prompts      = 1250")
    for cached in [cache for cache in gc.get_objects() if isinstance(cache, functools._lru_cache_wrapper)]:
        cached.cache_clear()
    seconds, result = time_call(lambda: translate(ProgramSource("bench.rlg", text, Path())))
    assert result.plan.cluster.devices == 10_000
    return seconds


def starts(runs: int) -> tuple[dict[str, float], float]:
    """Return median seconds of both processes, and the median ratio of neighbours.

    Other load on the machine then affects both.
    """
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for number in range(runs + 1):
        for name, command in COMMANDS.items():
            began = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=CACHING)
            if number:
                seconds[name].append(time.perf_counter() - began)
    ratio = statistics.median(
        compile_seconds / import_seconds
        for compile_seconds, import_seconds in zip(seconds["compile"], seconds["imports"], strict=True)
    )
    for name, values in seconds.items():
        print(
            f"{name:<8} median {statistics.median(values) * 1e3:7.1f} ms, least {min(values) * 1e3:7.1f} ms, "
            f"{runs} runs"
        )
    return {name: statistics.median(values) for name, values in seconds.items()}, ratio


def table(shape: str, rounds: list[dict[int, dict[str, float]]]) -> dict[str, float]:
    """Print milliseconds by step and size, and their growth; return a shape's figures."""
    sizes = [*rounds[0]]
    took = {
        size: {
            step_name: min(measured_round[size][step_name] for measured_round in rounds)
            for step_name in rounds[0][size]
        }
        for size in sizes
    }
    growth = {
        step_name: [took[larger][step_name] / took[smaller][step_name] for smaller, larger in pairwise(sizes)]
        for step_name in took[sizes[0]]
    }
    print(f"\n{shape:<16}" + "".join(f"{size:>9,}" for size in sizes) + "   ms; times of the size before")
    for step, ratios in growth.items():
        print(
            f"{step:<16}"
            + "".join(f"{took[size][step] * 1e3:9.1f}" for size in sizes)
            + "   "
            + "".join(f"{ratio:7.1f}" for ratio in ratios)
        )
    last = took[sizes[-1]]
    worst = max(
        (step_name for step_name in growth if not step_name.startswith("networkx")),
        key=lambda step_name: growth[step_name][-1],
    )
    over_networkx, bare = (last["all but parse"] / last[size] for size in ("networkx", "networkx, bare"))
    print(
        f"all but parse, in times of networkx: {over_networkx:.1f}; of a bare DiGraph: {bare:.1f}; the step that grows "
        f"most: {worst}"
    )
    return {
        "growth": round(
            max(max(step_ratios) for step_name, step_ratios in growth.items() if not step_name.startswith("networkx")),
            1,
        ),
        "networkx": round(over_networkx, 1),
        "bare": round(bare, 1),
        "parse_s": round(last["parse"], 2),
        "rest_s": round(last["all but parse"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=15, help="runs of each process, after one that warms the caches")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the large programs")
    parser.add_argument("--shape", choices=SHAPES, action="append", help="shape of the large programs (default: all)")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=SIZES, help="additional nodes of the large programs, at least two sizes"
    )
    parser.add_argument("--again", type=int, default=AGAIN, help="minimum number of nodes to compile, for each size")
    options = smoke.parse(parser, runs=1, rounds=1, shape=["chains"], sizes=[10, 20], again=1)
    sizes = options.sizes
    runs = options.runs if options.smoke else max(11, options.runs)
    start, ratio = starts(runs)
    shapes = options.shape or list(SHAPES)
    texts = {(shape, size): program(shape, size) for shape in shapes for size in sizes}
    measured: dict[str, list[dict[int, dict[str, float]]]] = {shape: [] for shape in shapes}
    large = []
    for _ in range(options.rounds):
        for shape in shapes:
            measured[shape].append({size: measure_least(texts[shape, size], size, options.again) for size in sizes})
        large.append(devices())
    figures = {shape: table(shape, rounds) for shape, rounds in measured.items()}
    seconds = statistics.median(large)
    print(f"\nthe page's program on 10,000 devices: {seconds:.2f} s")
    worst = {
        "growth": max(shape_figures["growth"] for shape_figures in figures.values()),
        "networkx": max(shape_figures["networkx"] for shape_figures in figures.values()),
    }
    reached = {"start": round(ratio, 3), **worst, "devices": round(seconds, 3)}
    result = {
        "bench": "compile",
        **reached,
        "bars": BARS,
        "pass": all(reached[name] <= bar for name, bar in BARS.items()),
        "runs": runs,
        "rounds": options.rounds,
        **{f"{key}_ms": round(value * 1e3, 1) for key, value in start.items()},
        "shapes": figures,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
