"""What a person sees of a run: a live line on a terminal, one plain line an iteration elsewhere.

Invariant: an iteration is called by its number, from 0, as in metrics, rows, logs and errors; what is counted are those
that are done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ...diagnostics.shown import shown
from ...emit.page import duration, many, size
from ...ir.plan import Plan


class Screen(Console):
    """A console whose reader may go away: no reason to end a run."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(shown(o) if isinstance(o, str) else o for o in objects), **options)

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Display:
    """`phase` and `iteration` may be called at any rate; nothing is drawn faster than a person sees."""

    def __init__(self, plan: Plan, console: Console) -> None:
        self.console = console
        self.total = plan.deploy.run.iterations
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
        if self.live:
            self.progress.start()
        self.last = "the start"

    def phase(self, name: str) -> None:
        self.last = name
        self.progress.update(self.task, phase=shown(name))

    def resume(self, done: int) -> None:
        self.progress.update(self.task, completed=done)
        self.say(f"resumed after {many(done, 'iteration')}")

    def say(self, text: str) -> None:
        with suppress(OSError):
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def iteration(self, line: dict[str, Any], scalars: list[str]) -> None:
        """`scalars` are the columns whose means are shown."""
        shown = [f"{name} {line[name]:.3f}" for name in scalars if name in line]
        # Of several updates all together; how far the policy is from the reference, or else from the one that drew.
        kl = next((k for k in ("loss/kl", "clip/kl") if k in line), "")
        for name, key in (("loss", "loss"), ("kl", kl), ("grad_norm", "grad_norm"), ("length", "response_length")):
            shown += [f"{name} {line[key]:.3g}"] if key in line else []
        shown += [f"{line['tokens_per_second']:,.0f} tokens/s", f"{line['seconds']:.2f} s"]
        done = line["iteration"] + 1
        if self.live:
            self.progress.update(self.task, completed=done, status="  ".join(shown))
        else:
            self.say(f"iteration {line['iteration']} ({done} of {self.total})  " + "  ".join(shown))

    def close(self) -> None:
        if self.live:
            self.live = False
            self.progress.stop()


class Tail:
    """Shows what the processes of a run print into their logs, until it is closed."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder, self.say = folder, say
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
        show = duration if unit == "s" else size
        ratio = f"{predicted / measured:.2f}" if measured else "-"
        table.add_row(what, show(predicted), show(measured), ratio, source)
    return table
