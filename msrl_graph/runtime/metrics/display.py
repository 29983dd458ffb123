"""What a person sees of a run: a live line on a terminal, one plain line an iteration elsewhere.

Invariant: an iteration is called by its number, from 0, as in metrics, rows, logs and errors; what is counted are those
that are done.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from rich.console import Console, ConsoleDimensions, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ...diagnostics.terminal_text import shown
from ...emit.humanize import duration, many, size
from ...ir.evaluation import Evaluation
from ...ir.plan import Plan
from ..dock.messages import Status
from ..process.task import Task
from ..process.task_report import Report
from .recorder import METRICS
from .run_status import RunFacts
from .terminal_panel import panel


class Screen(Console):
    """A console whose reader may go away: no reason to end a run.

    It draws on a terminal alone. A notebook sets FORCE_COLOR, and rich would take its pipe for a terminal.
    """

    def __init__(self, **options: Any) -> None:
        given = {"force_terminal": is_terminal(options.get("file")), "force_jupyter": False}
        super().__init__(**given | options)

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(shown(o) if isinstance(o, str) else o for o in objects), **options)

    @property
    def size(self) -> ConsoleDimensions:
        """Of the terminal that it writes to, as it is now; rich asks standard streams, which may be others."""
        with suppress(OSError):
            if self.is_terminal:
                return ConsoleDimensions(*os.get_terminal_size(self.file.fileno()))
        return super().size

    @size.setter
    def size(self, new: tuple[int, int]) -> None:
        self.width, self.height = new

    def on_broken_pipe(self) -> None:
        self.quiet = True


def is_terminal(stream: IO[str] | None) -> bool:
    """Whether a stream leads to a terminal; None is the standard output."""
    try:
        return os.isatty((stream or sys.stdout).fileno())
    except (OSError, AttributeError, ValueError):
        return False


class Display:
    """`phase` and `iteration` may be called at any rate; nothing is drawn faster than a person sees. `watched`: on a
    terminal with all that is known (`panel`), else one line of it."""

    def __init__(self, plan: Plan, console: Console, watched: bool = False) -> None:
        self.console = console
        self.facts = RunFacts(plan)
        self.total = self.facts.total
        self.live = console.is_terminal
        self.progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[status]}"),
            TextColumn("[cyan]{task.fields[phase]}"),
            console=console,
        )
        self.task = self.progress.add_task(shown(plan.graph.name), total=self.total, status="", phase="starting")
        self.panel = (
            Live(console=console, get_renderable=self._panel, refresh_per_second=4, vertical_overflow="crop")
            if watched
            else None
        )
        if self.live:
            (self.panel or self.progress).start()
        self.last = "the start"

    def _panel(self) -> RenderableType:
        now = self.facts.now()
        self.progress.update(self.task, phase=shown(now.phase))
        return panel(now, self.progress.get_renderable(), self.facts.curve, self.console.width)

    def phase(self, name: str) -> None:
        self.last = self.facts.phase = name
        self.progress.update(self.task, phase=shown(name))

    def knows(self, lines: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> None:
        """Where metrics are kept."""
        self.facts.lines = lines
        self.facts.evaluations = evaluations

    def begin(self, task: Task) -> None:
        self.facts.begin(task)

    def wanted(self) -> bool:
        """Whether somebody who watches waits for a look at the docks."""
        return self.facts.wanted

    def look(self, statuses: Sequence[Status]) -> None:
        self.facts.look(statuses)

    def restarted(self, what: str) -> None:
        self.facts.restarts[what] += 1

    def resume(self, done: int) -> None:
        self.facts.done = done
        self.progress.update(self.task, completed=done)
        self.say(f"resumed after {many(done, 'iteration')}")

    def say(self, text: str) -> None:
        self.facts.said.append((time.time(), text))
        self._print(text)

    def _print(self, text: str) -> None:
        with suppress(OSError):
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def iteration(self, line: dict[str, Any], scalars: list[str], reports: Sequence[Report] = ()) -> None:
        """`scalars` are the columns whose means are shown."""
        self.facts.iteration(line, scalars, reports)
        # What has a unit for a name.
        words = "  ".join(f"{v} {n}" if n in ("tokens/s", "s") else f"{n} {v}" for n, v in self.facts.figures)
        done = self.facts.done
        if self.live:
            self.progress.update(self.task, completed=done, status="" if self.panel else words)
        else:
            self._print(f"iteration {line['iteration']} ({done} of {self.total})  " + words)

    def close(self) -> None:
        if self.live:
            self.live = False
            (self.panel or self.progress).stop()


class Tail:
    """Shows what the processes of a run print into their logs, until it is closed."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder = folder
        self.say = say
        # What an earlier attempt wrote was shown by it.
        self.places = {path: path.stat().st_size for path in folder.glob("*.log")}
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self.over.wait(0.3):
            self._look()

    def _look(self) -> None:
        for path in sorted(self.folder.glob("*.log")):
            with path.open("rb") as file:
                file.seek(self.places.get(path, 0))
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self.places[path] = self.places.get(path, 0) + len(whole)
            for line in whole.decode("utf-8", "replace").splitlines():
                self.say(line)

    def close(self) -> None:
        self.over.set()
        self.thread.join()
        self._look()


SHOWN: dict[str, Callable[[float], str]] = {"s": duration, "B": size, "versions": "{:.2f}".format}


def evaluated(evaluation: Evaluation, found: Mapping[str, float]) -> str:
    """What an evaluation gave, for a line: figures of all rows. Those of parts, and those without a value, are in the
    metrics only."""
    line = [f"{key} {found[key]:.3f}" for key in evaluation.figures if not math.isnan(found.get(key, math.nan))]
    if more := len(found) - len(line):
        line.append(
            f"and {more} more in {METRICS}" if line else f"no figure of all rows; {many(more, 'figure')} in {METRICS}"
        )
    return f"{evaluation.task}: {'  '.join(line)}"


def comparison(rows: list[tuple[str, str, float, float, str]]) -> Table:
    """Predicted against measured."""
    table = Table(
        title="predicted against measured, an iteration (medians)", title_justify="left", box=None, padding=(0, 2, 0, 0)
    )
    table.add_column("what", no_wrap=True)
    for name in ("predicted", "measured", "ratio"):
        table.add_column(name, justify="right")
    table.add_column("predicted from")
    for what, unit, predicted, measured, source in rows:
        show = SHOWN[unit]
        ratio = f"{predicted / measured:.2f}" if measured else "-"
        table.add_row(what, show(predicted), show(measured), ratio, source)
    return table
