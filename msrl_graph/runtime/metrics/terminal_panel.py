"""What those who watch a run are told, as a terminal shows it.

Invariant: it shows facts of run_status.py and has none of its own; text of a program steers no terminal (`shown`).
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

from ...diagnostics.terminal_text import shown
from ...emit.humanize import duration, size
from .run_status import RunSnapshot

WAITS = 4  # waits that a terminal has room for
SPARKS = "▁▂▃▄▅▆▇█"
LONGEST = 48  # marks of a curve


def panel(
    now: RunSnapshot, progress: RenderableType, curve: Callable[[str], Mapping[str, Any]], width: int
) -> RenderableType:
    parts: list[RenderableType] = [progress]
    if now.figures:
        units = ("tokens/s", "s")  # which stand behind their figures
        parts.append(
            Text("  ").join(
                Text.assemble(v, (f" {n}", "dim")) if n in units else Text.assemble((f"{shown(n)} ", "dim"), v)
                for n, v in now.figures
            )
        )
    parts += _curves(now, curve, width)
    if now.task:
        parts += [Text(), _states(now)]
    if now.hosts:
        parts += [Text(), _hosts(now)]
    for w in now.waits[:WAITS]:
        words = f"{w.who} waits {duration(w.seconds)} in {w.task} for {w.missing}"
        parts.append(Text(shown(words), "yellow" if w.seconds > 10 else "dim", no_wrap=True, overflow="ellipsis"))
    if len(now.waits) > WAITS:
        parts.append(Text(f"and {len(now.waits) - WAITS} more waits", "dim"))
    return Group(*parts)


def _states(now: RunSnapshot) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(shown(now.task), no_wrap=True)
    table.add_column("", width=24)
    for name in ("done", "handed", "rows"):
        table.add_column(name, justify="right", no_wrap=True)
    for s in now.states:
        called = Text(f"{'▸' if s.runs else ' '} {shown(s.node)}", "bold cyan" if s.runs else "")
        table.add_row(called, ProgressBar(s.of or 1, s.done, 24), f"{s.done:,}", f"{s.handed:,}", f"{s.of:,}")
    return table


def _hosts(now: RunSnapshot) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("hosts", no_wrap=True)
    for name in ("warehouse", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("of processes", overflow="ellipsis", no_wrap=True)
    for h in now.hosts:
        held = "-" if h.held is None else size(h.held)
        processes = ", ".join(f"{p.name} {size(p.memory)}" for p in h.processes if p.memory)
        table.add_row(f"  host {h.number}", held, f"{size(h.used)} of {size(h.total)}", shown(processes))
    return table


def _curves(now: RunSnapshot, curve: Callable[[str], Mapping[str, Any]], width: int) -> list[RenderableType]:
    """Of the first figure that is a metric, and the loss."""
    names = dict.fromkeys([n for n, _ in now.figures if n in now.curves][:2])
    found: list[RenderableType] = []
    for name in names:
        values = [v for _, v in curve(name)["points"] if math.isfinite(v)]
        if len(values) > 1:
            low = min(values)
            high = max(values)
            line = _sparks(values, min(LONGEST, max(8, width - 40)))
            words = (f"  {low:.3g} to {high:.3g}", "dim")
            found.append(Text.assemble((f"{shown(name):<10.10} ", "dim"), (line, "cyan"), words))
    return found


def _sparks(values: list[float], width: int) -> str:
    """A curve as marks of eight heights, means of neighbours where it is longer."""
    low = min(values)
    high = max(values)
    count = min(width, len(values))
    cuts = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    return "".join(SPARKS[int((len(SPARKS) - 1) * (m - low) / ((high - low) or 1) + 0.5)] for m in means)
