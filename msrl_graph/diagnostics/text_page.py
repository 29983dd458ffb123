"""A page of text for users: headings, lines and tables.

Invariant: if the output is not a terminal, there is no color. No text of a program can control the terminal
(`make_printable`).
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from .terminal_text import make_printable

WIDTH = 100


class Page:
    """A page that is written as plain text, or as text with terminal colors."""

    def __init__(self, width: int, colour: bool) -> None:
        self.out = io.StringIO()
        self.console = Console(
            file=self.out,
            width=width,
            force_terminal=colour,
            force_jupyter=False,  # a notebook would show each line in a cell of its own, and return no text
            color_system="standard" if colour else None,
            highlight=False,
            emoji=False,
        )

    def heading(self, text: str, more: str = "") -> None:
        self.console.print()
        self.console.print(Text.assemble((make_printable(text), "bold"), f"  {make_printable(more)}" if more else ""))

    def line(self, text: str) -> None:
        self.console.print(Padding(Text(make_printable(text)), (0, 0, 0, 2)))

    def table(
        self,
        headings: Sequence[str],
        rows: Iterable[Sequence[str]],
        right: Sequence[int] = (),
        keep: Sequence[int] = (0,),
    ) -> None:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False, header_style="dim")
        for index, name in enumerate(headings):
            figure = index in right
            table.add_column(
                name, justify="right" if figure else "left", no_wrap=figure or index in keep, overflow="fold"
            )
        for row in rows:
            table.add_row(*(Text(make_printable(cell)) for cell in row))
        self.console.print(Padding(table, (0, 0, 0, 2)))

    def closing(self, text: str) -> None:
        self.console.print()
        self.console.print(Text(make_printable(text), style="bold"))

    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.out.getvalue().strip("\n").split("\n")) + "\n"
