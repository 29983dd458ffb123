"""Outcome of a run: its results as Python objects, or why it ended early.

Invariant: results are read from the run's folder when the caller requests them. A figure that a run could not compute
is null.
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
from ..metrics.metrics_file import METRICS, parse_line, read_valid_lines
from ..weights import checkpoint


class RunFailed(Exception):
    """A run failed, for example because a process died or a wait passed its deadline."""


class Interrupted(Exception):
    """A signal asked the run to end.

    `when` is a text that says when the run ended, for example after how many iterations. `status` is the exit status
    that a shell expects: 128 plus the number of the signal.
    """

    def __init__(self, status: int, when: str) -> None:
        number = status - 128
        by = signal.Signals(number).name if number in {*signal.Signals} else f"status {status}"
        super().__init__(f"interrupted by {by} {when}")
        self.status = status


@dataclass(frozen=True)
class Outcome:
    """Results of a run.

    `folder` contains the files of the run; it is a string if the folder is at a URL. The evaluations report means of
    columns. For each mean, `reported` has the first and the last value, under the title of the mean.
    """

    folder: Path | str
    reported: dict[str, tuple[float, float]]
    evaluated: bool = False  # only evaluated once, nothing trained
    bests: tuple[BestFigure, ...] = ()

    def lines(self) -> list[str]:
        """Describe each evaluation before and after training, and the best checkpoints."""
        means = [
            f"{name} {first:.3f}" + ("" if self.evaluated else f" -> {last:.3f}")
            for name, (first, last) in self.reported.items()
        ]
        places = self.best
        for best in self.bests:
            note = ", whose checkpoint is not in this folder" if best.iteration else ""
            means.append(f"best: {best.description}" + (f": {places[best.name]}" if best.name in places else note))
        return means

    @property
    @public
    def best(self) -> dict[str, Path | str]:
        """The checkpoint at which each evaluation's `best` figure has its best value.

        A program chooses a figure of an evaluation with the attribute `best`. The keys of the result are the titles of
        these figures. A figure is left out if its best value was reached before the training, or if the checkpoint with
        this value is not in the run's folder.
        """
        saved = self._list_names(checkpoint.FOLDER) if any(best.iteration for best in self.bests) else []
        checkpoints: dict[str, Path | str] = {}
        for best in self.bests:
            if (name := checkpoint.folder_name(best.iteration)) in saved:
                place = (checkpoint.FOLDER, name)
                folder = self.folder
                path = urls.join(folder, *place) if isinstance(folder, str) else folder.joinpath(*place)
                checkpoints[best.name] = path
        return checkpoints

    @property
    @public
    def metrics(self) -> Any:
        """The metrics of all iterations as an Arrow table, with one row per iteration.

        `to_pandas()` converts the table to a data frame. If a figure has several parts, such as `phases`, each part has
        its own column, such as `phases/reshard`.
        """
        return _make_table(line for line in self._read_lines() if "iteration" in line)

    @property
    @public
    def evaluations(self) -> Any:
        """The evaluations as an Arrow table, with one row per evaluation."""
        return _make_table(line for line in self._read_lines() if "evaluation" in line)

    @public
    def rows(self, iteration: int, generation: str | None = None) -> Any:
        """Return the recorded rows of an iteration (from 0) as an Arrow table.

        If the program has several generation nodes, each node has its own table, which is named after the column that
        the node writes. In this case, `generation` is the name of the table. Raises Fault if there is no such table.
        """
        if not isinstance(iteration, int) or isinstance(iteration, bool) or iteration < 0:
            value = str(iteration) if isinstance(iteration, int) else kind_of(iteration)
            _refuse("bad-value", f"`iteration` is a whole number from 0, not {value}")
        tables = self._list_names(ROWS)
        if not tables:
            _refuse("missing-file", f"the run in {self.folder} recorded no rows", "run it with `record=True`")
        several = sorted(name for name in tables if not name.endswith((".parquet", ".partial")))
        if several and generation not in several:
            shown = ", ".join(f"`{name}`" for name in several)
            message = (
                f"`{generation}` is not a generation of this run" if generation else "the run has several generations"
            )
            _refuse("bad-value", f"{message}: {shown}", f'name one: rows({iteration}, "{several[-1]}")')
        if not several and generation is not None:
            _refuse("bad-value", "the run has one table of rows", f"leave out `generation`: rows({iteration})")
        folder = (ROWS, generation) if generation else (ROWS,)
        recorded = [int(name[:6]) for name in self._list_names(*folder) if re.fullmatch(r"\d{6,}\.parquet", name)]
        if iteration not in recorded:
            available = f"it has {min(recorded)} to {max(recorded)}" if recorded else "it has none"
            _refuse("missing-file", f"the recording in {self.folder} has no iteration {iteration}: {available}")
        from pyarrow import parquet

        with parquet.ParquetFile(self._fetch_file(*folder, f"{iteration:06d}.parquet")) as source:
            return source.read()

    def _read_lines(self) -> list[dict[str, Any]]:
        """Read the lines of metrics.jsonl; null (for NaN and infinity) becomes None."""
        if METRICS not in self._list_names():
            _refuse("missing-file", f"there are no metrics in {self.folder}", "the run has not been started")
        lines, _ = read_valid_lines(self._fetch_file(METRICS))
        return [json.loads(line) for line in lines]

    def _list_names(self, *folder: str) -> list[str]:
        """Return the file names in a folder of the run; [] if the folder is missing."""
        if isinstance(self.folder, str):
            url = urls.join(self.folder, *folder)
            with urls.report_errors(url):
                return urls.names(url)
        path = self.folder.joinpath(*folder)
        return sorted(file.name for file in path.iterdir()) if path.is_dir() else []

    def _fetch_file(self, *names: str) -> Path:
        if isinstance(self.folder, str):
            return urls.copy(urls.join(self.folder, *names))
        return self.folder.joinpath(*names)


def outcome_of(plan: Plan, folder: Path, evaluated: bool) -> tuple[Outcome, str]:
    """Return the outcome of a run, and a description of damage to its metrics file.

    The description is "" if the metrics file is intact. `evaluated` means that the run only evaluated weights.
    """
    evaluations = {candidate.task: candidate for candidate in plan.deploy.evaluations}
    means: dict[str, tuple[float, float]] = {}
    texts, wrong = read_valid_lines(folder / METRICS)
    lines = [parse_line(text) for text in texts]
    for line in lines:
        if evaluation := evaluations.get(line.get("evaluation", "")):
            for name, value in (
                (evaluation.title(column), line[column]) for column in evaluation.report if column in line
            ):
                means[name] = (means.get(name, (value,))[0], value)
    bests = () if evaluated else best_figures(plan.deploy.evaluations, lines)
    return Outcome(folder, means, evaluated or not plan.deploy.run.iterations, tuple(bests)), wrong


def _make_table(lines: Iterable[Mapping[str, Any]]) -> Any:
    """Make a table with one column for each figure that occurs in any of the lines."""
    import pyarrow as pa

    rows = [dict(_flatten(line)) for line in lines]
    names = list(dict.fromkeys(name for row in rows for name in row))
    return pa.table({name: _make_column([row.get(name) for row in rows]) for name in names})


def _make_column(values: Sequence[Any]) -> Any:
    import pyarrow as pa

    array = pa.array(values)
    return array.cast(pa.float64()) if pa.types.is_null(array.type) else array


def _flatten(line: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in line.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}/")
        else:
            yield prefix + key, value


def _refuse(code: str, message: str, help: str = "") -> NoReturn:
    diagnostic = Diagnostic(code, message, help=help)
    fault = Fault(diagnostic)
    fault.text = render(diagnostic, {})
    raise fault


__all__ = ["Interrupted", "Outcome", "RunFailed", "outcome_of"]
