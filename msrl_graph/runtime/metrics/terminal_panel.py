"""Panel that shows a run on a terminal, for users who watch the run.

Invariant: all values come from run_status.py. Text from a program cannot send control characters to the terminal
(`make_printable`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ...diagnostics.quantities import duration, size
from ...diagnostics.terminal_text import make_printable
from .run_status import RunSnapshot

WAITS = 4  # most waits that are shown
SPARKS = "▁▂▃▄▅▆▇█"
LONGEST = 48  # most marks of a curve


def panel(
    now: RunSnapshot, progress: RenderableType, curve: Callable[[str], Mapping[str, Any]], width: int
) -> RenderableType:
    parts: list[RenderableType] = [progress]
    if now.figures:
        units = ("tokens/s", "s")  # which follow their figures
        parts.append(
            Text("  ").join(
                Text.assemble(value, (f" {name}", "dim"))
                if name in units
                else Text.assemble((f"{make_printable(name)} ", "dim"), value)
                for name, value in now.figures
            )
        )
    parts += _curves(now, curve, width)
    if now.task:
        parts += [Text(), _states(now)]
    if now.hosts:
        parts += [Text(), _hosts(now)]
    for wait in now.waits[:WAITS]:
        words = f"{wait.who} waits {duration(wait.seconds)} in {wait.task} for {wait.missing}"
        parts.append(
            Text(make_printable(words), "yellow" if wait.seconds > 10 else "dim", no_wrap=True, overflow="ellipsis")
        )
    if len(now.waits) > WAITS:
        parts.append(Text(f"and {len(now.waits) - WAITS} more waits", "dim"))
    return Group(*parts)


def _states(now: RunSnapshot) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(make_printable(now.task), no_wrap=True)
    table.add_column("", width=24)
    for name in ("done", "handed", "rows"):
        table.add_column(name, justify="right", no_wrap=True)
    for state in now.states:
        label = Text(f"{'▸' if state.runs else ' '} {make_printable(state.node)}", "bold cyan" if state.runs else "")
        table.add_row(
            label, ProgressBar(state.of or 1, state.done, 24), f"{state.done:,}", f"{state.handed:,}", f"{state.of:,}"
        )
    return table


def _hosts(now: RunSnapshot) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("hosts", no_wrap=True)
    for name in ("warehouse", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("of processes", overflow="ellipsis", no_wrap=True)
    for host in now.hosts:
        warehouse = "-" if host.held is None else size(host.held)
        processes = ", ".join(f"{process.name} {size(process.memory)}" for process in host.processes if process.memory)
        table.add_row(
            f"  host {host.number}", warehouse, f"{size(host.used)} of {size(host.total)}", make_printable(processes)
        )
    return table


def _curves(now: RunSnapshot, curve: Callable[[str], Mapping[str, Any]], width: int) -> list[RenderableType]:
    """Draw the curves of the first two main figures that have a curve.

    `now.figures` are the main figures of the last iteration. `curve` returns the curve of a metric.
    """
    names = dict.fromkeys([figure_name for figure_name, _ in now.figures if figure_name in now.curves][:2])
    curves: list[RenderableType] = []
    for name in names:
        values = [value for _, value in curve(name)["points"] if math.isfinite(value)]
        if len(values) > 1:
            low = min(values)
            high = max(values)
            line = _sparks(values, min(LONGEST, max(8, width - 40)))
            words = (f"  {low:.3g} to {high:.3g}", "dim")
            curves.append(Text.assemble((f"{make_printable(name):<10.10} ", "dim"), (line, "cyan"), words))
    return curves


def _sparks(values: list[float], width: int) -> str:
    """Draw a curve as characters of eight heights.

    If the curve has more values than `width`, each character shows the mean of several neighboring values.
    """
    low = min(values)
    high = max(values)
    count = min(width, len(values))
    cuts = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(cuts)]
    return "".join(SPARKS[int((len(SPARKS) - 1) * (mean - low) / ((high - low) or 1) + 0.5)] for mean in means)
