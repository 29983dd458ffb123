"""How long compiling takes: of the page's program beside the import of two libraries, of large programs beside
networkx, and of the page's program for 10,000 devices.

Usage: python bench/compile.py [--runs N] [--rounds N] [--shape NAME]. What is compared is interleaved. Start: medians
of whole processes of `msrl-compile --check` and of `import lark, networkx`. Large programs: the page's with 100, 1,000
and 10,000 more nodes that are functions, step by step in this process, with empty caches, in seconds of the processor,
the least of all runs: what else the machine does can only add to them. networkx: the same graph, as
`Graph.to_networkx()` makes it, sorted by dependency, ties by name; `bare` is a DiGraph of the same names and edges
without data, sorted in any such order. The collector of cycles rests in both, as it does in every compile. The last
line is one JSON object; the bars stand in `BARS`.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
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

from msrl_graph.checks import check
from msrl_graph.compiler.pipeline import CHECKS, PASSES, context, translate
from msrl_graph.compiler.sources import ProgramSource
from msrl_graph.dsl.lower import lower
from msrl_graph.ir.graph import Graph
from msrl_graph.ir.plan import Plan

PROGRAM = Path(__file__).parent.parent / "tests" / "programs" / "grpo_page.rlg"
PAGE = PROGRAM.read_text(encoding="utf-8")
ALGORITHM, DEPLOY = PAGE.split("cluster pod", 1)
# A process beside the imports; a step at ten times the nodes; all but parsing beside networkx; seconds for 10,000
# devices.
BARS = {"start": 3.0, "growth": 15.0, "networkx": 20.0, "devices": 3.0}
SIZES = (100, 1_000, 10_000)
AGAIN = 3_000
COMMANDS = {
    "compile": [sys.executable, "-m", "msrl_graph.cli", str(PROGRAM), "--check"],
    "imports": [sys.executable, "-c", "import lark, networkx"],
}


def program(shape: str, nodes: int) -> str:
    """The page's program with so many nodes more."""
    body = "\n".join(SHAPES[shape](nodes))
    columns = "\n".join(f"    c{i} : f32" for i in range(nodes))
    deploy = DEPLOY.replace("deploy grpo", "deploy big")
    return (
        f"{ALGORITHM}\nalgorithm big extends grpo {{\n  columns {{\n{columns}\n  }}\n{body}\n}}\n\ncluster pod{deploy}"
    )


def chains(nodes: int) -> list[str]:
    """Chains of ten, each of which begins at the one before."""
    lines = []
    for i in range(nodes):
        before = 0 if i == 0 else i if i % 10 else i - 9  # of those counted from 1, 0 is the reward
        column, node = (f"c{before - 1}", f"host.f{before - 1}") if before else ("reward", "host.reward")
        lines += [f"  node host.f{i}({column}) -> c{i} {{ call = shuffle(score = {column}), per = prompt }}"]
        lines += [f"  {node} -> host.f{i}"]
    return lines


def skips(nodes: int) -> list[str]:
    """One long chain, in which each reads what the one before the last wrote: an edge never leads there from the
    writer."""
    lines = []
    for i in range(nodes):
        column = f"c{i - 2}" if i > 1 else "reward"
        node = f"host.f{i - 1}" if i else "host.reward"
        lines += [f"  node host.f{i}({column}) -> c{i} {{ call = shuffle(score = {column}), per = prompt }}"]
        lines += [f"  {node} -> host.f{i}"]
    return lines


def fan(nodes: int) -> list[str]:
    """All side by side, from one node to one node that reads all that they write."""
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


