"""Figures of MindSpeed RL (arXiv:2507.19017) next to planner and simulation.

Usage: python bench/paper.py [--smoke]. The programs are in examples/paper/paper.rlg; every assumption is printed. All
use the constants of every plan; none is tuned to meet a figure. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

import smoke
from equations import GIB, MIB, central_bytes, dispatch_seconds, redundant_bytes
from rich.console import Console
from rich.table import Table

from msrl_graph import compile, simulate
from msrl_graph.hardware.cluster import SHARES
from msrl_graph.ir.plan import Plan
from msrl_graph.model.models import load
from msrl_graph.sharding.layout import Layout, Side
from msrl_graph.sharding.redistribute import count_left_behind

PROGRAM = Path(__file__).parent.parent / "examples" / "paper" / "paper.rlg"
ABLATED = "  dock { mode = central }\n  reshard { mode = naive }\n"
# The paper states no lengths. Reasoning models of this size have a long tail, cut at 8K: the median is a quarter of the
# bound.
LENGTHS = "lognormal(2048, 0.8)"
STRAGGLERS = "1% x1.5"
AXES = ("tp", "cp", "pp", "dp", "ep", "etp")
K = 1024
# G, N, PL, n, SL, M; TCV in GiB, seconds at 100 MiB/s and at 1 GiB/s, as the paper prints them.
TABLE_1 = [
    ((256, 8, 2 * K, 5, 8 * K, 3), ("0.96", "9.92", "0.97")),
    ((256, 16, 2 * K, 5, 16 * K, 3), ("3.81", "39.0", "3.81")),
    ((K, 16, 2 * K, 5, 16 * K, 3), ("15.2", "156.1", "15.2")),
    ((K, 32, 4 * K, 8, 32 * K, 5), ("97.0", "993.3", "97.0")),
    ((4 * K, 32, 4 * K, 8, 32 * K, 5), ("388.0", "3.9K", "388.0")),
    ((8 * K, 64, 4 * K, 8, 64 * K, 5), ("3.1K", "31K", "3.1K")),
]
console = Console(width=120)


def plan(deploy: str, more: str = "", nodes: int = 0, **sets: int) -> Plan:
    """Return a deploy of the paper's program with more statements and other hosts."""
    text = PROGRAM.read_text(encoding="utf-8")
    before, _, rest = text.partition(f" as {deploy} {{")
    body, brace, tail = rest.partition("\n}\n")
    text = f"{before} as {deploy} {{{body}\n{more}{brace}{tail}"
    if nodes:
        text = text.replace("nodes            = 2\n", f"nodes            = {nodes}\n")
    return compile(PROGRAM, text=text, deploy=deploy, sets={key: str(value) for key, value in sets.items()})


def seconds(planned: Plan, lengths: str = "", stragglers: str = "") -> float:
    """Return the seconds of an iteration.

    This is the estimate with every row at its bound, or the mean of three simulated iterations.
    """
    if not lengths:
        assert planned.estimate is not None
        return planned.estimate.iteration_seconds.value
    return simulate(planned, iterations=3, lengths=lengths, stragglers=stragglers, seed=0).seconds


