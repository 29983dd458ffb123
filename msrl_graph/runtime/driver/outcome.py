"""How a run ended: what it has left, as Python reads it, or why it ended early.

Invariant: all of it is read from the run's folder when it is asked for. A figure that a run could not compute is null.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ...diagnostics import Diagnostic, Fault, kind_of, public, render
from ...files import urls
from ...ir.plan import Plan
from ..data.row_files import FOLDER as ROWS
from ..metrics.best import BestFigure, best_figures
from ..metrics.recorder import METRICS, read, whole_lines
from ..weights import checkpoint


class RunFailed(Exception):
    """A process died, or a wait passed its deadline."""


class Interrupted(Exception):
    """The run was asked to end: by what, and when; `status` is the exit status that a shell expects."""

    def __init__(self, status: int, when: str) -> None:
        number = status - 128
        by = signal.Signals(number).name if number in {*signal.Signals} else f"status {status}"
        super().__init__(f"interrupted by {by} {when}")
        self.status = status


@dataclass(frozen=True)
class Outcome:
    """Where the files lie, a text where that is a URL, and each reported mean, first and last, by what a person calls
    it."""

    folder: Path | str
    reported: dict[str, tuple[float, float]]
    evaluated: bool = False  # once, and nothing was trained
    bests: tuple[BestFigure, ...] = ()

    def lines(self) -> list[str]:
        """Each evaluation before and after, in a line, and where the best checkpoint is."""
        means = [
            f"{name} {first:.3f}" + ("" if self.evaluated else f" -> {last:.3f}")
            for name, (first, last) in self.reported.items()
        ]
        places = self.best
        for best in self.bests:
            lacks = ", of which this folder has no checkpoint" if best.iteration else ""
            means.append(f"best: {best.words}" + (f": {places[best.name]}" if best.name in places else lacks))
        return means

    @property
    @public
    def best(self) -> dict[str, Path | str]:
        """The checkpoint with the best figure of each evaluation that states `best`, by what a person calls the figure.

        It lacks those whose best figure came before the training, and those whose checkpoint another folder has.
        """
        there = self._names(checkpoint.FOLDER) if any(best.iteration for best in self.bests) else []
        found: dict[str, Path | str] = {}
        for best in self.bests:
            if (name := checkpoint.named(best.iteration)) in there:
                place = (checkpoint.FOLDER, name)
                folder = self.folder
                path = urls.under(folder, *place) if isinstance(folder, str) else folder.joinpath(*place)
                found[best.name] = path
        return found

    @property
    @public
    def metrics(self) -> Any:
        """The metrics of all iterations as an Arrow table, a row for each; `to_pandas()` makes a data frame of it.

        A figure of a group, as of `phases`, is a column of its own: `phases/reshard`.
        """
        return _table(line for line in self._lines() if "iteration" in line)

    @property
    @public
    def evaluations(self) -> Any:
        """The evaluations as an Arrow table, a row for each."""
        return _table(line for line in self._lines() if "evaluation" in line)

    @public
    def rows(self, iteration: int, generation: str | None = None) -> Any:
        """The recorded rows of an iteration, from 0, as an Arrow table.

        A program with several generations has a table for each: `generation` is the column that it writes.
        """
        if not isinstance(iteration, int) or isinstance(iteration, bool) or iteration < 0:
            given = str(iteration) if isinstance(iteration, int) else kind_of(iteration)
            _refuse("bad-value", f"`iteration` is a whole number from 0, not {given}")
        tables = self._names(ROWS)
        if not tables:
            _refuse("missing-file", f"the run in {self.folder} recorded no rows", "run it with `record=True`")
        several = sorted(name for name in tables if not name.endswith((".parquet", ".partial")))
        if several and generation not in several:
            shown = ", ".join(f"`{name}`" for name in several)
            what = (
                f"`{generation}` is not a generation of this run" if generation else "the run has several generations"
            )
            _refuse("bad-value", f"{what}: {shown}", f'name one: rows({iteration}, "{several[-1]}")')
        if not several and generation is not None:
            _refuse("bad-value", "the run has one table of rows", f"leave out `generation`: rows({iteration})")
        folder = (ROWS, generation) if generation else (ROWS,)
        recorded = [int(name[:6]) for name in self._names(*folder) if re.fullmatch(r"\d{6,}\.parquet", name)]
        if iteration not in recorded:
            there = f"it has {min(recorded)} to {max(recorded)}" if recorded else "it has none"
            _refuse("missing-file", f"the recording in {self.folder} has no iteration {iteration}: {there}")
        from pyarrow import parquet

        with parquet.ParquetFile(self._file(*folder, f"{iteration:06d}.parquet")) as source:
            return source.read()

    def _lines(self) -> list[dict[str, Any]]:
        """The lines of the metrics; what JSON has no number for is None."""
        if METRICS not in self._names():
            _refuse("missing-file", f"there are no metrics in {self.folder}", "the run has not been started")
        lines, _ = whole_lines(self._file(METRICS))
        return [json.loads(line) for line in lines]

    def _names(self, *folder: str) -> list[str]:
        """The names in a folder of the run, none where it is not there."""
        if isinstance(self.folder, str):
            url = urls.under(self.folder, *folder)
            with urls.told(url):
                return urls.names(url)
        path = self.folder.joinpath(*folder)
        return sorted(file.name for file in path.iterdir()) if path.is_dir() else []

    def _file(self, *names: str) -> Path:
        if isinstance(self.folder, str):
            return urls.copy(urls.under(self.folder, *names))
        return self.folder.joinpath(*names)


def outcome_of(plan: Plan, folder: Path, evaluated: bool) -> tuple[Outcome, str]:
    """Return the outcome of the run in a folder, and what is wrong with its metrics, "" where nothing is."""
    evaluations = {e.task: e for e in plan.deploy.evaluations}
    means: dict[str, tuple[float, float]] = {}
    texts, wrong = whole_lines(folder / METRICS)
    lines = [read(text) for text in texts]
    for line in lines:
        if evaluation := evaluations.get(line.get("evaluation", "")):
            for name, value in ((evaluation.title(c), line[c]) for c in evaluation.report if c in line):
                means[name] = (means.get(name, (value,))[0], value)
    bests = () if evaluated else best_figures(plan.deploy.evaluations, lines)
    return Outcome(folder, means, evaluated or not plan.deploy.run.iterations, tuple(bests)), wrong


def _table(lines: Iterable[Mapping[str, Any]]) -> Any:
    """A table with a column for each figure that any of the lines has."""
    import pyarrow as pa

    rows = [dict(_flat(line)) for line in lines]
    names = list(dict.fromkeys(name for row in rows for name in row))
    return pa.table({name: _column([row.get(name) for row in rows]) for name in names})


def _column(values: Sequence[Any]) -> Any:
    import pyarrow as pa

    array = pa.array(values)
    return array.cast(pa.float64()) if pa.types.is_null(array.type) else array


def _flat(line: Mapping[str, Any], lead: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in line.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{lead}{key}/")
        else:
            yield lead + key, value


def _refuse(code: str, message: str, help: str = "") -> NoReturn:
    told = Diagnostic(code, message, help=help)
    fault = Fault(told)
    fault.text = render(told, {})
    raise fault


__all__ = ["Interrupted", "Outcome", "RunFailed", "outcome_of"]
