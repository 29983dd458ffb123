"""Tables and a picture of bench/dock.py's results for docs/guides/performance.md.

Invariant: only the text between the marks `<!-- NAME -->` and `<!-- end -->` of the page is written here.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "guides" / "performance.md"
PICTURE = DOCS / "images" / "performance.svg"
NAMES = {
    "ours": "the dock, a warehouse on each host",
    "ours_one": "the dock, one warehouse",
    "ours_tokens": "the dock, `balance = tokens`",
    "central": "a central Ray actor",
    "tq_one": "TransferQueue, one unit",
    "tq_sharded": "TransferQueue, a unit on each host",
    "verl": "verl, DataProto through the driver",
}
# Bars of the dock on eight hosts: its seconds over those of another side, at most.
BARS = {"central": 1 / 50, "tq_one": 1 / 50, "verl": 1 / 50, "tq_sharded": 1 / 8}


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *lines))


def put(mark: str, text: str) -> None:
    """Put a text into the page, between the marks of this name."""
    page = PAGE.read_text()
    written, count = re.subn(
        rf"(<!-- {mark} -->\n).*?(\n<!-- end -->)", lambda match: f"{match[1]}{text}{match[2]}", page, flags=re.DOTALL
    )
    assert count == 1, f"{PAGE} has no place for {mark}"
    PAGE.write_text(written)


def write_rows(figures: Mapping[int, Mapping[str, Any]], compute: float, answer: Mapping[str, Any]) -> None:
    """Write the tables; `figures` are by number of hosts and side (`Found`)."""
    most = max(figures)
    names = [*figures[most]]
    hosts = [f"{count} host{'s'[: count > 1]}" for count in figures]
    seconds = [
        [NAMES[side], *(f"{1000 * figures[host_count][side].median(0.0):,.0f} ms" for host_count in figures)]
        for side in names
    ]
    moved = [
        [
            NAMES[side],
            *(f"{statistics.median(figures[host_count][side].bytes[0.0]) / 1e6:,.2f} MB" for host_count in figures),
        ]
        for side in names
    ]
    parts = [
        "An iteration that computes nothing:",
        table(["", *hosts], seconds),
        "Bytes sent over all links, as `tc -s` counts them:",
        table(["", *hosts], moved),
    ]
    if 1 in figures and compute:
        linear = [
            [
                NAMES[side],
                *(
                    f"{100 * figures[1][side].median(compute) / figures[host_count][side].median(compute):.1f} %"
                    for host_count in figures
                ),
            ]
            for side in names
        ]
        parts += [
            f"Linearity where each iteration computes for {compute:g} s, measured: rows a second on n hosts over n "
            "times those on one:",
            table(["", *hosts], linear),
            f"![Dispatch seconds, and linearity over the seconds that an iteration computes](../images/{PICTURE.name})",
        ]
        draw(figures, compute)
    if most == 8 and BARS.keys() <= set(names):
        parts.append(_bars(figures[most], answer))
    gates = ", ".join(
        f"{gate['gate']} {gate['value']:.3f}{'' if gate['holds'] else ' (fails)'}" for gate in answer["gates"]
    )
    parts.append(f"Gates of this run: {gates}.")
    put("rows", "\n\n".join(parts))


def _bars(figures: Mapping[str, Any], answer: Mapping[str, Any]) -> str:
    ours = figures["ours"].median(0.0)
    lines = []
    for name, bar in BARS.items():
        ratio = ours / figures[name].median(0.0)
        lines.append([f"seconds over {NAMES[name]}", f"1/{1 / bar:.0f}", f"1/{1 / ratio:.0f}", _holds(ratio <= bar)])
    share = answer["wire_fraction_of_eq4"]
    lines.append(["bytes over equation 4's", "10 %", f"{100 * share:.2f} %", _holds(share < 0.1)])
    if (linear := answer.get("linearity_3s")) is not None:
        lines.append(["linearity with 3 s", "97 %", f"{100 * linear:.1f} %", _holds(linear >= 0.97)])
    return "The dock's bars on eight hosts:\n\n" + table(["", "bar", "here", ""], lines)


def _holds(reached: bool) -> str:
    return "reached" if reached else "missed"


def write_lengths(figures: Mapping[int, Mapping[str, Any]], name: str, lengths: Sequence[int]) -> None:
    """Write the table of rows of different lengths, without and with balance."""
    lines = [
        [
            f"{hosts}",
            NAMES[side],
            f"{1000 * side_figures.median(0.0):,.0f} ms",
            f"{statistics.median(side_figures.bytes[0.0]) / 1e6:,.2f} MB",
            f"{100 * (side_figures.uneven - 1):.1f} %",
        ]
        for hosts, by_side in figures.items()
        for side, side_figures in by_side.items()
    ]
    header = ["hosts", "", "an iteration", "sent", "the fullest update share is above the mean by"]
    statistics_text = (
        f"mean {statistics.mean(lengths):,.0f}, median {statistics.median(lengths):,.0f}, longest {max(lengths):,}"
    )
    mark = "lengths" if name == "lognormal" else "lengths of a file"
    put(mark, f"Lengths of {len(lengths):,} responses (`{name}`): {statistics_text} tokens.\n\n{table(header, lines)}")


def write_local(answer: Mapping[str, Any]) -> None:
    lines = [
        [
            NAMES[name].split(",")[0],
            f"{answer[name]['put_ms']:.1f} ms",
            f"{answer[name]['get_ms']:.1f} ms",
            f"{answer[name]['gb_s']:.2f} GB/s",
            f"{answer[name]['memory_over_payload']:.2f}",
        ]
        for name in ("ours", "tq_one")
    ]
    times = answer["over_transferqueue"]
    summary = (
        f"The dock: {times:.1f} times as fast. Its bars are 2 GB/s ({_holds(answer['ours']['gb_s'] >= 2)}) and 5 times "
        f"({_holds(times >= 5)})."
    )
    put("local", table(["", "put", "get", "put and get", "memory over payload"], lines) + f"\n\n{summary}")


def draw(figures: Mapping[int, Mapping[str, Any]], compute: float) -> None:
    """Draw (c + seconds on one host) / (c + seconds on most), with measured points."""
    import matplotlib
    import numpy as np

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "dock", "svg.fonttype": "none"}
    from matplotlib import pyplot

    most = max(figures)
    names = [*figures[most]]
    figure, (left_axes, right_axes) = pyplot.subplots(1, 2, figsize=(11, 4))
    compute_seconds = np.logspace(-1, 2, 200)
    for name in names:
        seconds = {host_count: by_name[name].median(0.0) for host_count, by_name in figures.items()}
        line = left_axes.plot([*seconds], [*seconds.values()], marker="o", label=NAMES[name])[0]
        right_axes.plot(
            compute_seconds,
            100 * (compute_seconds + seconds[1]) / (compute_seconds + seconds[most]),
            color=line.get_color(),
        )
        measured = figures[1][name].median(compute) / figures[most][name].median(compute)
        right_axes.plot([compute], [100 * measured], marker="o", color=line.get_color())
    left_axes.set(xlabel="hosts", ylabel="seconds of an iteration", yscale="log", xticks=[*figures])
    right_axes.set(xlabel="seconds that an iteration computes", xscale="log", ylim=(0, 105))
    right_axes.set_ylabel(f"linearity on {most} hosts, %")
    figure.legend(loc="lower center", ncols=3, fontsize="small", bbox_to_anchor=(0.5, -0.16))
    figure.savefig(PICTURE, bbox_inches="tight", metadata={"Date": None})