def show_table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]], *why: str) -> None:
    console.print(title, style="bold", highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index and column not in ("source", "where from") else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for line in why:
        console.print(f"  {line}", highlight=False, soft_wrap=True)
    console.print()


def format_like(value: float, like: str) -> str:
    """Format a figure like the paper, which truncates some and rounds others."""
    number = like.removesuffix("K")
    kilo = like.endswith("K")
    digits = len(number.partition(".")[2])
    return f"{value / (1000 if kilo else 1):.{digits}f}{'K' if kilo else ''}"


def table_1() -> bool:
    rows = []
    agree = True
    for sizes, paper in TABLE_1:
        g, n_responses, pl, n, sl, m = sizes
        volume = central_bytes(g, n_responses, 4, pl, n, sl, m)
        ours = (volume / GIB, dispatch_seconds(volume, 100 * MIB), dispatch_seconds(volume, GIB))
        texts = tuple(format_like(figure, paper_figure) for figure, paper_figure in zip(ours, paper, strict=True))
        for text, like in zip(texts, paper, strict=True):
            unit = 10 ** -len(like.removesuffix("K").partition(".")[2])
            agree &= abs(float(text.removesuffix("K")) - float(like.removesuffix("K"))) < 1.01 * unit
        rows.append(
            (
                " ".join(str(size) if size < K else f"{size // K}K" for size in sizes),
                " / ".join(paper),
                " / ".join(texts),
            )
        )
    show_table(
        "Table 1: G N PL n SL M",
        ("", "paper: TCV, T100, T1K", "here"),
        rows,
        "within one unit of the last digit printed" if agree else "",
    )
    return agree


def equation_3() -> float:
    """Compute equation 3 for Qwen3-MoE-30B on figure 3's four devices, in bf16.

    The layouts are TP2 EP2 DP2 to TP1 EP4 DP4.
    """
    model = load("qwen3-30b-a3b", Path())
    experts = 2 * sum(tensor.elements for tensor in model.weights if tensor.experts)
    divided = 2 * sum(tensor.elements for tensor in model.weights if not tensor.experts and tensor.tp_dim >= 0)
    closed = redundant_bytes(gdp=4, tw=divided, utp=2, ew=experts, gep=4)
    # The figure's ranks hold E1 E2, E1 E2, E3 E4, E3 E4.
    derived = 2 * count_left_behind(model.kinds, Side(Layout(tp=2, dp=2, ep=2, inner=2)), Side(Layout(dp=4, ep=4)))
    rows = [("redundant memory of Qwen3-MoE-30B", "> 60 GB", f"{closed / 1e9:.1f} GB", f"{derived / 1e9:.1f} GB")]
    why = (
        "the paper names no layout: this is figure 3's shape on 4 devices; derived from the two layouts, tensor "
        "by tensor, beside it"
    )
    show_table("Equation 3", ("", "paper", "here, closed form", "derived"), rows, why)
    return closed / 1e9


def figure_7(models: tuple[tuple[str, str], ...]) -> dict[str, float]:
    rows = []
    ratios = {}
    for deploy, name in models:
        full = plan(deploy)
        layouts = "".join(
            (f"  layout {node} {{ {', '.join(f'{axis} = {getattr(placement.layout, axis)}' for axis in AXES)} }}\n")
            for node in ("actor.update", "actor.generate")
            if node not in full.deploy.layouts and (placement := full.placement(node))
        )
        ablated = plan(deploy, layouts + ABLATED)
        times = [[seconds(planned, *more) for planned in (full, ablated)] for more in ((), (LENGTHS, STRAGGLERS))]
        ratios[deploy] = times[0][1] / times[0][0]
        cells = [
            f"{full_seconds:,.0f} / {ablated_seconds:,.0f} s ({ablated_seconds / full_seconds:.3f}x)"
            for full_seconds, ablated_seconds in times
        ]
        rows.append(
            (name, str(full.placement("actor.update").layout), str(full.placement("actor.generate").layout), *cells)
        )
    show_table(
        "Figure 7: 16 devices, G 256, N 16, PL 2K, SL 8K; MSRL / MSRLP (central dock, naive resharding)",
        ("", "update", "generate", "at the bounds", f"{LENGTHS}, {STRAGGLERS}"),
        rows,
        (
            "paper: 1.42 to 3.97 times over OpenRLHF, VeRL and MSRLP together; the share of MSRLP is in a picture "
            "without figures."
        ),
        (
            "Here only the two mechanisms differ. On two hosts the dock halves what crosses the network, and naive "
            "resharding leaves less room"
        ),
        (
            "for the KV cache, which costs only where it was full. Most of 1.42 to 3.97 is of kernels and engines, "
            "which are the same here."
        ),
    )
    return ratios


def figure_9(hosts: tuple[int, ...]) -> dict[str, float]:
    rows = []
    last = {}
    for name, more, how in (
        ("MSRL", "", ("", "")),
        ("MSRL", "", (LENGTHS, "")),
        ("MSRL", "", (LENGTHS, STRAGGLERS)),
        ("MSRLB", "  dock { mode = central }\n", ("", "")),
        ("MSRLB", "  dock { mode = central }\n", (LENGTHS, "")),
    ):
        layouts = "  layout actor.update { tp = 4 }\n  layout actor.generate { tp = 2 }\n"
        times = [seconds(plan("dense7", layouts + more, nodes=count, prompts=64 * count), *how) for count in hosts]
        linear = [times[0] / duration for duration in times]
        key = f"{name}, {', '.join(filter(None, how)) or 'at the bounds'}"
        last[key] = linear[-1]
        rows.append((key, *(f"{100 * value:.1f} %" for value in linear)))
    rows.append(("paper: MSRL, MSRLB, VeRL", *[""] * (len(hosts) - 1), "81.1, 61.9, 40.4 %"))
    show_table(
        "Figure 9: linearity, 64 prompts a host",
        ("", *(f"{8 * count} devices" for count in hosts)),
        rows,
        "the paper names neither model nor layouts nor lengths: here Qwen2.5-7B, TP4 to TP2, N 16, PL 2K, SL 8K.",
        (
            "At the bounds little grows with the hosts but gradients' exchange; with a tail, the longest of more "
            "rows is longer. The loss that"
        ),
        (
            "the paper measured is of the size that slow devices make: one in a hundred, which from 100 devices on "
            "is one that all wait for."
        ),
        (
            "The central buffer's time grows with the hosts. Serialisation, which the paper names for it, is not in "
            "the model."
        ),
    )
    return last


def figure_10() -> float:
    edge = plan("dense32").reshards[0]
    released = edge.released_bytes_per_device / 1e9
    show_table(
        "Figure 10: Qwen2.5-32B, TP8DP2 to TP4DP4",
        ("", "paper", "here"),
        [("released a device", "8 GB", f"{released:.2f} GB")],
    )
    return released


def figure_11() -> dict[str, float]:
    planned = plan("r1")
    tokens = 384 * 32 * 3 * K / 384
    rates = {
        "bounds": tokens / seconds(planned),
        "drawn": tokens / seconds(planned, "lognormal(1024, 0.7)", STRAGGLERS),
    }
    cells = (f"{rates['bounds']:.0f}", f"{rates['drawn']:.0f}")
    edge = planned.reshards[0]
    moved = sum(step.bytes for step in edge.steps if "by bucket" in step.name)
    show_table(
        "Figure 11: DeepSeek-R1-671B on 384 devices, TP4 PP6 EP16 to TP2 DP192 EP64; tokens a second a device (eq. 5)",
        ("", "paper", "at the bounds", f"lognormal(1024, 0.7), {STRAGGLERS}"),
        [("throughput", "200 to 250", *cells)],
        "eq. 5 counts every row at its bound, however long it was: shorter rows look faster.",
        f"resharding: {moved / 1e9:.1f} GB a device, {sum(step.seconds.value for step in edge.steps):.2f} s, "
        f"{edge.released_bytes_per_device / 1e9:.2f} GB released a device.",
    )
    return {**rates, "reshard_gb": moved / 1e9, "reshard_s": sum(step.seconds.value for step in edge.steps)}


def assumptions() -> None:
    pod = plan("dense32").cluster
    figures = [
        ("FLOP/s, bf16", pod.device.flops["bf16"]),
        ("memory", pod.device.memory),
        ("memory bandwidth", pod.device.memory_bandwidth),
    ]
    figures += [
        ("link within a host", pod.device.device_link),
        ("host link", pod.device.host_link),
        ("network", pod.network),
    ]
    figures += [("fabric", pod.device.fabric)] if pod.device.fabric else []
    figures += [("kernel", pod.device.launch), ("collective", pod.device.latency)]
    rows = [(name, f"{figure.value:.3g}", figure.source, figure.basis) for name, figure in figures]
    rows += [
        (f"reached of {name}", f"{figure.value:g}", figure.source, figure.basis) for name, figure in SHARES.items()
    ]
    why = (
        "gradients' exchange, pipelines' sends and experts' all-to-alls do not overlap with computing; Python "
        "functions take no time"
    )
    show_table("Assumptions, the same for all", ("", "bytes/s, FLOP/s or s", "source", "where from"), rows, why)


MODELS = (("dense7", "Qwen2.5-7B"), ("dense32", "Qwen2.5-32B"), ("moe30", "Qwen3-MoE-30B"))
HOSTS = (1, 2, 4, 8, 16, 24)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.set_defaults(models=MODELS, hosts=HOSTS)
    options = smoke.parse(parser, models=MODELS[:1], hosts=HOSTS[:2])
    result = {
        "bench": "paper",
        "table_1": table_1(),
        "equation_3_gb": round(equation_3(), 1),
        "figure_7": {key: round(value, 3) for key, value in figure_7(options.models).items()},
        "figure_9": {key: round(value, 3) for key, value in figure_9(options.hosts).items()},
        "figure_10_gb": round(figure_10(), 2),
        "figure_11": {key: round(value, 1) for key, value in figure_11().items()},
    }
    assumptions()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