def timed(do: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the processor for a call without the collector of cycles, and what it gives."""
    gc.collect()
    gc.disable()
    began = time.process_time()
    found = do()
    seconds = time.process_time() - began
    gc.enable()
    return seconds, found


def least(text: str, nodes: int, again: int) -> dict[str, float]:
    """The least of each figure, of some runs where they are short."""
    runs = [steps(text) for _ in range(max(1, again // nodes))]
    return {name: min(run[name] for run in runs) for name in runs[0]}


def steps(text: str) -> dict[str, float]:
    """Seconds of each step; of all but parsing in one go, as a compile does it; and of networkx."""
    for cached in [c for c in gc.get_objects() if isinstance(c, functools._lru_cache_wrapper)]:
        cached.cache_clear()
    source = ProgramSource("bench.rlg", text, Path())
    found: dict[str, float] = {}
    found["parse"], result = timed(lambda: translate(source, until="ast"))
    found["lower"], lowered = timed(lambda: lower(result.tree, context(source)))
    found["checks"], _ = timed(lambda: check(lowered.graph, lowered.library, lowered.warnings))
    parsed = ProgramSource(source.name, text, Path(), result.tree)
    found["all but parse"], result = timed(lambda: translate(parsed))
    plan = Plan(lowered.graph, lowered.cluster, lowered.deploy)
    verify = 0.0
    for step in PASSES:
        found[step.name], plan = timed(lambda step=step, plan=plan: step.apply(plan))  # type: ignore[misc]
        # What it brings to light in the program, and what it promises.
        told = CHECKS.get(step.name, lambda plan: [])
        both = functools.partial(lambda step, told, plan: (told(plan), [*step.verify(plan)]), step, told, plan)
        verify += timed(both)[0]
    found["verify"] = verify
    graph = result.graph
    return found | {"networkx": timed(lambda: sort(graph))[0], "networkx, bare": timed(lambda: sort_bare(graph))[0]}


def sort(graph: Graph) -> list[str]:
    built = graph.to_networkx()
    built.remove_edges_from([(e.src, e.dst, e.kind) for e in graph.reshards()])
    return list(nx.lexicographical_topological_sort(built))


def sort_bare(graph: Graph) -> list[str]:
    built: nx.DiGraph[str] = nx.DiGraph()
    for node in graph.nodes:
        built.add_node(node.name)
    for edge in graph.samples():
        built.add_edge(edge.src, edge.dst)
    return list(nx.topological_sort(built))


def devices() -> float:
    """Seconds for the page's program on 10,000 devices, with layouts as wide."""
    text = (
        PAGE.replace("nodes            = 2", "nodes            = 1250")
        .replace("dp = 2", "dp = 1250")
        .replace("dp = 4", "dp = 2500")
    )
    text = text.replace("prompts      = 256", "prompts      = 1250")
    for cached in [c for c in gc.get_objects() if isinstance(c, functools._lru_cache_wrapper)]:
        cached.cache_clear()
    seconds, result = timed(lambda: translate(ProgramSource("bench.rlg", text, Path())))
    assert result.plan.cluster.devices == 10_000
    return seconds


def starts(runs: int) -> tuple[dict[str, float], float]:
    """Median seconds of the two processes, and of each run's ratio to its neighbour: what else the machine does then
    weighs on both."""
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for i in range(runs + 1):
        for name, command in COMMANDS.items():
            began = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            if i:
                seconds[name].append(time.perf_counter() - began)
    ratio = statistics.median(a / b for a, b in zip(seconds["compile"], seconds["imports"], strict=True))
    for name, values in seconds.items():
        print(
            f"{name:<8} median {statistics.median(values) * 1e3:7.1f} ms, least {min(values) * 1e3:7.1f} ms, "
            f"{runs} runs"
        )
    return {name: statistics.median(values) for name, values in seconds.items()}, ratio


def table(shape: str, rounds: list[dict[int, dict[str, float]]]) -> dict[str, float]:
    """Prints milliseconds by step and size, and how each grows; returns the headline figures of a shape."""
    sizes = [*rounds[0]]
    took = {n: {s: min(r[n][s] for r in rounds) for s in rounds[0][n]} for n in sizes}
    growth = {s: [took[b][s] / took[a][s] for a, b in pairwise(sizes)] for s in took[sizes[0]]}
    print(f"\n{shape:<16}" + "".join(f"{n:>9,}" for n in sizes) + "   ms; times of the size before")
    for step, ratios in growth.items():
        print(
            f"{step:<16}"
            + "".join(f"{took[n][step] * 1e3:9.1f}" for n in sizes)
            + "   "
            + "".join(f"{r:7.1f}" for r in ratios)
        )
    last = took[sizes[-1]]
    worst = max((s for s in growth if not s.startswith("networkx")), key=lambda s: growth[s][-1])
    beside, bare = (last["all but parse"] / last[n] for n in ("networkx", "networkx, bare"))
    print(
        f"all but parse, in times of networkx: {beside:.1f}; of a bare DiGraph: {bare:.1f}; the step that grows "
        f"most: {worst}"
    )
    return {
        "growth": round(max(max(r) for s, r in growth.items() if not s.startswith("networkx")), 1),
        "networkx": round(beside, 1),
        "bare": round(bare, 1),
        "parse_s": round(last["parse"], 2),
        "rest_s": round(last["all but parse"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=15, help="of each process, after one that warms the caches")
    parser.add_argument("--rounds", type=int, default=5, help="of the large programs")
    parser.add_argument("--shape", choices=SHAPES, action="append", help="of the large programs, else all")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=SIZES, help="nodes more of the large programs, at least two"
    )
    parser.add_argument("--again", type=int, default=AGAIN, help="nodes that are compiled at least, of each size")
    options = smoke.parse(parser, runs=1, rounds=1, shape=["chains"], sizes=[10, 20], again=1)
    sizes = options.sizes
    runs = options.runs if options.smoke else max(11, options.runs)
    start, ratio = starts(runs)
    shapes = options.shape or list(SHAPES)
    texts = {(shape, n): program(shape, n) for shape in shapes for n in sizes}
    found: dict[str, list[dict[int, dict[str, float]]]] = {shape: [] for shape in shapes}
    large = []
    for _ in range(options.rounds):
        for shape in shapes:
            found[shape].append({n: least(texts[shape, n], n, options.again) for n in sizes})
        large.append(devices())
    figures = {shape: table(shape, rounds) for shape, rounds in found.items()}
    seconds = statistics.median(large)
    print(f"\nthe page's program on 10,000 devices: {seconds:.2f} s")
    worst = {
        "growth": max(f["growth"] for f in figures.values()),
        "networkx": max(f["networkx"] for f in figures.values()),
    }
    reached = {"start": round(ratio, 3), **worst, "devices": round(seconds, 3)}
    result = {
        "bench": "compile",
        **reached,
        "bars": BARS,
        "pass": all(reached[name] <= bar for name, bar in BARS.items()),
        "runs": runs,
        "rounds": options.rounds,
        **{f"{k}_ms": round(v * 1e3, 1) for k, v in start.items()},
        "shapes": figures,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
