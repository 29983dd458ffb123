"""Display of a run: a live line on a terminal; elsewhere, one line per iteration.

Invariant: an iteration is displayed with its number, counted from 0. Metrics, recorded rows, logs and errors use the
same number. A displayed count is the number of finished iterations.
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

from ...diagnostics.quantities import duration, plural, size
from ...diagnostics.terminal_text import make_printable
from ...ir.evaluation import Evaluation
from ...ir.plan import Plan
from ..dock.messages import Status
from ..process.task import Task
from ..process.task_report import Report
from .metrics_file import METRICS
from .recorder import figures_of
from .run_status import RunFacts
from .terminal_panel import panel


class Screen(Console):
    """A console that ignores a broken pipe, so that the run continues.

    The console draws only on a terminal. The class `Console` of the library rich would treat the pipe of a notebook as
    a terminal, because notebooks set FORCE_COLOR.
    """

    def __init__(self, **options: Any) -> None:
        defaults = {"force_terminal": is_terminal(options.get("file")), "force_jupyter": False}
        super().__init__(**defaults | options)

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(make_printable(item) if isinstance(item, str) else item for item in objects), **options)

    @property
    def size(self) -> ConsoleDimensions:
        """Current size of the terminal that this console writes to.

        rich measures the standard streams instead, which may be connected to other terminals.
        """
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
    """Return whether a stream is a terminal; None means the standard output."""
    try:
        return os.isatty((stream or sys.stdout).fileno())
    except (OSError, AttributeError, ValueError):
        return False


class Display:
    """Display of a run's progress.

    The methods `phase` and `iteration` can be called at any rate, because the display limits the rate of drawing. If
    `watched` is true, a terminal shows everything that is known about the run (terminal_panel.py). If `watched` is
    false, a terminal shows one line.
    """

    def __init__(self, plan: Plan, console: Console, watched: bool = False) -> None:
        self.console = console
        self.facts = RunFacts(plan)
        self.total = self.facts.total
        self.evaluations = {evaluation.task: evaluation for evaluation in plan.deploy.evaluations}
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
        self.task = self.progress.add_task(
            make_printable(plan.graph.name), total=self.total, status="", phase="starting"
        )
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
        self.progress.update(self.task, phase=make_printable(now.phase))
        return panel(now, self.progress.get_renderable(), self.facts.curve, self.console.width)

    def phase(self, name: str) -> None:
        self.last = self.facts.phase = name
        self.progress.update(self.task, phase=make_printable(name))

    def begin(self, task: Task) -> None:
        self.facts.begin(task)

    def wanted(self) -> bool:
        """Return whether a watcher (terminal, web page, Prometheus) waits for new data.

        If the result is true, the driver queries the docks for the data.
        """
        return self.facts.wanted

    def look(self, statuses: Sequence[Status]) -> None:
        self.facts.look(statuses)

    def restarted(self, process: str) -> None:
        self.facts.restarts[process] += 1

    def resume(self, done: int) -> None:
        self.facts.done = done
        self.progress.update(self.task, completed=done)
        self.say(f"resumed after {plural(done, 'iteration')}")

    def say(self, text: str) -> None:
        self.facts.said.append((time.time(), text))
        self._print(text)

    def _print(self, text: str) -> None:
        with suppress(OSError):
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def count_waits(self, reports: Sequence[Report]) -> None:
        self.facts.count_waits(reports)

    def add(self, line: dict[str, Any]) -> None:
        """Show a new line of metrics.jsonl, here, on the page and for Prometheus."""
        self.facts.add(line)
        if (evaluation := self.evaluations.get(line.get("evaluation", ""))) is not None:
            if not self.live:
                after = plural(line["after_iterations"], "iteration")
                self.say(f"after {after}, {format_evaluation(evaluation, figures_of(line))}")
            return
        # A figure that is named by its unit has the name after the value.
        words = "  ".join(
            f"{value} {name}" if name in ("tokens/s", "s") else f"{name} {value}" for name, value in self.facts.figures
        )
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
    """A thread that prints new log lines of a run's processes until `close` is called."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder = folder
        self.say = say
        # Lines of an earlier attempt were shown by that attempt.
        self.places = {path: path.stat().st_size for path in folder.glob("*.log")}
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self.closed.wait(0.3):
            self._look()

    def _look(self) -> None:
        for path in sorted(self.folder.glob("*.log")):
            with path.open("rb") as file:
                file.seek(self.places.get(path, 0))
                text = file.read()
            complete = text[: text.rfind(b"\n") + 1]
            self.places[path] = self.places.get(path, 0) + len(complete)
            for line in complete.decode("utf-8", "replace").splitlines():
                self.say(line)

    def close(self) -> None:
        self.closed.set()
        self.thread.join()
        self._look()


SHOWN: dict[str, Callable[[float], str]] = {"s": duration, "B": size, "versions": "{:.2f}".format}


def format_evaluation(evaluation: Evaluation, values: Mapping[str, float]) -> str:
    """Format, as one line, the figures that an evaluation computed over all rows.

    Two kinds of figures are not shown: figures over a part of the rows, and figures without a value. The line only says
    how many more figures metrics.jsonl contains.
    """
    line = [f"{key} {values[key]:.3f}" for key in evaluation.figures if not math.isnan(values.get(key, math.nan))]
    if more := len(values) - len(line):
        line.append(
            f"and {more} more in {METRICS}" if line else f"no figure of all rows; {plural(more, 'figure')} in {METRICS}"
        )
    return f"{evaluation.task}: {'  '.join(line)}"


def comparison_table(rows: list[tuple[str, str, float, float, str]]) -> Table:
    """Return a table that compares predicted values with measured values.

    Each row is (label, unit, predicted value, measured value, source of the prediction).
    """
    table = Table(
        title="predicted against measured, an iteration (medians)", title_justify="left", box=None, padding=(0, 2, 0, 0)
    )
    table.add_column("what", no_wrap=True)
    for name in ("predicted", "measured", "ratio"):
        table.add_column(name, justify="right")
    table.add_column("predicted from")
    for label, unit, predicted, measured, source in rows:
        formatted = SHOWN[unit]
        ratio = f"{predicted / measured:.2f}" if measured else "-"
        table.add_row(label, formatted(predicted), formatted(measured), ratio, source)
    return table
