"""What text for a person is written on: a page of headings, lines and tables; and how figures read there.

Invariant: without a terminal there is no colour, and nothing that a program holds can steer the terminal (`shown`).
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Protocol

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..diagnostics.shown import shown
from ..model.architecture import Experts
from ..sharding.layout import Layout

WIDTH = 100


def size(number: float) -> str:
    """Bytes, decimal units, three digits."""
    for unit, one in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= one:
            return f"{number / one:.3g} {unit}" if number < 999.5 * one else f"{number / one:,.0f} {unit}"
    return f"{number:.0f} B"


def duration(seconds: float) -> str:
    if seconds == 0:
        return "0"
    for unit, one in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= one:
            return f"{seconds / one:,.0f} {unit}" if seconds >= 100 * one else f"{seconds / one:.3g} {unit}"
    return "< 1 us"


def many(number: int, noun: str) -> str:
    """So many of a thing, in words: `1 host`, `2 hosts`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def aged(mean: float, most: int) -> str:
    """How old weights are that generate."""
    return f"{mean:.3g} version{'' if mean == 1 else 's'} old on average, at most {most}"


def laid(layout: Layout) -> str:
    """A layout in words."""
    return f"{layout} zero{layout.zero}" if layout.zero > 1 else str(layout)


def spread(experts: Experts, layout: Layout) -> str:
    """What a rank has of a layer's experts, and the mesh that they lie in on the devices of a stage."""
    part = f"1/{layout.etp} of each of " if layout.etp > 1 else ""
    number = f"{experts.number // layout.ep} of {experts.number}" if layout.ep > 1 else f"all {experts.number}"
    return f"{part}{number} a rank; ep {layout.ep} x etp {layout.etp} x edp {layout.edp}"


class Sheet(Protocol):
    """What sections are written on: headings, and under each lines and tables."""

    def heading(self, text: str, more: str = "") -> None: ...
    def line(self, text: str) -> None: ...
    def table(
        self, head: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = (), keep: Sequence[int] = (0,)
    ) -> None:
        """`right` are the columns of figures, `keep` those that are never wrapped."""

    def closing(self, text: str) -> None:
        """What it comes to, in a sentence."""


class Page:
    """A sheet as text."""

    def __init__(self, width: int, colour: bool) -> None:
        self.out = io.StringIO()
        self.console = Console(
            file=self.out,
            width=width,
            force_terminal=colour,
            color_system="standard" if colour else None,
            highlight=False,
            emoji=False,
        )

    def heading(self, text: str, more: str = "") -> None:
        self.console.print()
        self.console.print(Text.assemble((shown(text), "bold"), f"  {shown(more)}" if more else ""))

    def line(self, text: str) -> None:
        self.console.print(Padding(Text(shown(text)), (0, 0, 0, 2)))

    def table(
        self, head: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = (), keep: Sequence[int] = (0,)
    ) -> None:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False, header_style="dim")
        for i, name in enumerate(head):
            figure = i in right
            table.add_column(name, justify="right" if figure else "left", no_wrap=figure or i in keep, overflow="fold")
        for row in rows:
            table.add_row(*(Text(shown(cell)) for cell in row))
        self.console.print(Padding(table, (0, 0, 0, 2)))

    def closing(self, text: str) -> None:
        self.console.print()
        self.console.print(Text(shown(text), style="bold"))

    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.out.getvalue().strip("\n").split("\n")) + "\n"
