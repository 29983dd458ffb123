"""What bench/dock.py found, as tables and a picture of docs/performance.md.

Invariant: what stands between the marks `<!-- NAME -->` and `<!-- end -->` of the page is written here, and nothing
else of it.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "performance.md"
PICTURE = DOCS / "performance.svg"
NAMES = {
    "ours": "the dock, a warehouse on each host",
    "ours_one": "the dock, one warehouse",
    "ours_tokens": "the dock, `balance = tokens`",
    "central": "a central Ray actor",
    "tq_one": "TransferQueue, one unit",
    "tq_sharded": "TransferQueue, a unit on each host",
    "verl": "verl, DataProto through the driver",
}
# What the dock has to reach on eight hosts: its seconds over another side's, at most.
BARS = {"central": 1 / 50, "tq_one": 1 / 50, "verl": 1 / 50, "tq_sharded": 1 / 8}


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


def put(mark: str, text: str) -> None:
    """Into the page, between the marks of this name."""
    page = PAGE.read_text()
    written, count = re.subn(
        rf"(<!-- {mark} -->\n).*?(\n<!-- end -->)", lambda m: f"{m[1]}{text}{m[2]}", page, flags=re.DOTALL
    )
    assert count == 1, f"{PAGE} has no place for {mark}"
    PAGE.write_text(written)


def write_rows(found: Mapping[int, Mapping[str, Any]], compute: float, answer: Mapping[str, Any]) -> None:
    """`found`: by hosts and side what each took (`Found`)."""
    most, names = max(found), [*found[max(found)]]
    hosts = [f"{n} host{'s'[: n > 1]}" for n in found]
    seconds = [[NAMES[n], *(f"{1000 * found[h][n].median(0.0):,.0f} ms" for h in found)] for n in names]
    moved = [[NAMES[n], *(f"{statistics.median(found[h][n].bytes[0.0]) / 1e6:,.2f} MB" for h in found)] for n in names]
    parts = [
        "An iteration that computes nothing:",
        table(["", *hosts], seconds),
        "Bytes sent over all links, as `tc -s` counts them:",
        table(["", *hosts], moved),
    ]
    if 1 in found and compute:
        linear = [
            [NAMES[n], *(f"{100 * found[1][n].median(compute) / found[h][n].median(compute):.1f} %" for h in found)]
            for n in names
        ]
        parts += [
            f"Linearity where each iteration computes for {compute:g} s, measured: rows a second on n hosts over n "
            "times those on one:",
            table(["", *hosts], linear),
            f"![Dispatch seconds, and linearity over the seconds that an iteration computes]({PICTURE.name})",
        ]
        draw(found, compute)
    if most == 8 and BARS.keys() <= set(names):
        parts.append(_bars(found[most], answer))
    gates = ", ".join(f"{g['gate']} {g['value']:.3f}{'' if g['holds'] else ' (fails)'}" for g in answer["gates"])
    parts.append(f"Gates of this run: {gates}.")
    put("rows", "\n\n".join(parts))


def _bars(found: Mapping[str, Any], answer: Mapping[str, Any]) -> str:
    ours = found["ours"].median(0.0)
    lines = []
    for name, bar in BARS.items():
        ratio = ours / found[name].median(0.0)
        lines.append([f"seconds over {NAMES[name]}", f"1/{1 / bar:.0f}", f"1/{1 / ratio:.0f}", _holds(ratio <= bar)])
    share = answer["wire_fraction_of_eq4"]
    lines.append(["bytes over equation 4's", "10 %", f"{100 * share:.2f} %", _holds(share < 0.1)])
    if (linear := answer.get("linearity_3s")) is not None:
        lines.append(["linearity with 3 s", "97 %", f"{100 * linear:.1f} %", _holds(linear >= 0.97)])
    return "The dock's bars on eight hosts:\n\n" + table(["", "bar", "here", ""], lines)


def _holds(reached: bool) -> str:
    return "reached" if reached else "missed"


def write_lengths(found: Mapping[int, Mapping[str, Any]], name: str, lengths: Sequence[int]) -> None:
    """Rows of differing lengths, without balance and with it."""
    lines = [
        [
            f"{hosts}",
            NAMES[side],
            f"{1000 * some.median(0.0):,.0f} ms",
            f"{statistics.median(some.bytes[0.0]) / 1e6:,.2f} MB",
            f"{100 * (some.uneven - 1):.1f} %",
        ]
        for hosts, by_side in found.items()
        for side, some in by_side.items()
    ]
    head = ["hosts", "", "an iteration", "sent", "the fullest update share is above the mean by"]
    told = f"mean {statistics.mean(lengths):,.0f}, median {statistics.median(lengths):,.0f}, longest {max(lengths):,}"
    mark = "lengths" if name == "lognormal" else "lengths of a file"
    put(mark, f"Lengths of {len(lengths):,} responses (`{name}`): {told} tokens.\n\n{table(head, lines)}")


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
    said = (
        f"The dock: {times:.1f} times as fast. Its bars are 2 GB/s ({_holds(answer['ours']['gb_s'] >= 2)}) and 5 times "
        f"({_holds(times >= 5)})."
    )
    put("local", table(["", "put", "get", "put and get", "memory over payload"], lines) + f"\n\n{said}")


def draw(found: Mapping[int, Mapping[str, Any]], compute: float) -> None:
    """Curves of (c + seconds on one host) / (c + seconds on the most), points as measured with `compute`."""
    import matplotlib
    import numpy as np

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "dock", "svg.fonttype": "none"}
    from matplotlib import pyplot

    most, names = max(found), [*found[max(found)]]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    over = np.logspace(-1, 2, 200)
    for name in names:
        seconds = {h: by_name[name].median(0.0) for h, by_name in found.items()}
        line = left.plot([*seconds], [*seconds.values()], marker="o", label=NAMES[name])[0]
        right.plot(over, 100 * (over + seconds[1]) / (over + seconds[most]), color=line.get_color())
        measured = found[1][name].median(compute) / found[most][name].median(compute)
        right.plot([compute], [100 * measured], marker="o", color=line.get_color())
    left.set(xlabel="hosts", ylabel="seconds of an iteration", yscale="log", xticks=[*found])
    right.set(xlabel="seconds that an iteration computes", xscale="log", ylim=(0, 105))
    right.set_ylabel(f"linearity on {most} hosts, %")
    figure.legend(loc="lower center", ncols=3, fontsize="small", bbox_to_anchor=(0.5, -0.16))
    figure.savefig(PICTURE, bbox_inches="tight", metadata={"Date": None})
